"""Who waits for files, and who is asked again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy_vllm.plugin.file_reads import MAX_WAIT_S
from kvpolicy_vllm.plugin.file_waits import FileWaits
from kvpolicy_vllm.plugin.messages import FileJob, FileReport
from tests.plugin.test_file_index import CHAIN, Core


class Waiting(Core):
    """All requests have the same prompt. ``is_worth``: whether any better loads than computes."""

    def __init__(self, ready: bool = True) -> None:
        super().__init__(ranks=1)
        self.waits = FileWaits(self.index, lambda request, first, end: CHAIN[first:end], self._is_worth)
        self.is_worth, self.decided = True, list[tuple[str, int, int]]()
        if ready:
            self.index.acknowledge([FileReport(ready=True)])
            self.stored()
            self.drop_from_host()

    def _is_worth(self, request: Any, first: int, blocks: int, read_s: float) -> bool:
        self.decided.append((request.request_id, first, blocks))
        return self.is_worth

    def asks(self, name: str, first: int = 0) -> bool:
        return self.waits.waits(SimpleNamespace(request_id=name), 0, first, CHAIN[first:])

    def load(self) -> FileJob:
        (_, (job,)) = self.jobs()
        return job


def test_what_was_answered_of_a_load_holds_as_long_as_that_is_under_way() -> None:
    core = Waiting()
    assert core.waits.known("one", 0) is None
    assert core.asks("one") and core.asks("two")
    core.is_worth = False
    assert not core.asks("three") and core.asks("two")
    assert [core.waits.known(name, 0) for name in ("one", "two", "three")] == [True, True, False]
    assert core.decided == [("one", 0, 3), ("two", 0, 3), ("three", 0, 3)], "each is decided once"
    assert core.waits.known("one", 1) is None, "the device has more by now"
    core.report(core.load())
    assert [core.waits.known(name, 0) for name in ("one", "two", "three")] == [None] * 3


@pytest.mark.parametrize(("why", "known"), [("late", False), ("reset", None), ("suspended", None)])
def test_nothing_is_known_of_a_load_that_nobody_waits_for_any_more(why: str, known: bool | None) -> None:
    """But that the request is computed once no load is under way, since it has looked files up before."""
    core = Waiting()
    core.asks("one")
    if why == "late":
        core.now += MAX_WAIT_S
        core.steps()
    elif why == "reset":
        core.index.forget()
    else:
        core.index._reads.late()
    assert core.waits.known("one", 0) is known and not core.asks("one")


def test_who_would_not_begin_a_load_is_known_to_go_on_as_long_as_nobody_begins_one() -> None:
    """What another one brings may be worth waiting for."""
    core = Waiting()
    core.is_worth = False
    assert core.waits.known("one", 0) is None and not core.asks("one")
    assert core.waits.known("one", 0) is False and core.waits.known("one", 3) is False
    assert core.waits.known("two", 0) is None, "it has not looked files up"
    core.is_worth = True
    assert not core.asks("one") and core.asks("two")
    assert core.waits.known("one", 0) is None and core.asks("one"), "two brings what one needs"
    job = core.load()
    assert [core.waits.known(name, 0) for name in ("one", "two")] == [True, True], "workers have heard of it"
    core.report(job)
    assert core.waits.known("one", 0) is False and not core.asks("one")
    core.waits.forget("one")
    assert core.waits.known("one", 0) is None


def test_all_wait_until_ranks_have_said_what_an_earlier_server_left() -> None:
    core = Waiting(ready=False)
    assert core.asks("one") and core.waits.known("one", 0) and core.waits.names == {"one"}
    core.index.acknowledge([FileReport(ready=True)])
    assert core.waits.known("one", 0) is None and not core.asks("one") and not core.decided


def test_who_has_lost_its_blocks_may_ask_again() -> None:
    core = Waiting()
    core.asks("one")
    core.report(core.load())
    core.waits.admitted("one")
    core.drop_from_host()
    assert not core.asks("one") and core.waits.names == {"one"}, "what came is gone again"
    core.waits.forget("one")
    assert not core.waits.names and core.asks("one") and core.load().keys == tuple(CHAIN)
