"""Times of forward passes: what a rank reports, and which rows of a trace get them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from kvpolicy_vllm.plugin import forward_time
from kvpolicy_vllm.plugin.forward_time import MAX_FAILURES, MAX_LATE_STEPS, MAX_PENDING, ForwardTimer, ForwardTimes
from kvpolicy_vllm.plugin.messages import Forward, Transfers


class Watch:
    """A mark is the number of seconds that the test has let pass."""

    now_s = 0.0
    behind = False
    fails = False

    def mark(self) -> float:
        if Watch.fails:
            raise RuntimeError("the device is lost")
        return Watch.now_s

    def passed(self, mark: float) -> bool:
        return not Watch.behind

    def seconds(self, first: float, last: float) -> float:
        return last - first


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> ForwardTimer:
    monkeypatch.setattr(Watch, "now_s", 0.0)
    monkeypatch.setattr(Watch, "behind", False)
    monkeypatch.setattr(Watch, "fails", False)
    monkeypatch.setitem(forward_time.WATCHES, "cpu", Watch)
    return ForwardTimer("cpu")


def run(timer: ForwardTimer, step: int | None, seconds: float) -> None:
    timer.begin(step)
    Watch.now_s += seconds
    timer.end()


class TestForwardTimer:
    def test_only_what_is_to_be_timed_is_timed_once(self, timer: ForwardTimer) -> None:
        run(timer, None, 1.0)
        run(timer, 4, 2.0)
        Watch.now_s += 8.0
        timer.end()  # vLLM may come by two hooks in a step
        assert timer.take() == [Forward(4, 2.0)]
        assert timer.take() == []

    def test_copies_that_are_begun_in_between_are_left_out(self, timer: ForwardTimer) -> None:
        timer.begin(1)
        for seconds, change in ((1.0, timer.interrupt), (4.0, timer.go_on), (2.0, timer.end)):
            Watch.now_s += seconds
            change()
        assert timer.take() == [Forward(1, 3.0)]

    def test_a_device_that_is_behind_is_asked_again_and_not_waited_for(self, timer: ForwardTimer) -> None:
        Watch.behind = True
        run(timer, 1, 1.0)
        run(timer, 2, 2.0)
        assert timer.take() == []
        Watch.behind = False
        assert timer.take() == [Forward(1, 1.0), Forward(2, 2.0)]

    def test_what_is_awaited_is_bounded(self, timer: ForwardTimer) -> None:
        Watch.behind = True
        for step in range(MAX_PENDING + 2):
            run(timer, step, 1.0)
        assert timer.take() == [Forward(0, None), Forward(1, None)]

    def test_failures_are_reported_and_after_some_nothing_is_timed(self, timer: ForwardTimer) -> None:
        Watch.fails = True
        for step in range(MAX_FAILURES + 3):
            run(timer, step, 1.0)
        Watch.fails = False
        run(timer, 99, 1.0)
        assert timer.take() == [Forward(step, None) for step in range(MAX_FAILURES)]

    def test_a_pass_that_never_ended_leaves_nothing(self, timer: ForwardTimer) -> None:
        timer.begin(1)
        run(timer, 2, 1.0)
        assert timer.take() == [Forward(2, 1.0)]

    @pytest.mark.parametrize("kind", [None, "xpu"])
    def test_nothing_is_timed_on_other_devices(self, kind: str | None) -> None:
        other = ForwardTimer(kind)
        run(other, 1, 1.0)
        assert other.take() == []


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return []


def times(rows: list[dict[str, Any]]) -> list[tuple[int, float | None]]:
    return [(row["step"], row["device_s"]) for row in rows]


class TestForwardTimes:
    def test_the_slowest_rank_counts_once_all_have_reported(self, rows: list[dict[str, Any]]) -> None:
        joined = ForwardTimes(2, rows.append)
        both = Transfers(forwards=[Forward(0, 1.0)]).aggregate(Transfers(forwards=[Forward(0, 3.0)]))
        joined.reported(both.forwards)
        joined.add({"step": 0, "device_s": None})
        joined.reported([Forward(1, 2.0)])
        joined.add({"step": 1, "device_s": None})
        assert times(rows) == [(0, 3.0)], "the second rank is behind"
        joined.reported([Forward(1, 1.0)])
        assert times(rows) == [(0, 3.0), (1, 2.0)]

    def test_rows_stay_in_order_and_wait_only_so_long(self, rows: list[dict[str, Any]]) -> None:
        joined = ForwardTimes(1, rows.append)
        joined.reported([Forward(0, 1.0)])
        for step in range(MAX_LATE_STEPS + 2):
            joined.add({"step": step, "device_s": None})
        assert times(rows) == [(0, 1.0), (1, None)]
        joined.reported([Forward(3, 1.5)])
        assert len(rows) == 2, "step 2 is awaited, and stands before it"
        joined.reported([Forward(2, 2.5)])
        assert times(rows)[2:] == [(2, 2.5), (3, 1.5)]

    def test_rows_do_not_wait_where_no_device_reports(self, rows: list[dict[str, Any]]) -> None:
        ForwardTimes(1, rows.append).add({"step": 0, "device_s": None})
        assert times(rows) == [(0, None)]

    def test_an_idle_engine_leaves_no_row_behind(self, rows: list[dict[str, Any]]) -> None:
        joined = ForwardTimes(1, rows.append)
        joined.reported([Forward(0, 1.0)])
        joined.add({"step": 0, "device_s": None})
        joined.add({"step": 1, "device_s": None})
        joined.release()
        assert times(rows) == [(0, 1.0), (1, None)]
        joined.reported([Forward(1, 9.0)])
        joined.add({"step": 2, "device_s": None})
        joined.reported([Forward(2, 2.0)])
        assert times(rows)[2:] == [(2, 2.0)], "what came too late is of no other row"

    def test_a_rank_that_cannot_tell_leaves_the_row_without(self, rows: list[dict[str, Any]]) -> None:
        joined = ForwardTimes(2, rows.append)
        assert joined.reported([Forward(0, 1.0), Forward(0, None)]) == 1
        joined.add({"step": 0, "device_s": None})
        assert times(rows) == [(0, None)]

    def test_times_without_rows_are_bounded(self, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(forward_time, "MAX_EARLY", 3)
        joined = ForwardTimes(1, rows.append)
        joined.reported([Forward(step, float(step)) for step in range(5)])
        for step in (1, 4):
            joined.add({"step": step, "device_s": None})
            joined.release()
        assert times(rows) == [(1, None), (4, 4.0)]
