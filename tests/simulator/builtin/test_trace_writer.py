"""Rows go to the sink in batches, by table; without a sink there are none."""

from __future__ import annotations

from kvpolicy.simulator.builtin.live_request import LiveRequest
from kvpolicy.simulator.builtin.trace_writer import BATCH_ROWS, TraceWriter
from kvpolicy.trace import Header, Row
from kvpolicy.workload import Request


class CountingSink:
    def __init__(self) -> None:
        self.batches: list[tuple[str, int]] = []

    def begin(self, core: str, header: Header) -> None:
        raise AssertionError("a writer begins no trace")

    def add(self, table: str, rows: list[Row]) -> None:
        self.batches.append((table, len(rows)))

    def finish(self) -> None:
        raise AssertionError("a writer ends no trace")


LIVE = LiveRequest(3, Request(0.5, 10, 5), 0.5, outputs=5, first_s=1.0, last_s=2.0)


def test_rows_are_handed_over_in_batches() -> None:
    sink = CountingSink()
    writer = TraceWriter("core", sink)
    for _ in range(BATCH_ROWS + 1):
        writer.request(LIVE)
    assert sink.batches == [("requests", BATCH_ROWS)]
    writer.flush()
    writer.flush()
    assert sink.batches == [("requests", BATCH_ROWS), ("requests", 1)]


def test_without_a_sink_no_row_is_kept() -> None:
    writer = TraceWriter("core", None)
    writer.request(LIVE)
    assert not writer.enabled and not writer._rows
