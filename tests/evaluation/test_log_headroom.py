"""What recorded traces say there was to win: as the simulator that wrote them knows it, and what is said where they
lack something."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from kvpolicy import trace as traces
from kvpolicy.attribution.offline import step_time_models
from kvpolicy.attribution.step_time import StepTimeModel
from kvpolicy.cost import CostModel
from kvpolicy.evaluation.log_headroom import (
    NO_STEPS,
    NO_SWAP_COSTS,
    log_headroom,
    log_token_prices,
    served_headrooms,
    served_lines,
)
from kvpolicy.events import Cost, Option, Preemption
from kvpolicy.headroom import NO_PRICES, Headroom
from kvpolicy.simulator import Link, Server
from kvpolicy.trace import Trace, TraceError
from tests.simulator.worlds import LINEAR, random_workload, run
from tests.synthetic_logs import make_log

SERVER = Server(block_size=16, block_bytes=1, device_blocks=40, host_blocks=1000, prefix_caching=False)

BESIDE = Link()


@dataclass(frozen=True)
class Rates(CostModel):
    """A recompute takes 20 us a token, a swap as long as it is told."""

    swap_s: float = 1e-4
    name: str = "rates"
    step_time: StepTimeModel | None = None

    def predict(self, situation: Preemption, options: list[Option]) -> tuple[Cost, ...]:  # type: ignore[override]
        seconds = {"recompute": 2e-5 * situation.computed_tokens, "swap": self.swap_s}
        return tuple(Cost(s, 0.0, 0.0, s, 0.0, s, s) for s in (seconds[option.kind] for option in options))


def simulated(policy: str = "always-recompute", link: Link = BESIDE, server: Server = SERVER) -> tuple[Headroom, Trace]:
    """200 requests on memory for a few of them."""
    outcome, trace = run(random_workload(5, 200, 60.0), replace(server, link=link), policy, LINEAR)
    assert outcome.summary.headroom is not None and sum(outcome.summary.preemptions.values()) > 20
    return outcome.summary.headroom, trace


def test_the_bound_is_what_the_simulator_knows() -> None:
    """Its step times are linear, so that those fitted to its trace are exact."""
    known, trace = simulated()
    found = log_headroom([trace], Rates(0.0))
    assert (found.decoded_tokens, found.recomputed_tokens) == (known.decoded_tokens, known.recomputed_tokens)
    assert found.bound == pytest.approx(known.bound, rel=0.02) and found.price_ratio == pytest.approx(
        known.price_ratio, rel=0.02
    )
    assert found.forecast == pytest.approx(known.forecast, rel=0.02), "copies beside the steps cost it nothing"


def test_a_few_slow_prompts_do_not_make_recomputed_tokens_dearer_than_their_steps() -> None:
    """Of the steps with prompts that recompute nothing 15 were recorded, and took three times as long: the first
    requests, another load beside."""
    known, trace = simulated()
    rows = [{name: row[name] for name in row if name != "core"} for row in trace.rows("steps")]
    prompts = [row for row in rows if row["scheduled_tokens"] > row["decode_requests"] and not row["repeated"]]
    for row in prompts[:15]:
        row["duration_s"] *= 3
    (core,) = trace.headers
    steps = [row for row in rows if not any(row is prompt for prompt in prompts[15:])]
    table = traces.with_core(traces.from_rows("steps", steps), core)
    slow = Trace(trace.headers, dict(trace.tables) | {"steps": table})
    (alone,), (exact,) = step_time_models(slow).values(), step_time_models(trace).values()
    prompt = np.array([[100.0, 0.0, 0.0, 5050.0]])
    assert alone.price(prompt) > 5 * exact.price(prompt), "what the undisturbed steps say"
    found = log_headroom([slow], Rates(0.0))
    assert found.recompute_token_s is not None and found.forecast is not None and found.bound is not None
    assert found.recompute_token_s == pytest.approx(known.recompute_token_s, rel=0.1)
    busy_s, again_s = (sum(row["duration_s"] for row in some) for some in (steps, [r for r in steps if r["repeated"]]))
    assert found.forecast <= found.bound and found.forecast < again_s / (busy_s - again_s)


def test_prices_of_tokens_are_those_of_the_law_that_the_simulator_has() -> None:
    _, trace = simulated()
    found, unknown = log_token_prices(trace)
    assert not unknown and found.prompt_tokens > log_headroom([trace]).recomputed_tokens > 0
    (model,) = step_time_models(trace).values()
    assert found.prompt_token_s is not None and found.prompt_token_s > model.per_part_s[0]
    assert log_token_prices(Trace(trace.headers, trace.tables | {"steps": trace.table("steps").slice(0, 0)})) == (
        replace(found, prompt_tokens=0, prompt_s=None, decoded_tokens=0, decode_s=None, decode_steps=0.0),
        NO_STEPS,
    )


def test_two_traces_are_one() -> None:
    _, trace = simulated()
    (core,) = trace.headers
    other = Trace(
        {"other": trace.headers[core]},
        {name: traces.with_core(table.drop_columns("core"), "other") for name, table in trace.tables.items()},
    )
    one, both = log_headroom([trace], Rates()), log_headroom([trace, other], Rates())
    assert both.recomputed_tokens == 2 * one.recomputed_tokens
    assert both.bound == pytest.approx(one.bound) and both.forecast == pytest.approx(one.forecast)


def test_a_dear_swap_wins_nothing_and_a_cheaper_one_more() -> None:
    _, trace = simulated()
    forecasts = [log_headroom([trace], Rates(swap_s)).forecast for swap_s in (1.0, 1e-3, 1e-4, 0.0)]
    assert forecasts[0] == 0.0 and None not in forecasts
    assert forecasts == sorted(forecasts, key=float)  # type: ignore[arg-type]
    assert len(set(forecasts)) == 4


def test_executed_swaps_cost_what_was_attributed_to_them() -> None:
    """Every step waits for its copies; a recompute that costs nothing would have won nearly all of it."""
    known, trace = simulated("always-swap", Link(overlapped=False))
    spent_s = sum(row["engine_s"] for row in trace.rows("outcomes"))
    found = log_headroom([trace], Rates(1.0))
    assert found.recomputed_tokens == known.recomputed_tokens == 0
    assert found.decode_token_s is not None and found.bound is not None
    assert found.decode_token_s == pytest.approx(known.decode_token_s, rel=0.02), "without what steps wait for copies"
    assert found.bound == pytest.approx(spent_s / (found.decode_token_s * found.decoded_tokens))
    assert found.bound == pytest.approx(known.bound, rel=0.1), "which prices them by their situations"
    assert found.forecast is not None and 0.5 * found.bound < found.forecast <= found.bound


def test_what_the_trace_lacks_is_said() -> None:
    _, trace = simulated()
    found = log_headroom([trace])
    assert found.bound is not None and found.forecast is None
    assert NO_PRICES in found.unknown and f"of {trace.table('decisions').num_rows} preemptions" in found.unknown
    found = log_headroom([make_log(seed=1, decisions=30)])
    assert (found.tax, found.bound, found.unknown) == (None, None, NO_STEPS)
    steps = trace.table("steps")
    recomputing = steps.filter(pc.greater(steps["recomputed_tokens"], 0)).slice(0, 10)
    few = Trace(trace.headers, dict(trace.tables) | {"steps": recomputing})
    found = log_headroom([few], Rates())
    assert found.bound is None and "undisturbed steps" in found.unknown and found.tax is not None
    found = log_headroom([few], Rates(step_time=step_time_models(trace)[next(iter(trace.headers))]))
    assert found.bound is not None and found.unknown == "", "step times of the cost model"


def test_where_host_memory_was_full_nothing_can_be_saved() -> None:
    known, trace = simulated(server=replace(SERVER, host_blocks=0))
    found = log_headroom([trace], Rates(0.0))
    assert found.bound == pytest.approx(known.bound, rel=0.02) and found.bound
    assert (found.forecast, found.unknown) == (0.0, "")


def test_swaps_that_noise_made_cheaper_than_nothing_cost_nothing() -> None:
    _, trace = simulated("always-swap")
    outcomes = trace.table("outcomes")
    negative = pa.array([-1e-3] * outcomes.num_rows)
    outcomes = outcomes.set_column(outcomes.schema.get_field_index("engine_s"), "engine_s", negative)
    assert log_headroom([Trace(trace.headers, dict(trace.tables) | {"outcomes": outcomes})], Rates()).bound == 0.0


def test_a_reset_leaves_no_choice_to_price() -> None:
    _, trace = simulated()
    decisions = trace.table("decisions")
    causes = pa.array(["reset", *["memory"] * (decisions.num_rows - 1)])
    decisions = decisions.set_column(decisions.schema.get_field_index("cause"), "cause", causes)
    found = log_headroom([Trace(trace.headers, dict(trace.tables) | {"decisions": decisions})])
    assert f"({decisions.num_rows - 1} of {decisions.num_rows - 1} preemptions)" in found.unknown


def with_costs(trace: Trace, *engine_s: float) -> Trace:
    """Decisions with these costs of recompute and swap, as a policy with a cost model records them."""
    table = trace.table("decisions")
    kind = table.schema.field("costs").type.value_type
    recorded = [{field.name: 0.0 for field in kind} | {"engine_s": s, "extrapolated": False} for s in engine_s]
    costs = pa.array([recorded] * table.num_rows, table.schema.field("costs").type)
    column = table.schema.get_field_index("costs")
    return Trace(
        trace.headers,
        dict(trace.tables) | {"decisions": table.set_column(column, table.schema.field("costs"), costs)},
    )


def test_recorded_prices_come_before_those_of_a_model() -> None:
    _, trace = simulated()
    won = log_headroom([with_costs(trace, 9.0, 0.0)], Rates(9.0)).forecast
    assert won == log_headroom([trace], Rates(0.0)).forecast and won
    assert log_headroom([with_costs(trace, 9.0, 9.0)], Rates(0.0)).forecast == 0.0


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_recorded_price_that_is_no_number_is_refused_by_name(wrong: float) -> None:
    _, trace = simulated()
    first = trace.rows("decisions")[0]["preemption_id"]
    with pytest.raises(TraceError, match=f"decisions, preemption {first}: costs: engine_s is {wrong}, should be a fin"):
        log_headroom([with_costs(trace, 1.0, wrong)])


def with_windows(trace: Trace, *windows: tuple[str, str, int, int], discarded: str = "") -> Trace:
    (core,) = trace.headers
    rows = [
        {
            "state_id": state, "arm": arm, "repeat": 0, "cause": "memory", "first_step": first, "last_step": last,
            "duration_s": 1.0, "preemption_id": None,
            "discarded": discarded,
        }
        for state, arm, first, last in windows
    ]  # fmt: skip
    return Trace(
        trace.headers, dict(trace.tables) | {"windows": traces.with_core(traces.from_rows("windows", rows), core)}
    )


def test_served_runs_are_told_apart_by_their_memory() -> None:
    """Two runs of one level, one of another, one under swap; each with the steps and preemptions in its window."""
    _, trace = simulated()
    last = max(row["step"] for row in trace.rows("steps"))
    third = last // 3
    served = with_windows(
        trace, ("memory/20", "recompute", 0, third), ("memory/20", "recompute", third + 1, 2 * third),
        ("memory/5", "recompute", 2 * third + 1, last), ("memory/5", "swap", 0, last),
        ("b16-000", "recompute", 0, last),
    )  # fmt: skip
    found, whole = served_headrooms(served, Rates()), log_headroom([trace], Rates())
    assert list(found) == ["memory/5", "memory/20"], "by level"
    assert sum(one.recomputed_tokens for one in found.values()) == whole.recomputed_tokens
    assert sum(one.decoded_tokens for one in found.values()) == whole.decoded_tokens
    low, high = sorted(one.bound or 0.0 for one in found.values())
    assert whole.bound is not None and low <= whole.bound <= high
    lines = served_lines(found)
    assert lines[1] == f"memory 20%, recomputed: {found['memory/20'].sentence()}"


def test_forced_overflows_and_discarded_runs_do_not_say_how_often_memory_runs_out() -> None:
    _, trace = simulated()
    assert served_headrooms(with_windows(trace, ("b16-000", "recompute", 0, 9)), Rates()) == {}
    assert served_headrooms(with_windows(trace, ("memory/5", "recompute", 0, 9), discarded="disturbed"), Rates()) == {}
    (line,) = served_lines({})
    assert "is not known: no whole run was served under recompute" in line


def test_swaps_without_a_known_cost_count_as_the_others_do() -> None:
    _, trace = simulated("always-swap", Link(overlapped=False))
    whole = log_headroom([trace], Rates()).bound

    def without(kept: int) -> Headroom:
        rows: list[dict[str, Any]] = [
            row | {"engine_s": row["engine_s"] if number < kept else None}
            for number, row in enumerate(trace.rows("outcomes"))
        ]
        (core,) = trace.headers
        table = traces.with_core(
            traces.from_rows("outcomes", [{k: v for k, v in row.items() if k != "core"} for row in rows]), core
        )
        return log_headroom([Trace(trace.headers, dict(trace.tables) | {"outcomes": table})], Rates())

    half = without(trace.table("outcomes").num_rows // 2)
    assert half.bound == pytest.approx(whole, rel=0.3)
    assert (without(0).bound, without(0).unknown) == (None, NO_SWAP_COSTS)
