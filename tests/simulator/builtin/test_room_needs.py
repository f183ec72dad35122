"""What the built-in simulator answers before room is made."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpolicy.order import load
from kvpolicy.simulator import Server
from kvpolicy.simulator.builtin.live_request import LiveRequest, Status
from kvpolicy.simulator.builtin.room_needs import is_ready
from kvpolicy.workload import Request
from tests.simulator.worlds import SECONDS, run, workload

TWENTY = Server(
    block_size=4, block_bytes=1, device_blocks=20, host_blocks=0, prefix_caching=False, token_budget=64,
    order=load("urgent"),
)  # fmt: skip


def test_a_load_under_way_is_not_ready_and_one_that_has_ended_is() -> None:
    live = LiveRequest(0, Request(0.0, 8, 8), 0.0)
    assert is_ready(live, set())
    live.status = Status.LOADING
    assert not is_ready(live, set()) and is_ready(live, {live})
    live.stale = 1
    assert not is_ready(live, {live}), "an output of it is to be dropped first"


@pytest.mark.parametrize(("watermark", "victims"), [(0.0, ["3", "2"]), (0.1, ["3", "2"]), (0.15, ["3", "2", "1"])])
def test_a_watermark_is_counted_once_for_all_that_are_let_in(watermark: float, victims: list[str]) -> None:
    """Four requests hold five of twenty blocks each when two come that take four each: eight, and two or three beside
    them. Counted for either, two would make it three victims."""
    held = [Request(0.0, 16, 4, priority=1) for _ in range(4)]
    urgent = [Request(2.0, 16, 1, priority=0) for _ in range(2)]
    trace = run(workload(*held, *urgent), replace(TWENTY, watermark=watermark), "always-recompute", SECONDS)[1]
    rows = [row for row in trace.rows("decisions") if row["cause"] == "displaced"]
    assert [row["request"] for row in rows] == victims
    first_s = [row["first_token_s"] for row in trace.rows("requests") if row["request"] in ("4", "5")]
    assert len(first_s) == 2 and len({*first_s}) == 1, "both come in at once"
