"""What there was to win in recorded traces, from their steps and the prices of their preemptions.

Seconds are those of step-time models (:mod:`kvpolicy.attribution.step_work`), and of swaps, what was attributed to
them. What the other option of a preemption would have cost is what the policy predicted when it decided or, where it
predicted nothing, what a cost model predicts for the recorded situation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kvpolicy.attribution.offline import price_models, step_time_models
from kvpolicy.attribution.step_time import StepTimeModel
from kvpolicy.attribution.step_work import StepWork, TokenPrices, step_work, token_prices
from kvpolicy.cost import CostModel
from kvpolicy.events import SITUATION_FIELDS, Option, situation_of
from kvpolicy.headroom import NO_PRICES, Headroom, Work, headroom, saving_s, total
from kvpolicy.overflow import SERVED, figure_and_level, state_id
from kvpolicy.trace import Trace, TraceError

NO_STEPS = "the trace holds no steps"
NO_SWAP_COSTS = "what the executed swaps cost could not be attributed"
Row = Mapping[str, Any]
NO_RUNS = (
    "how much of throughput is to be won by choosing better is not known: no whole run was served under recompute "
    "(figures memory and timeline), and forced overflows do not say how often memory runs out."
)
WINDOWS = ("core", "state_id", "arm", "preemption_id", "discarded", "first_step", "last_step")
DECISIONS = ("preemption_id", "executed", "options", "costs", "cause")
OUTCOMES = ("core", "preemption_id", "engine_s")


def log_headroom(traces: Sequence[Trace], cost_model: CostModel | None = None) -> Headroom:
    """What there was to win in all of ``traces`` together.

    ``cost_model``: prices decisions that hold no predicted costs, and gives its step-time model to traces with too few
    undisturbed steps for one of their own. Raises TraceError where a trace contradicts itself.
    """
    fallback = None if cost_model is None else cost_model.step_time
    return _headroom([(trace, *step_times_of(trace, fallback, price_models)) for trace in traces], cost_model)


def log_token_prices(trace: Trace) -> tuple[TokenPrices, str]:
    """What tokens of prompts, and decoded ones, cost in a trace's steps, by step times fitted to them; and why that is
    not known."""
    models, why = step_times_of(trace, fitted=price_models)
    prices = TokenPrices()
    for core in trace.headers:
        steps, transfers = _of_core(trace, core, "steps", "transfers")
        prices += token_prices(steps, models.get(core), transfers)
    return prices, why if prices.price_ratio is None else ""


def served_headrooms(trace: Trace, cost_model: CostModel | None = None) -> dict[str, Headroom]:
    """What there was to win in the whole runs of an overflow study that were served under recompute, by state.

    Step times are those of the whole trace. See :func:`log_headroom`.
    """
    windows: dict[tuple[str, int], list[Row]] = {}
    for row in trace.rows("windows", WINDOWS):
        figure_level = figure_and_level(row["state_id"])
        whole = row["preemption_id"] is None and not row["discarded"] and row["arm"] == "recompute"
        if whole and figure_level is not None and figure_level[0] in SERVED:
            windows.setdefault(figure_level, []).append(row)
    if not windows:
        return {}
    models, why = step_times_of(trace, None if cost_model is None else cost_model.step_time, price_models)
    return {
        state_id(*figure_level): _headroom([(_within(trace, windows[figure_level]), models, why)], cost_model)
        for figure_level in sorted(windows)
    }


def served_lines(headrooms: Mapping[str, Headroom]) -> list[str]:
    """The result of :func:`served_headrooms` in words, a line a state."""
    if not headrooms:
        return [NO_RUNS]
    names = {state: figure_and_level(state) or (state, 0) for state in headrooms}
    return [f"{names[state][0]} {names[state][1]}%, recomputed: {won.sentence()}" for state, won in headrooms.items()]


def _within(trace: Trace, windows: Sequence[Row]) -> Trace:
    """Steps of these windows and the preemptions in them; all outcomes stay."""
    tables = dict(trace.tables)
    for name in ("steps", "decisions"):
        table = trace.table(name)
        inside = pa.chunked_array([pa.repeat(pa.scalar(False), table.num_rows)])
        for row in windows:
            steps = pc.and_(
                pc.greater_equal(table["step"], row["first_step"]), pc.less_equal(table["step"], row["last_step"])
            )
            inside = pc.or_(inside, pc.and_(steps, pc.equal(table["core"], row["core"])))
        tables[name] = table.filter(inside)
    cores = {row["core"] for row in windows}
    headers = {core: header for core, header in trace.headers.items() if core in cores}
    return replace(trace, headers=headers, tables=tables)


def _headroom(
    priced: Sequence[tuple[Trace, Mapping[str, StepTimeModel], str]], cost_model: CostModel | None
) -> Headroom:
    """``priced``: traces, step-time models of their cores, and why a core has none."""
    works: list[Work] = []
    prices = _Prices()
    reasons: list[str] = []
    for trace, models, why in priced:
        for core in trace.headers:
            works.append(_core(trace, core, models.get(core), why, cost_model, prices, reasons))
    saved_s = None if prices.missing else saving_s(prices.spent_s, prices.other_s)
    if prices.missing:
        reasons.append(f"{NO_PRICES} ({prices.missing} of {prices.missing + len(prices.spent_s)} preemptions)")
    return headroom(total(works), saved_s, reasons[0] if reasons else "")


def step_times_of(
    trace: Trace,
    fallback: StepTimeModel | None = None,
    fitted: Callable[[Trace], dict[str, StepTimeModel]] = step_time_models,
) -> tuple[dict[str, StepTimeModel], str]:
    """Step-time model of each core, ``fallback`` where its steps allow none; and why a core has neither."""
    if not trace.table("steps").num_rows:
        return {}, NO_STEPS
    try:
        models, why = fitted(trace), NO_STEPS
    except TraceError as error:
        models, why = {}, str(error)
    if fallback is not None:
        models = dict.fromkeys(trace.headers, fallback) | models
    return models, why


class _Prices:
    """By preemption: what it cost, and what its other option would have."""

    def __init__(self) -> None:
        self.spent_s: list[float] = []
        self.other_s: list[float] = []
        self.missing = 0
        """Preemptions whose other option has no price."""


def _core(
    trace: Trace,
    core: str,
    model: StepTimeModel | None,
    why: str,
    cost_model: CostModel | None,
    prices: _Prices,
    reasons: list[str],
) -> Work:
    """The work of one core. Prices of its preemptions, and reasons why something is not known, are added."""
    steps, transfers, outcomes, decisions = _of_core(trace, core, "steps", "transfers", "outcomes", "decisions")
    found = StepWork(Work(decode_s=None, recompute_s=None, busy_s=None), {})
    if steps.num_rows:
        found = step_work(steps, model, transfers)
    if model is None:
        reasons.append(why)
    engine_s = {row["preemption_id"]: row["engine_s"] for row in outcomes.select(OUTCOMES).to_pylist()}
    swapped_s: list[float | None] = []
    columns = dict.fromkeys(DECISIONS if cost_model is None else (*DECISIONS, *SITUATION_FIELDS))
    for row in decisions.select(list(columns)).to_pylist():
        if row["cause"] == "reset":  # leaves no choice
            continue
        name = row["preemption_id"]
        if row["executed"] == "swap":
            swapped_s.append(engine_s.get(name))
        _price(row, found.recompute_s.get(name, 0.0), cost_model, prices)
    swap_s = _swap_s(swapped_s)
    if swap_s is None:
        reasons.append(NO_SWAP_COSTS)
    work = found.work
    return Work(work.decoded_tokens, work.recomputed_tokens, work.decode_s, work.recompute_s, work.busy_s, swap_s)


def _of_core(trace: Trace, core: str, *names: str) -> list[pa.Table]:
    return [table.filter(pc.equal(table["core"], core)) for table in map(trace.table, names)]


def _swap_s(costs_s: Sequence[float | None]) -> float | None:
    """Seconds of all swaps; those without a known cost count as the others do. None where no cost is known."""
    known = [seconds for seconds in costs_s if seconds is not None]
    if not known:
        return None if costs_s else 0.0
    return max(0.0, sum(known) * len(costs_s) / len(known))  # noise can bring a sum of small costs below 0


def _price(row: Row, recomputed_s: float, cost_model: CostModel | None, prices: _Prices) -> None:
    """Add the price of a preemption and of its other option.

    A recompute cost what its steps say. A swap counts as predicted, like its other option: most swaps cost less than
    the noise of what is attributed to them.
    """
    kinds = [option["kind"] for option in row["options"]]
    other = "recompute" if row["executed"] == "swap" else "swap"
    if other not in kinds:
        prices.spent_s.append(recomputed_s)
        prices.other_s.append(inf)
        return
    costs_s = _predicted_s(row, cost_model)
    if costs_s is None:
        prices.missing += 1
        return
    prices.spent_s.append(recomputed_s + (costs_s[kinds.index("swap")] if row["executed"] == "swap" else 0.0))
    prices.other_s.append(costs_s[kinds.index(other)])


def _predicted_s(row: Row, cost_model: CostModel | None) -> list[float] | None:
    """Predicted engine time of each option: as recorded, or by the cost model.

    Raises TraceError, naming the preemption, for a recorded cost that is not finite.
    """
    if len(row["costs"]) == len(row["options"]):
        recorded_s = [cost["engine_s"] for cost in row["costs"]]
        for seconds in recorded_s:
            if not isfinite(seconds):
                raise TraceError(
                    f"table decisions, preemption {row['preemption_id']}: costs: engine_s is {seconds}, should be a "
                    "finite number"
                )
        return recorded_s
    if cost_model is None:
        return None
    return [cost.engine_s for cost in cost_model.predict(situation_of(row), [Option(**o) for o in row["options"]])]
