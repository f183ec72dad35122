"""The state of an unfinished demo: rounds come back as they were, and other arguments do not resume it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy.errors import InputError
from kvpolicy.workload import Request, Workload
from kvpolicy_vllm.bench.demo_rounds import Measured
from kvpolicy_vllm.bench.exactness import Comparison
from kvpolicy_vllm.bench.overload import Run

WORK = Workload("by hand", (Request(0.0, 4, 2), Request(1.0, 4, 1, priority=-1, class_name="urgent")), 7)
RUN = Run(
    "vllm", 0, 3.0, (0.5, 0.25), ((0.1,), ()), ((1, 2), (3,)), ((), ()), {"recompute": 1, "swap": 0}, 9, 8, 1.5,
    (0.0, 1.0), WORK.requests,
)  # fmt: skip


def test_a_finished_round_comes_back_as_it_was(tmp_path: Path) -> None:
    asked = {"seed": 0, "shape": {"heads": (1, 2)}}
    Measured.opened(tmp_path, asked).keep_round("one", 0, {"vllm": RUN}, Comparison(3, 1, ("token 1",)))
    measured = Measured.opened(tmp_path, asked)
    assert measured.round("one", 0, WORK) == {"vllm": RUN}
    assert measured.comparison("one", 0) == Comparison(3, 1, ("token 1",))
    assert measured.round("one", 1, WORK) is None and measured.round("two", 0, WORK) is None


def test_values_and_seconds_are_kept_and_seconds_add_up(tmp_path: Path) -> None:
    for _ in range(2):
        measured = Measured.opened(tmp_path, {"seed": 0})
        times_s = iter((10.0, 12.5))
        measured.clock = lambda times_s=times_s: next(times_s)  # type: ignore[misc]
        with measured.phase("model"):
            measured.keep("capacity_per_s", 4.0)
    assert Measured.opened(tmp_path, {"seed": 0}).seconds == {"model": 5.0}
    assert Measured.opened(tmp_path, {"seed": 0}).values == {"capacity_per_s": 4.0}


def test_other_arguments_do_not_resume_it(tmp_path: Path) -> None:
    Measured.opened(tmp_path, {"seed": 0, "order": "mlfq:base=32"})
    with pytest.raises(InputError, match=r"was begun with order 'mlfq:base=32', now asked for with 'las:quantum=8'"):
        Measured.opened(tmp_path, {"seed": 0, "order": "las:quantum=8"})
