"""The order in which files are read and written in the background."""

from __future__ import annotations

import threading

import pytest

from kvpolicy.tiers.io_threads import IoThreads
from tests.tiers.blocks import no_thread_starts, when_closing


def test_no_load_waits_for_a_store_and_stores_keep_their_order() -> None:
    done: list[str] = []
    go_on = threading.Event()
    threads: IoThreads[list[str]] = IoThreads(2, lambda: done)
    threads.start()
    began = threading.Event()

    def block(state: list[str]) -> None:
        began.set()
        go_on.wait()
        state.append("first")

    threads.store(block)
    began.wait()
    for number in range(3):
        threads.store(lambda state, number=number: state.append(f"store {number}"))  # type: ignore[misc]
    loaded = threading.Event()
    threads.load(lambda state: (state.append("load"), loaded.set()))
    assert loaded.wait(30), "a load waited for a store"
    go_on.set()
    threads.wait_idle()
    assert done == ["load", "first", "store 0", "store 1", "store 2"]
    threads.close()


def test_loads_that_wait_go_before_stores_that_wait() -> None:
    done: list[str] = []
    go_on, began = threading.Event(), [threading.Event(), threading.Event()]
    threads: IoThreads[None] = IoThreads(2, lambda: None)
    threads.start()
    threads.store(lambda _: (began[0].set(), go_on.wait()))
    began[0].wait()
    threads.load(lambda _: (began[1].set(), go_on.wait()))
    began[1].wait()
    threads.store(lambda _: done.append("store"))
    for _ in range(3):
        threads.load(lambda _: done.append("load"))
    go_on.set()
    threads.wait_idle()
    threads.close()
    assert done[0] == "load" and sorted(done) == ["load"] * 3 + ["store"]


def test_what_waits_is_forgotten_at_the_end_and_what_runs_ends() -> None:
    done: list[str] = []
    go_on, began = threading.Event(), threading.Event()
    threads: IoThreads[None] = IoThreads(2, lambda: None)
    threads.start()
    threads.store(lambda _: (began.set(), go_on.wait(), done.append("ran")))
    began.wait()
    threads.store(lambda _: done.append("waited"))
    going_on = when_closing(threads, go_on.set)
    threads.close()
    going_on.join()
    assert done == ["ran"]


def test_who_waits_until_nothing_is_under_way_may_stop_waiting() -> None:
    go_on, threads = threading.Event(), IoThreads[None](2, lambda: None)
    threads.start()
    assert threads.wait_idle(0.01)
    threads.store(lambda _: go_on.wait())
    assert not threads.wait_idle(0.01)
    go_on.set()
    assert threads.wait_idle()
    threads.close()


def test_nobody_waits_for_what_is_done_aside_until_the_end() -> None:
    done: list[str] = []
    go_on, began, threads = threading.Event(), threading.Event(), IoThreads[None](2, lambda: None)
    threads.start()
    threads.aside(lambda _: (began.set(), go_on.wait(), done.append("aside")))
    threads.aside(lambda _: done.append("waits behind it"))
    began.wait()
    threads.store(lambda _: done.append("store"))
    threads.load(lambda _: done.append("load"))
    assert threads.wait_idle(30) and sorted(done) == ["load", "store"]
    going_on = when_closing(threads, go_on.set)
    threads.close()
    going_on.join()
    assert done[2:] == ["aside"]


@pytest.mark.parametrize("failing", ["0", "1", "aside"])
def test_where_a_thread_cannot_be_started_none_is_left(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    no_thread_starts(monkeypatch, f"kvpolicy-files-{failing}")
    before, threads = threading.active_count(), IoThreads[None](2, lambda: None)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        threads.start()
    assert threading.active_count() == before
