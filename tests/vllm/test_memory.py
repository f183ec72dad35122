"""What is looked for in a process that runs many schedules: growing memory, and requests that have ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from kvpolicy.order.queue import OrderedQueue
from tests.vllm import memory, soak
from tests.vllm.memory import MAX_GROWTH_KIB, WARM_UP, grown_kib, naming, read_growth, write

FLAT = [9 * MAX_GROWTH_KIB] * 100


@pytest.mark.parametrize(
    ("resident", "grown"),
    [
        (FLAT, 0),
        ([10 * number for number in range(WARM_UP)] + FLAT, 0),
        ([1000 + 10 * number for number in range(WARM_UP + 60)], 400),
        ([*FLAT[:50], 99 * MAX_GROWTH_KIB, *FLAT[:49]], 0),
        (FLAT[: WARM_UP + 14], None),
        ([], None),
    ],
)
def test_growth_is_from_the_first_to_the_last_third_after_the_warm_up(resident: list[int], grown: int | None) -> None:
    assert grown_kib(resident) == grown


def test_a_process_that_grows_is_a_failure(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    assert read_growth(results) is None
    for each_kib, leaks in ((0, False), (400, True)):
        write(results, [10**6 + each_kib * number for number in range(125)])
        summary = soak.Summary("0.32.0", (), read_growth(results))
        assert summary.leaks == leaks and "memory grew by " in str(summary)
        assert (", more than 8" in str(summary)) == leaks
    assert "memory not compared" in str(soak.Summary("0.32.0", ()))


def test_memory_that_is_free_is_given_back() -> None:
    before = memory.resident_kib()
    held = [bytes(1000) for _ in range(50_000)]
    assert memory.resident_kib() - before > 40_000
    del held
    assert memory.resident_kib() - before < 20_000


class Holder:
    """Stands for an object of the plugin."""

    __module__ = "kvpolicy_vllm.plugin.made_up"

    def __init__(self, **values: Any) -> None:
        self.__dict__ |= values


REQUEST = SimpleNamespace(request_id="r1")


class Weak:
    """May be referred to weakly."""

    request_id = "r1"


WEAK = Weak()


def queue_of(count: int) -> OrderedQueue[str]:
    queue = OrderedQueue[str](len)
    for _ in range(count):
        queue.append("r1")
    queue._keys.clear()
    return queue


@pytest.mark.parametrize(
    ("held", "found"),
    [
        (lambda: {"r1": 0}, ["Holder.held holds 1 requests that have ended"]),
        (lambda: {0: REQUEST, 1: REQUEST}, ["Holder.held holds 2 requests that have ended"]),
        (lambda: {(0, "r1")}, ["Holder.held holds 1 requests that have ended"]),
        (lambda: [Holder(inner={"r1"})], ["Holder.held[].inner holds 1 requests that have ended"]),
        (lambda: ["r1"] * 17, ["Holder.held holds 17 requests that have ended"]),
        (lambda: ["r1"] * 16, []),
        (lambda: queue_of(16), []),
        (lambda: {"r2": 0}, []),
        (lambda: WeakKeyDictionary({WEAK: 1}), []),
        (lambda: SimpleNamespace(vllms_own={"r1"}), []),
    ],
)
def test_what_names_a_request_that_has_ended(held: Callable[[], Any], found: list[str]) -> None:
    assert list(naming(Holder(held=held()), {"r1"})) == found
