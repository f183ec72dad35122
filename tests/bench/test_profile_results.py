"""What a measured overflow becomes in a trace."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvpolicy import trace as traces
from kvpolicy.datasets.profiles import dataset_of
from kvpolicy.reporting.measurements import material
from kvpolicy.trace import Trace
from kvpolicy_vllm.bench.profile_results import LeftOut, finish_core, finish_profile
from tests.synthetic import make_trace

SHIPPED = Path(__file__).resolve().parents[2] / "traces" / "cpu-llama-native"


def overflow_of_two(made: Trace) -> Trace:
    """Every labelled preemption has gone together with a second one, which no window names."""
    tables = dict(made.tables)
    for name, marks in (("decisions", ("preemption_id", "decision_id")), ("outcomes", ("preemption_id",))):
        rows = made.rows(name)
        rows += [row | {mark: f"{row[mark]}-second" for mark in marks} for row in rows]
        tables[name] = traces.from_rows(name, rows).append_column("core", [[row["core"] for row in rows]])
    return Trace(made.headers, tables)


def test_an_overflow_of_two_is_one_point_with_the_cost_of_both(tmp_path: Path) -> None:
    trace = make_trace(states=4, repeats=1)
    both = overflow_of_two(trace)
    both.write(tmp_path)
    for core in trace.headers:
        finish_core(tmp_path / core, 0, {"variation": 0.01}, "scaled")
    result, single = material(traces.read(tmp_path)), material(trace)
    assert result.header.notes == "scaled"
    assert [overflow.victims for overflow in result.overflows] == [2] * len(single.overflows)
    for overflow, other in zip(result.overflows, single.overflows, strict=True):
        assert overflow.evicted_tokens == 2 * other.evicted_tokens
        assert overflow.engine_s == pytest.approx(2 * other.engine_s)
    left_out = dataset_of({"made": traces.read(tmp_path)}).left_out
    assert left_out["preemptions beside the one that a window names"] == len(single.overflows)


def test_a_finished_profile_says_what_a_recomputed_token_costs(tmp_path: Path) -> None:
    """Beside the batches of its states; how many there will be, it does not know."""
    shutil.copytree(SHIPPED, tmp_path / "trace")
    report = finish_profile(tmp_path / "trace", sorted(traces.read(SHIPPED).headers))
    prices = report.prices
    assert prices.lowest is not None and prices.highest is not None and 0 < prices.lowest < prices.highest < 1
    assert report.text().endswith(prices.sentence()) and "a profile cannot say" in prices.sentence()


def test_what_is_left_out_is_listed_by_state_and_part() -> None:
    left_out = {"b32-001": 1, "b32-004": 2, "check-swap-b32": 3}
    (line,) = LeftOut(left_out, ("b64-pass1",)).lines({"b32-004", "b32-000", "check-swap-b32"})
    assert line == (
        "  left out: states not measured at all: b32-001; 5 repeats of measured states; parts not begun: b64-pass1; "
        "the same command goes on with them"
    )
    (line,) = LeftOut({f"b32-{number:03}": 1 for number in range(40)}).lines(())
    assert line.startswith("  left out: states not measured at all: b32-000, b32-001, b32-002, and 37 more; the same")
    assert LeftOut().lines({"b32-000"}) == []
    assert LeftOut({}, ("b64-pass1",)).lines(()) == [
        "  left out: parts not begun: b64-pass1; the same command goes on with them"
    ]
