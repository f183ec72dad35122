"""Figures of live runs: tails over requests, each class by itself, and what token differences are compared with."""

from __future__ import annotations

from typing import Any

import pytest

from kvpolicy.workload import Request, Workload
from kvpolicy_vllm.bench.exactness import Comparison
from kvpolicy_vllm.bench.live_scenarios import FIGURES, ONE_CLASS, TWO_CLASSES, capacity_of, compared
from kvpolicy_vllm.bench.overload import Run

BATCH, URGENT = Request(0.0, 8, 41, class_name="batch"), Request(1.0, 8, 1, priority=-1, class_name="urgent")


def run(ttft_s: tuple[float, ...], itl_s: tuple[tuple[float, ...], ...], **more: Any) -> Run:
    tokens = tuple((1,) * (len(gaps) + 1) for gaps in itl_s)
    arrivals = tuple(0.0 for _ in ttft_s)
    values: dict[str, Any] = {"arrival_s": arrivals, "cpu_s": 2.0, "tokens": tokens} | more
    return Run("arm", 0, 50.0, ttft_s, itl_s, gaps=(), preemptions={}, recomputed_tokens=0, moved_bytes=0, **values)


def test_figures_of_one_class() -> None:
    one = run((1.0, 3.0), ((1.0, 2.0), ()))
    figures = {name: take(one) for name, take in FIGURES[ONE_CLASS].items()}
    assert figures == pytest.approx(
        {"e2e per token": (4 / 3 + 3) / 2, "e2e": 3.5, "e2e p99": 3.99, "TTFT": 2.0, "tok/s": 4 / 50, "CPU time": 2.0}
    )


def test_figures_of_two_classes_keep_them_apart() -> None:
    one = run((1.0, 4.0), ((0.5,) * 40, ()), arrival_s=(0.0, 1.0), requests=(BATCH, URGENT))
    figures = {name: take(one) for name, take in FIGURES[TWO_CLASSES].items()}
    assert figures == pytest.approx(
        {"urgent TTFT p99": 4.0, "urgent TTFT": 4.0, "batch tok/s": 2.0, "batch e2e": 21.0, "CPU time": 2.0}
    )


def test_capacity_is_that_of_the_middle_half_of_the_finishes() -> None:
    assert capacity_of(run(tuple(map(float, range(1, 9))), ((),) * 8)) == 1.0


class Served:
    """Serves a workload once more, with gaps."""

    def __init__(self, gaps: tuple[tuple[float, ...], ...]) -> None:
        self.again = run((1.0,), ((1.0,),)), gaps
        self.asked = 0

    def serve(self, name: str, workload: Workload, block: int, gaps: bool = False) -> Any:
        self.asked += 1
        assert name == "vllm" and gaps
        one, found = self.again
        return Run(**{field: getattr(one, field) for field in Run.__slots__} | {"gaps": found})


def test_unmodified_vllm_serves_once_more_only_where_tokens_differ() -> None:
    work = Workload("by hand", (Request(0.0, 4, 2),), 7)
    reference = run((1.0,), ((1.0,),), tokens=((5, 6),))
    arms: Any = Served(((0.3, 1e-6),))
    assert compared(arms, work, reference, reference) == Comparison(2) and arms.asked == 0
    assert compared(arms, work, reference, run((1.0,), ((1.0,),), tokens=((5, 7),))) == Comparison(2, 1)
    wrong = compared(arms, work, reference, run((1.0,), ((1.0,),), tokens=((4, 6),)))
    assert not wrong.exact and "seed 7, arm, request 0: token 0 is 4, should be 5" in wrong.wrong[0]
