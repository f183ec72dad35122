"""What a shadow run says that its policy would have saved: sums and intervals worked by hand, and what is not told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from math import inf
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from kvpolicy import trace as traces
from kvpolicy.errors import InputError
from kvpolicy.evaluation.shadow_run import (
    EXTRAPOLATED,
    HOST_FULL,
    NOT_PREDICTED,
    UNBOUNDED,
    ShadowSavings,
    savings_of,
)
from kvpolicy.events import Cost
from kvpolicy.simulator import Link, Server
from kvpolicy.trace import Trace
from tests.evaluation.test_log_headroom import Rates
from tests.simulator.worlds import LINEAR, random_workload, run

SERVER = Server(block_size=16, block_bytes=1, device_blocks=40, host_blocks=1000, prefix_caching=False)
SWAP = {"kind": "swap", "load_tokens": 100, "tier": "host", "synchronous": False}


@pytest.fixture(scope="module")
def served() -> Trace:
    """200 requests on memory for a few of them, all recomputed; the simulator knows what each cost."""
    _, trace = run(random_workload(5, 200, 60.0), SERVER, "always-recompute", LINEAR)
    return trace


def costs(recompute_s: float, swap_s: float, factor: float = 1.0, **of_swap: Any) -> list[dict[str, Any]]:
    """Predicted costs, with intervals of a factor to either side."""
    pair = [Cost(s, 0.0, 0.0, s, 0.0, s / factor, s * factor) for s in (recompute_s, swap_s)]
    return [asdict(pair[0]), asdict(replace(pair[1], **of_swap))]


def shadowed(trace: Trace, predicted: Any = (), **changes: Any) -> Trace:
    """The trace as if a policy had intended to swap every victim."""
    (core,) = trace.headers
    rows = []
    for number, row in enumerate(trace.rows("decisions")):
        both = [row["options"][0], SWAP]
        row = row | {"options": both, "probabilities": [0.0, 1.0], "chosen": 1, "reason": "shadow", "policy": "shown"}
        row["costs"] = predicted(number) if callable(predicted) else list(predicted)
        rows.append({name: value for name, value in (row | changes).items() if name != "core"})
    table = traces.with_core(traces.from_rows("decisions", rows), core)
    return Trace(trace.headers, dict(trace.tables) | {"decisions": table})


def found(trace: Trace, *more: Any) -> ShadowSavings:
    return savings_of({"made up": trace}, *more)


def test_the_saving_is_what_recomputes_cost_less_what_swaps_would(served: Trace) -> None:
    spent_s = [row["engine_s"] for row in served.rows("outcomes")]
    one = found(shadowed(served, costs(0.5, 1e-3, 2.0)))
    count = len(spent_s)
    assert count > 20 and one.intended == {"recompute": 0, "swap": count} and one.told == one.measured == count
    assert one.hours is not None and one.busy_hours is not None and 0 < one.busy_hours <= one.hours
    saving = one.per_hour
    assert saving is not None
    assert saving.mean_s * one.hours == pytest.approx(sum(spent_s) - count * 1e-3)
    assert saving.model_low_s * one.hours == pytest.approx(sum(spent_s) - count * 2e-3), "all swaps twice as dear"
    assert saving.model_high_s * one.hours == pytest.approx(sum(spent_s) - count * 0.5e-3)
    assert saving.low_s < saving.model_low_s < saving.mean_s < saving.model_high_s < saving.high_s
    assert saving.parts_low_s is not None and saving.parts_low_s < saving.mean_s
    assert one.measured_over_predicted == pytest.approx(sum(spent_s) / (0.5 * count))
    assert one.share_of_busy == pytest.approx((sum(spent_s) - count * 1e-3) / (one.busy_hours * 3600))
    assert "engine time per hour and core, 95%" in one.text() and "shorter than 1 h" in one.text()


def test_a_dear_swap_would_have_cost_time(served: Trace) -> None:
    one = found(shadowed(served, costs(0.5, 10.0)))
    assert one.per_hour is not None and one.per_hour.high_s < 0 and "it would have cost time" in one.text()
    wide = found(shadowed(served, costs(0.5, 0.01, 1000.0)))
    assert wide.per_hour is not None and "cannot be told" in wide.per_hour.verdict


def test_what_it_meant_to_recompute_saves_nothing(served: Trace) -> None:
    one = found(shadowed(served, costs(0.5, 1e-3), chosen=0, reason=""))
    assert one.intended["swap"] == 0 and one.per_hour is not None
    assert (one.per_hour.mean_s, one.per_hour.low_s, one.per_hour.high_s) == (0.0, 0.0, 0.0)
    assert "it intended no swap, and so would have done what was done" in one.text()


@pytest.mark.parametrize(
    ("predicted", "reason"),
    [
        ((), NOT_PREDICTED),
        (costs(0.5, 1e-3, extrapolated=True), EXTRAPOLATED),
        (costs(0.5, 1e-3, high_s=inf), UNBOUNDED),
    ],
)
def test_what_cannot_be_told_is_counted_and_saves_nothing(served: Trace, predicted: Any, reason: str) -> None:
    count = len(served.rows("decisions"))
    one = found(shadowed(served, predicted))
    assert one.untold == {reason: count} and one.told == 0 and one.per_hour is None
    assert "would have saved: cannot be told: no saving is known" in one.text()
    half = found(shadowed(served, lambda number: predicted if number % 2 else costs(0.5, 1e-3)))
    assert half.untold == {reason: count // 2} and half.told == count - count // 2 and half.per_hour is not None


def test_a_cost_model_prices_what_the_policy_did_not(served: Trace) -> None:
    one = found(shadowed(served), Rates(1e-3))
    assert one.told == len(served.rows("decisions")) and not one.untold


def test_swaps_that_would_not_have_fitted_beside_each_other_are_not_told(served: Trace) -> None:
    """Every victim holds 600 blocks of the 1,000, until its request is back."""
    small = shadowed(served, costs(0.5, 1e-3), held_blocks=600)
    one = found(small)
    assert one.untold.get(HOST_FULL, 0) > 0 and one.told > 3, "one at a time they do"
    assert one.peak_blocks == 600 and one.host_blocks == 1000
    assert found(shadowed(served, costs(0.5, 1e-3), held_blocks=1)).untold == {}


def test_recomputes_that_could_not_be_measured_count_as_predicted(served: Trace) -> None:
    """Too few undisturbed steps to know how long one takes, and no cost that was attributed before."""
    outcomes, steps = served.table("outcomes"), served.table("steps")
    nothing = pa.nulls(outcomes.num_rows, pa.float64())
    tables = dict(served.tables) | {
        "outcomes": outcomes.set_column(outcomes.schema.get_field_index("engine_s"), "engine_s", nothing),
        "steps": steps.filter(pc.greater(steps["recomputed_tokens"], 0)),
    }
    one = found(shadowed(Trace(served.headers, tables), costs(0.5, 0.125, 2.0)))
    assert one.measured == 0 and one.told > 20 and one.hours is not None and one.per_hour is not None
    assert one.per_hour.mean_s * one.hours == pytest.approx(0.375 * one.told)
    assert one.per_hour.model_low_s * one.hours == pytest.approx((0.25 - 0.25) * one.told)
    assert one.per_hour.model_high_s * one.hours == pytest.approx((1.0 - 0.0625) * one.told)
    assert "could not be measured: steps: " in one.text() and "undisturbed steps" in one.text()


def test_without_steps_there_is_no_hour(served: Trace) -> None:
    tables = dict(served.tables) | {"steps": served.table("steps").slice(0, 0)}
    one = found(shadowed(Trace(served.headers, tables), costs(0.5, 1e-3)))
    assert one.hours is None and one.per_hour is None and "the traces hold no steps" in one.text()
    assert one.to_dict()["per_hour"] is None and one.to_dict()["assumptions"]


SEEDS = (5, 7, 8, 10, 11)


def really_swapping(link: Link, seed: int) -> tuple[ShadowSavings, float]:
    """What a shadow run says, told what swaps cost on average in a run that swapped; and seconds in steps that the
    latter saved."""
    source, server = random_workload(seed, 300, 60.0), replace(SERVER, link=link)
    recomputed, swapped = (run(source, server, name, LINEAR)[1] for name in ("always-recompute", "always-swap"))
    mean_s = fmean(row["engine_s"] for row in swapped.rows("outcomes"))
    busy_s = [sum(row["duration_s"] for row in trace.rows("steps")) for trace in (recomputed, swapped)]
    return found(shadowed(recomputed, costs(0.5, mean_s, 1.2))), busy_s[0] - busy_s[1]


def in_seconds(one: ShadowSavings) -> tuple[float, float, float]:
    """Of the whole run: what it says, and its interval."""
    assert one.per_hour is not None and one.hours is not None
    mean_s, low_s, high_s = (
        value * one.hours for value in (one.per_hour.mean_s, one.per_hour.low_s, one.per_hour.high_s)
    )
    return mean_s, low_s, high_s


def ends(values: Sequence[float]) -> tuple[float, float]:
    """As docs/headroom.md has them."""
    return round(min(values), 2), round(max(values), 2)


def test_it_says_of_dear_copies_what_really_swapping_did() -> None:
    """In the interval in four of five."""
    runs = [really_swapping(Link(overlapped=False), seed) for seed in SEEDS]
    said, reached = [in_seconds(one) for one, _ in runs], [saved_s for _, saved_s in runs]
    assert all(high_s < 0 for _, _, high_s in said)
    assert ends([mean_s for mean_s, _, _ in said]) == (-0.23, -0.20) and ends(reached) == (-0.36, -0.26)
    inside = [low_s <= saved_s <= high_s for (_, low_s, high_s), saved_s in zip(said, reached, strict=True)]
    assert inside.count(True) == 4 and len(inside) == 5


def test_it_knows_nothing_of_later_states() -> None:
    """With memory for a few requests a swap changes every later batch: what the report says that it assumes. Less is
    reached than the interval holds, in all five."""
    runs = [really_swapping(Link(), seed) for seed in SEEDS]
    said, reached = [in_seconds(one) for one, _ in runs], [saved_s for _, saved_s in runs]
    assert ends([mean_s for mean_s, _, _ in said]) == (0.16, 0.20) and ends(reached) == (-0.03, 0.11)
    assert all(low_s > saved_s for (_, low_s, _), saved_s in zip(said, reached, strict=True))
    text = runs[0][0].text()
    assert "the states are those of always-recompute" in text and "in the states of this run" in text


def test_what_is_no_shadow_run_is_refused(served: Trace) -> None:
    with pytest.raises(InputError, match=r"made up: core .* executed a swap, so it was not served with --shadow"):
        found(shadowed(served, costs(0.5, 1e-3), executed="swap"))
    profile = Trace({core: replace(header, source="profile") for core, header in served.headers.items()}, served.tables)
    with pytest.raises(InputError, match="is a profile, which measured both options"):
        found(profile)
    empty = dict(served.tables) | {"decisions": served.table("decisions").slice(0, 0)}
    with pytest.raises(InputError, match="table decisions holds no decision"):
        found(Trace(served.headers, empty))
