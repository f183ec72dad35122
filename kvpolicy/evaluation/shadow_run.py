"""What a run in shadow mode says that its policy would have saved, per hour and with an interval, and what it cannot.

The run recomputed every preempted request, and recorded what the policy intended. Of each preemption that it intended
to swap, the saving is what the recompute cost (as measured; as predicted where that is not known) less what the swap
was predicted to cost. A preemption that it intended to recompute saves nothing. Of a preemption whose saving is not
known, nothing is counted, and its number is reported by reason.

The interval of the sum has two parts, and is as wide as both together. The errors of predictions: the bounds of all
preemptions are added up, as if all were off in the same direction, because a cost model that is wrong about a link is
wrong about every copy on it. And the difference between hours: Student's interval over equal parts of the run. What it
does not include is what a swap changes in later states.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

from kvpolicy import trace as trace_files
from kvpolicy.attribution.offline import attribute
from kvpolicy.cost import CostModel, load_cost_model
from kvpolicy.datasets.validation import refuse_doubled
from kvpolicy.errors import InputError
from kvpolicy.evaluation.intended_swaps import HOUR_S, IntendedSwaps, Row
from kvpolicy.evaluation.log_headroom import log_headroom, step_times_of
from kvpolicy.evaluation.pricing_model import pricing_warnings
from kvpolicy.events import KINDS, SITUATION_FIELDS, Option, situation_of
from kvpolicy.fields import refuse_no_paths, refuse_other
from kvpolicy.headroom import Headroom, share_text
from kvpolicy.json_values import finite
from kvpolicy.stats import student_interval
from kvpolicy.trace import Trace

PARTS = 10
"""Equal parts of each core's time, over which hours differ."""
MIN_HOURS = 1.0
"""Below this it is said that the run was short."""
EXTRAPOLATED = "its cost model was not trained on such a situation"
NOT_PREDICTED = "its policy predicts no costs: give --cost-model"
UNBOUNDED = "the prediction has no finite interval"
HOST_FULL = "host memory would have been full by then"
ASSUMPTIONS = (
    "a swap would have cost what the cost model predicts: none was executed here, and no outcome says whether it is so",
    "the link would have been as idle as it was: nothing was copied, so that no copy waited for another one",
    "the states are those of always-recompute: what a swap changes in later steps, in queues and in who is preempted "
    "next is in neither the saving nor its interval; kvpolicy simulate includes it",
    "engine time was scarce: a server that waits for requests finishes no more of them for it",
)
DECISIONS = (
    *SITUATION_FIELDS, "core", "preemption_id", "step", "options", "chosen", "costs", "executed", "reason", "policy",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Told:
    """A preemption that the policy intended to swap, and whose saving is known. Seconds of engine time."""

    core: str
    at_s: float
    until_s: float
    """When its request was back; infinite where it never was."""
    blocks: int
    """Of host memory, in that time."""
    recompute_s: float
    predicted_s: float
    """What the recompute was predicted to cost."""
    measured: bool
    """Whether ``recompute_s`` is measured."""
    swap_s: float
    low_s: float
    """Bounds of what is saved."""
    high_s: float

    @property
    def saved_s(self) -> float:
        return self.recompute_s - self.swap_s


@dataclass(frozen=True, slots=True)
class Saving:
    """Seconds of engine time that the policy would have saved per hour of one engine core; below 0, what it would have
    cost. All intervals are 95%."""

    mean_s: float
    low_s: float
    """With the interval of both parts."""
    high_s: float
    model_low_s: float
    """With the errors of predictions alone."""
    model_high_s: float
    parts_low_s: float | None
    """With the difference between parts of the run alone; None where the run has no parts."""
    parts_high_s: float | None

    @property
    def verdict(self) -> str:
        if self.low_s == self.high_s == 0:
            return "it intended no swap, and so would have done what was done"
        if self.low_s > 0:
            return "it would have saved time in the states of this run"
        if self.high_s < 0:
            return "it would have cost time in the states of this run"
        return "whether it would have saved time cannot be told"


@dataclass(frozen=True, slots=True)
class ShadowSavings:
    """What traces in shadow mode say."""

    policies: tuple[str, ...]
    cores: int
    hours: float | None
    """Of all cores together, from the first step to the last; None without steps."""
    busy_hours: float | None
    """Of them, in steps."""
    intended: Mapping[str, int]
    swaps: IntendedSwaps
    """What is known of the intended swaps without prices."""
    no_choice: Mapping[str, int]
    """Preemptions by why there was no choice, as at a reset of the cache."""
    told: int
    """Swaps that were intended, and whose saving is known."""
    measured: int
    """Of these, those whose recompute was measured."""
    untold: Mapping[str, int]
    """Swaps that were intended, by why their saving is not known."""
    recompute_s: float
    """What the recomputes of the former cost, as measured or predicted."""
    swap_s: float
    """What their swaps were predicted to cost."""
    measured_over_predicted: float | None
    """Cost of the measured recomputes over what they were predicted to cost."""
    per_hour: Saving | None
    """None where no time is known, or nothing can be told."""
    peak_blocks: int
    """Blocks of host memory that these swaps would have needed at the same time."""
    host_blocks: int
    """Blocks of host memory that decisions assumed, of the core with the fewest."""
    headroom: Headroom
    """What there was to win at most."""
    not_measured: str = ""
    """Why the recomputes of a core could not be measured; empty where they could."""
    warnings: tuple[str, ...] = ()
    """How far the prices are to be trusted; see :mod:`kvpolicy.evaluation.pricing_model`."""
    traces: tuple[str, ...] = ()
    """As they were named."""
    between: tuple[str, str] | None = None
    """The window of time, as it was given; None for all of it."""

    @property
    def share_of_busy(self) -> float | None:
        """What would have been saved, over the time in steps."""
        if self.per_hour is None or not self.busy_hours or self.hours is None:
            return None
        return self.per_hour.mean_s * self.hours / (self.busy_hours * HOUR_S)

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self) | {"headroom": self.headroom.to_dict(), "share_of_busy": self.share_of_busy}
        return {name: finite(value) for name, value in values.items()} | {"assumptions": list(ASSUMPTIONS)}

    def text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        hours = "an unknown time" if self.hours is None else f"{self.hours:.3g} h"
        busy = "" if self.busy_hours is None else f", {self.busy_hours:.3g} h of it in steps"
        yield f"{', '.join(self.policies)} in shadow mode: {self.cores} engine cores, {hours}{busy}"
        yield f"would have chosen: {_counts(self.intended)}; without a choice: {_counts(self.no_choice) or 'none'}"
        yield from self.swaps.lines(self.hours, self.busy_hours)
        yield from self._saved()
        for reason, count in self.untold.items():
            yield f"cannot tell: {count} of the {self.intended['swap']} swaps: {reason}"
        yield f"what there was to win: {self.headroom.sentence()}"
        if self.told:
            yield (
                f"host memory: these swaps would have needed {self.peak_blocks} blocks at the same time, of "
                f"{self.host_blocks} assumed"
            )
        for warning in self.warnings:
            yield f"warning: {warning}"
        if NOT_PREDICTED in self.untold:
            named = shlex.join([*self.traces, *(("--between", *self.between) if self.between else ())])
            yield f"for prices: kvpolicy shadow {named} --cost-model NAME, of `kvpolicy train` for this server"
        for assumption in ASSUMPTIONS:
            yield f"assumes: {assumption}"

    def _saved(self) -> Iterator[str]:
        saving = self.per_hour
        if saving is None:
            why = "the traces hold no steps, and so no time" if self.hours is None else "no saving is known"
            yield f"would have saved: cannot be told: {why}"
            return
        share = self.share_of_busy
        part = "" if share is None else f", {share_text(abs(share))} of the time in steps"
        yield (
            f"would have saved: {saving.mean_s:.3g} s of engine time per hour and core, 95% {saving.low_s:.3g} to "
            f"{saving.high_s:.3g}{part}: {saving.verdict}"
        )
        yield f"  by the errors of predictions alone: {saving.model_low_s:.3g} to {saving.model_high_s:.3g}"
        if saving.parts_low_s is not None and saving.parts_high_s is not None:
            between = f"{saving.parts_low_s:.3g} to {saving.parts_high_s:.3g}"
            yield f"  by the difference between parts of the run alone: {between}"
        yield (
            f"  {self.told} swaps, predicted to cost {self.swap_s:.3g} s, in place of recomputes of "
            f"{self.recompute_s:.3g} s ({self.measured} measured)"
        )
        if self.not_measured and self.measured < self.told:
            yield f"  recomputes count as predicted where they could not be measured: {self.not_measured}"
        if self.measured_over_predicted is not None:
            yield f"  these recomputes cost {self.measured_over_predicted:.3g} times what was predicted"
        if self.hours is not None and self.hours < MIN_HOURS:
            yield f"  the run was shorter than {MIN_HOURS:g} h: other hours may differ by more than this interval says"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def shadow_savings(
    traces: Sequence[Path | str],
    cost_model: CostModel | Path | str | None = None,
    between: tuple[str, str] | None = None,
) -> ShadowSavings:
    """What traces in shadow mode say that their policy would have saved.

    ``cost_model``: prices decisions of a policy that predicted nothing. ``between``: what was recorded between two
    times alone, such as ``("-2h", "end")`` (:mod:`kvpolicy.trace.window`). Raises TraceError for a folder that cannot
    be read or is given twice, InputError for a profile, for a core that executed a swap, and for no decision at all.
    """
    refuse_no_paths("traces", traces)
    if isinstance(cost_model, str | Path):
        cost_model = load_cost_model(cost_model)
    if cost_model is not None:
        refuse_other("cost_model", cost_model, CostModel, "a cost model, its folder, or the name of a shipped one")
    folders = list(map(str, traces))
    for folder in folders:
        if folders.count(folder) > 1:
            raise InputError(f"{folder}: given twice")
    found = savings_of(trace_files.read_between(folders, between, "decisions"), cost_model)
    return replace(found, traces=tuple(folders), between=None if between is None else (between[0], between[1]))


def savings_of(by_name: Mapping[str, Trace], cost_model: CostModel | None = None) -> ShadowSavings:
    """As :func:`shadow_savings`, of traces in memory, by the names that errors give them."""
    by_name, not_measured = _attributed(by_name, cost_model)
    intended, no_choice, untold = Counter[str](dict.fromkeys(KINDS, 0)), Counter[str](), Counter[str]()
    told: list[Told] = []
    swaps: list[tuple[Row, Row | None]] = []
    spans: dict[str, tuple[float, float, float]] = {}
    policies: dict[str, None] = {}
    headers = {core: header for trace in by_name.values() for core, header in trace.headers.items()}
    for name, trace in by_name.items():
        starts_s = _spans(trace, spans)
        outcomes = {row["preemption_id"]: row for row in trace.rows("outcomes")}
        for row in trace.rows("decisions", DECISIONS):
            _refuse_served(name, row, headers[row["core"]].source)
            policies[row["policy"]] = None
            if len(row["options"]) < 2:
                no_choice[row["reason"] or "one option"] += 1
                continue
            kind = row["options"][row["chosen"]]["kind"]
            intended[kind] += 1
            if kind == "swap":
                swaps.append((row, outcomes.get(row["preemption_id"])))
                found = _told(*swaps[-1], starts_s, cost_model)
                if isinstance(found, Told):
                    told.append(found)
                else:
                    untold[found] += 1
    if not policies:
        raise InputError(f"{', '.join(by_name)}: table decisions holds no decision")
    host_blocks = min(header.host_blocks for header in headers.values())
    told, peak = _within(told, {core: header.host_blocks for core, header in headers.items()}, untold)
    hours = sum(end - begin for begin, end, _ in spans.values()) / HOUR_S if spans else None
    measured = [one for one in told if one.measured and one.predicted_s > 0]
    predicted_s = sum(one.predicted_s for one in measured)
    return ShadowSavings(
        policies=tuple(policies),
        cores=len(headers),
        hours=hours,
        busy_hours=sum(busy for _, _, busy in spans.values()) / HOUR_S if spans else None,
        intended=dict(intended),
        swaps=IntendedSwaps.of(swaps),
        no_choice=dict(no_choice),
        told=len(told),
        measured=sum(one.measured for one in told),
        untold=dict(untold),
        recompute_s=sum(one.recompute_s for one in told),
        swap_s=sum(one.swap_s for one in told),
        measured_over_predicted=sum(one.recompute_s for one in measured) / predicted_s if predicted_s else None,
        # Where every swap is unknown nothing can be said; where none was intended, nothing would have been saved.
        per_hour=_per_hour(told, spans) if hours and (told or not untold) else None,
        peak_blocks=peak,
        host_blocks=host_blocks,
        headroom=log_headroom(list(by_name.values()), cost_model),
        not_measured=not_measured,
        warnings=pricing_warnings(
            policies, headers.values(), None if all(_is_priced(row) for row, _ in swaps) else cost_model
        ),
        traces=tuple(by_name),
    )


def _attributed(by_name: Mapping[str, Trace], cost_model: CostModel | None) -> tuple[dict[str, Trace], str]:
    """The traces with what their preemptions cost, where their steps say so; and why those of a core do not."""
    attributed, reason = {}, ""
    for name, trace in by_name.items():
        refuse_doubled(name, trace)
        models, why = step_times_of(trace, None if cost_model is None else cost_model.step_time)
        attributed[name] = attribute(trace, models)
        if trace.headers.keys() - models.keys():
            reason = reason or why
    return attributed, reason


def _refuse_served(name: str, row: Row, source: str) -> None:
    if source == "profile":
        raise InputError(f"{name}: is a profile, which measured both options: kvpolicy evaluate replays it")
    if row["executed"] == "swap":
        raise InputError(
            f"{name}: core {row['core']} executed a swap, so it was not served with --shadow: kvpolicy evaluate judges "
            "a log of what was served"
        )


def _spans(trace: Trace, spans: dict[str, tuple[float, float, float]]) -> dict[tuple[str, int], float]:
    """When each step began. Adds each core's begin, end and seconds in steps to ``spans``."""
    starts_s: dict[tuple[str, int], float] = {}
    weights = trace.step_weights().to_pylist()
    for row, weight in zip(trace.rows("steps", ("core", "step", "start_s", "duration_s")), weights, strict=True):
        core, begin_s = row["core"], row["start_s"]
        end_s = begin_s + row["duration_s"]
        first_s, last_s, busy_s = spans.get(core, (begin_s, end_s, 0.0))
        spans[core] = min(first_s, begin_s), max(last_s, end_s), busy_s + weight * row["duration_s"]
        starts_s[core, row["step"]] = begin_s
    return starts_s


def _is_priced(row: Row) -> bool:
    """Whether the policy predicted what the options cost."""
    return len(row["costs"]) == len(row["options"])


def _told(
    row: Row, outcome: Row | None, starts_s: Mapping[tuple[str, int], float], cost_model: CostModel | None
) -> Told | str:
    """The saving of a swap that was intended; or why it is not known."""
    costs = row["costs"]
    if not _is_priced(row):
        if cost_model is None:
            return NOT_PREDICTED
        options = [Option(**option) for option in row["options"]]
        costs = [asdict(cost) for cost in cost_model.predict(situation_of(row), options)]
    by_kind = {option["kind"]: cost for option, cost in zip(row["options"], costs, strict=True)}
    recompute, swap = by_kind["recompute"], by_kind["swap"]
    if recompute["extrapolated"] or swap["extrapolated"]:
        return EXTRAPOLATED
    measured_s = None if outcome is None else outcome["engine_s"]
    low_s, high_s = (recompute["low_s"], recompute["high_s"]) if measured_s is None else (measured_s, measured_s)
    bounds = low_s - swap["high_s"], high_s - swap["low_s"]
    recompute_s = recompute["engine_s"] if measured_s is None else measured_s
    if not all(map(isfinite, (*bounds, recompute_s, swap["engine_s"]))):
        return UNBOUNDED
    return Told(
        core=row["core"],
        at_s=starts_s.get((row["core"], row["step"]), -inf),
        until_s=inf if outcome is None else outcome["closed_s"],
        blocks=row["held_blocks"],
        recompute_s=recompute_s,
        predicted_s=recompute["engine_s"],
        measured=measured_s is not None,
        swap_s=swap["engine_s"],
        low_s=bounds[0],
        high_s=bounds[1],
    )


def _within(told: Sequence[Told], host_blocks: Mapping[str, int], untold: Counter[str]) -> tuple[list[Told], int]:
    """Those whose blocks fit into their core's host memory beside those before them; and the most blocks that they need
    at the same time. Where no step says when a preemption was, it is taken to be alone."""
    fitting: list[Told] = []
    held: dict[str, list[Told]] = {}
    peak = 0
    for one in sorted(told, key=lambda one: one.at_s):
        present = [other for other in held.get(one.core, ()) if other.until_s > one.at_s and isfinite(one.at_s)]
        used = sum(other.blocks for other in present) + one.blocks
        if used > host_blocks[one.core]:
            untold[HOST_FULL] += 1
            continue
        peak = max(peak, used)
        fitting.append(one)
        held[one.core] = [*present, one]
    return fitting, peak


def _per_hour(told: Sequence[Told], spans: Mapping[str, tuple[float, float, float]]) -> Saving:
    hours = sum(end - begin for begin, end, _ in spans.values()) / HOUR_S
    mean_s = sum(one.saved_s for one in told) / hours
    model_low_s, model_high_s = (sum(values) / hours for values in zip(*((one.low_s, one.high_s) for one in told),
                                                                      strict=True)) if told else (0.0, 0.0)  # fmt: skip
    by_part = _by_part(told, spans)
    if len(by_part) < 2:
        return Saving(mean_s, model_low_s, model_high_s, model_low_s, model_high_s, None, None)
    middle, low_s, high_s = student_interval(by_part)
    half_s = (high_s - low_s) / 2
    return Saving(
        mean_s, model_low_s - half_s, model_high_s + half_s, model_low_s, model_high_s, middle - half_s, middle + half_s
    )


def _by_part(told: Sequence[Told], spans: Mapping[str, tuple[float, float, float]]) -> list[float]:
    """Seconds saved per hour in each of :data:`PARTS` equal parts of every core's time."""
    parts: list[float] = []
    for core, (begin_s, end_s, _) in spans.items():
        if end_s <= begin_s:
            continue
        saved = [0.0] * PARTS
        for one in told:
            if one.core == core and isfinite(one.at_s):
                place = int(PARTS * (one.at_s - begin_s) / (end_s - begin_s))
                saved[min(PARTS - 1, max(0, place))] += one.saved_s
        parts += [seconds * PARTS * HOUR_S / (end_s - begin_s) for seconds in saved]
    return parts
