"""Overflows and served runs of a trace: everything that the report's findings and figures are made from."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf
from typing import Any

from kvpolicy.attribution.offline import attribute, step_time_models
from kvpolicy.attribution.step_time import StepTimeModel
from kvpolicy.events import KINDS, Kind
from kvpolicy.overflow import SERVED, figure_and_level
from kvpolicy.trace import Header, Trace, TraceError

Row = Mapping[str, Any]

DECISIONS = (
    "core", "preemption_id", "overflow_id", "step", "time_s", "cause", "computed_tokens", "block_size",
    "running_requests", "host_blocks", "executed", "state_id", "arm", "repeat",
)  # fmt: skip
STEPS = (
    "core", "step", "start_s", "duration_s", "scheduled_tokens", "decode_requests", "running_requests",
    "waiting_requests", "used_blocks", "recomputed_tokens", "preemptions", "loads",
)  # fmt: skip
WINDOWS = ("core", "state_id", "arm", "repeat", "first_step", "last_step", "duration_s", "preemption_id", "discarded")
PINNED = ("core", "preemption_id", "pinned")
OUTCOMES = ("core", "preemption_id", "ended", "closed_s", "engine_s", "recomputed_tokens", "loaded_tokens")


@dataclass(frozen=True, slots=True)
class Overflow:
    """All preemptions of one scheduling step, in a window that was not discarded, under one option."""

    figure: str
    """Figure it was measured for; empty in a profile."""
    level: int
    """See :data:`kvpolicy.overflow.LEVELS`; 0 in a profile."""
    state_id: str
    repeat: int
    arm: Kind
    cause: str
    block_size: int
    pinned: bool | None
    """Whether its copies used page-locked host memory; None where nothing was copied."""
    victims: int
    evicted_tokens: int
    running_requests: int
    """Running requests besides the first victim."""
    engine_s: float

    @property
    def victim_tokens(self) -> float:
        return self.evicted_tokens / self.victims


@dataclass(frozen=True, slots=True)
class Mark:
    """A preemption, or the return of a victim."""

    time_s: float
    """Since the run's first step."""
    kind: Kind
    """The option that was executed."""


@dataclass(frozen=True, slots=True)
class ServedRun:
    """A workload served to its end. Tuples hold one entry per step, but for the marks."""

    figure: str
    level: int
    arm: str
    """The policy."""
    repeat: int
    makespan_s: float
    overhead_s: float
    """Sum of the attributed ``engine_s`` of its preemptions."""
    unattributed: int
    """Preemptions whose cost could not be attributed and is missing from ``overhead_s``."""
    preemptions: Mapping[str, int]
    """Counts by executed option."""
    requests: int
    scaling: str
    """How the workload compares with the paper's; empty where the trace does not say."""
    end_s: tuple[float, ...]
    """End of each step, since the start of the first."""
    duration_s: tuple[float, ...]
    decoded: tuple[int, ...]
    """Requests that emitted a token by decoding; first tokens are not counted."""
    used_share: tuple[float, ...]
    """Share of the device's KV blocks in use."""
    host_bytes: tuple[float, ...]
    """Saved KV in host memory."""
    running: tuple[int, ...]
    waiting: tuple[int, ...]
    returning: tuple[bool, ...]
    """Whether the step admits a waiting request or brings a preempted one back."""
    preempted: tuple[Mark, ...]
    resumed: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Material:
    """Measurements of one machine, model and link."""

    trace: Trace
    overflows: tuple[Overflow, ...]
    runs: tuple[ServedRun, ...]
    left_out: Mapping[str, int]
    """Counts of what was left out, by reason."""
    step_error_s: Mapping[str, float]
    """Held-out error of the step-time model (what a step would have taken undisturbed), by core.

    Single costs below it cannot be told from noise.
    """

    @property
    def header(self) -> Header:
        return next(iter(self.trace.headers.values()))

    def overflows_of(self, figure: str) -> tuple[Overflow, ...]:
        return tuple(overflow for overflow in self.overflows if overflow.figure == figure)

    def served(self, figure: str) -> tuple[ServedRun, ...]:
        return tuple(run for run in self.runs if run.figure == figure)


def material(trace: Trace) -> Material:
    """Collect a trace's measurements; missing costs are attributed from its steps.

    Raises TraceError where the trace contradicts itself.
    """
    models = _step_times(trace)
    trace = attribute(trace, models) if trace.table("outcomes")["engine_s"].null_count and models else trace
    errors = {core: model.error.mean_s for core, model in models.items()}
    outcomes = {(row["core"], row["preemption_id"]): row for row in trace.rows("outcomes", OUTCOMES)}
    windows = [row for row in trace.rows("windows", WINDOWS) if not row["discarded"]]
    decisions = trace.rows("decisions", DECISIONS)
    left_out: Counter[str] = Counter()
    overflows = _overflows(trace, decisions, outcomes, windows, left_out)
    runs = _ServedRuns(trace, decisions, outcomes).runs(windows)
    return Material(trace, overflows, runs, dict(left_out), errors)


def _step_times(trace: Trace) -> dict[str, StepTimeModel]:
    try:
        return step_time_models(trace)
    except TraceError:
        # Where every cost is stored, steps are not needed.
        if trace.table("outcomes")["engine_s"].null_count:
            raise
        return {}


def _overflows(
    trace: Trace,
    decisions: Sequence[Row],
    outcomes: Mapping[tuple[str, str], Row],
    windows: Sequence[Row],
    left_out: Counter[str],
) -> tuple[Overflow, ...]:
    steps_by_window = {_labels(row): range(row["first_step"], row["last_step"] + 1) for row in windows}
    pinned = {(row["core"], row["preemption_id"]): row["pinned"] for row in trace.rows("transfers", PINNED)}
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in decisions:
        if row["state_id"] is not None and _served_figure(row["state_id"]) is None:
            groups[row["core"], row["overflow_id"]].append(row)
    overflows = []
    for (core, _), rows in groups.items():
        first = rows[0]
        # A discarded window and its repetition have the same labels but different steps.
        if first["step"] not in steps_by_window.get(_labels(first), ()):
            left_out["overflows in discarded windows"] += 1
            continue
        group_outcomes = [outcomes.get((core, row["preemption_id"])) for row in rows]
        reason = _exclusion(rows, group_outcomes)
        if reason:
            left_out[reason] += 1
            continue
        engine_s = sum(outcome["engine_s"] for outcome in group_outcomes if outcome is not None)
        overflows.append(_overflow(rows, engine_s, pinned.get((core, first["preemption_id"]))))
    return tuple(sorted(overflows, key=lambda each: (each.figure, each.level, each.state_id, each.repeat, each.arm)))


def _labels(row: Row) -> tuple[str, str, str, int]:
    return row["core"], row["state_id"], row["arm"], row["repeat"]


def _served_figure(state: str) -> str | None:
    figure_level = figure_and_level(state)
    return figure_level[0] if figure_level and figure_level[0] in SERVED else None


def _exclusion(rows: Sequence[Row], outcomes: Sequence[Row | None]) -> str:
    """Why an overflow is left out; empty where it counts."""
    if any(row["executed"] != row["arm"] for row in rows):
        return "overflows in which something else was executed"
    if any(outcome is None or outcome["ended"] != "resumed" for outcome in outcomes):
        return "overflows whose victims were not all resumed"
    if any(outcome is not None and outcome["engine_s"] is None for outcome in outcomes):
        return "overflows whose cost could not be attributed"
    return ""


def _overflow(rows: Sequence[Row], engine_s: float, pinned: bool | None) -> Overflow:
    first = rows[0]
    figure, level = figure_and_level(first["state_id"]) or ("", 0)
    return Overflow(
        figure, level, first["state_id"], first["repeat"], first["arm"], first["cause"], first["block_size"], pinned,
        len(rows), sum(row["computed_tokens"] for row in rows), first["running_requests"], engine_s,
    )  # fmt: skip


class _ServedRuns:
    """Builds the served runs from a trace's tables."""

    def __init__(self, trace: Trace, decisions: Sequence[Row], outcomes: Mapping[tuple[str, str], Row]) -> None:
        self._trace = trace
        self._outcomes = outcomes
        self._decisions = _by_core(decisions)
        trace.refuse_sampled("a report of served runs")
        self._steps = _by_core(trace.rows("steps", STEPS))
        self._transfers = _by_core(trace.rows("transfers", ("core", "preemption_id", "direction", "bytes", "end_s")))
        self._requests = _by_core(trace.rows("requests", ("core", "arrival_s")))

    def runs(self, windows: Iterable[Row]) -> tuple[ServedRun, ...]:
        whole_runs = [row for row in windows if _served_figure(row["state_id"]) and row["preemption_id"] is None]
        runs = [self._run(row) for row in whole_runs]
        return tuple(sorted(runs, key=lambda run: (run.figure, run.level, run.arm, run.repeat)))

    def _run(self, window: Row) -> ServedRun:
        core, numbers = window["core"], range(window["first_step"], window["last_step"] + 1)
        figure, level = figure_and_level(window["state_id"]) or ("", 0)
        steps = sorted((row for row in self._steps[core] if row["step"] in numbers), key=lambda row: row["start_s"])
        if not steps:
            raise TraceError(
                f"core {core}: table windows names steps {numbers.start} to {numbers.stop - 1} of "
                f"{window['state_id']}, table steps has none of them"
            )
        preempted = [row for row in self._decisions[core] if row["step"] in numbers]
        pairs = [(row, self._outcomes.get((core, row["preemption_id"]))) for row in preempted]
        costs = [outcome["engine_s"] for _, outcome in pairs if outcome is not None and outcome["engine_s"] is not None]
        start_s = steps[0]["start_s"]
        header = self._trace.headers[core]
        # One engine serves with several memory sizes, recorded per state.
        blocks = header.noise.get("device_blocks", {}).get(window["state_id"], header.device_blocks)
        earlier_ends_s = [
            row["start_s"] + row["duration_s"] for row in self._steps[core] if row["step"] < numbers.start
        ]
        end_s = [row["start_s"] + row["duration_s"] - start_s for row in steps]
        return ServedRun(
            figure=figure,
            level=level,
            arm=window["arm"],
            repeat=window["repeat"],
            makespan_s=window["duration_s"],
            overhead_s=sum(costs),
            unattributed=len(preempted) - len(costs),
            preemptions={kind: sum(row["executed"] == kind for row in preempted) for kind in KINDS},
            # A run's requests arrive after the end of every earlier step and before the end of its own last step.
            requests=sum(
                max(earlier_ends_s, default=-inf) <= row["arrival_s"] < start_s + end_s[-1]
                for row in self._requests[core]
            ),
            scaling=header.notes,
            end_s=tuple(end_s),
            duration_s=tuple(row["duration_s"] for row in steps),
            decoded=tuple(row["decode_requests"] for row in steps),
            used_share=tuple(row["used_blocks"] / blocks for row in steps),
            host_bytes=self._host_bytes(
                core, {row["preemption_id"] for row in preempted}, [start_s + time_s for time_s in end_s]
            ),
            running=tuple(row["running_requests"] for row in steps),
            waiting=tuple(row["waiting_requests"] for row in steps),
            returning=tuple(
                row["loads"] > 0 or row["recomputed_tokens"] > 0 or row["scheduled_tokens"] > row["decode_requests"]
                for row in steps
            ),
            preempted=tuple(Mark(row["time_s"] - start_s, row["executed"]) for row in preempted),
            resumed=tuple(
                Mark(outcome["closed_s"] - start_s, row["executed"])
                for row, outcome in pairs
                if outcome and outcome["ended"] == "resumed"
            ),
        )

    def _host_bytes(self, core: str, ids: set[str], times_s: Sequence[float]) -> tuple[float, ...]:
        """Bytes at each moment that are saved and neither loaded back nor dropped with the end of the preemption."""
        transfers = [row for row in self._transfers[core] if row["preemption_id"] in ids]
        changes = []
        for _, rows in groupby(
            sorted(transfers, key=lambda row: row["preemption_id"]), lambda row: row["preemption_id"]
        ):
            copies = list(rows)
            saves = [row for row in copies if row["direction"] == "save"]
            size = sum(row["bytes"] for row in saves)
            if not saves:
                continue
            loads = [row["end_s"] for row in copies if row["direction"] == "load"]
            outcome = self._outcomes.get((core, copies[0]["preemption_id"]))
            changes.append((max(row["end_s"] for row in saves), size))
            if loads or outcome is not None:
                changes.append((max(loads) if loads else outcome["closed_s"] if outcome else 0.0, -size))
        changes.sort()
        held_bytes, total_bytes, next_change = [], 0, 0
        for time_s in times_s:
            while next_change < len(changes) and changes[next_change][0] <= time_s:
                total_bytes += changes[next_change][1]
                next_change += 1
            held_bytes.append(float(max(0, total_bytes)))
        return tuple(held_bytes)


def _by_core(rows: Iterable[Row]) -> dict[str, list[Row]]:
    by_core: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_core[row["core"]].append(row)
    return by_core
