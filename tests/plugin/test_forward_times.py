"""Which rows of a trace get the times that ranks report."""

from __future__ import annotations

from typing import Any

import pytest

from kvpolicy_vllm.plugin import forward_times
from kvpolicy_vllm.plugin.forward_times import MAX_LATE_STEPS, ForwardTimes
from kvpolicy_vllm.plugin.messages import Forward, Transfers


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
        monkeypatch.setattr(forward_times, "MAX_EARLY", 3)
        joined = ForwardTimes(1, rows.append)
        joined.reported([Forward(step, float(step)) for step in range(5)])
        for step in (1, 4):
            joined.add({"step": step, "device_s": None})
            joined.release()
        assert times(rows) == [(1, None), (4, 4.0)]
