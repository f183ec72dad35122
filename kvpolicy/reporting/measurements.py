"""What the figures are drawn from: overflows and served runs, read out of a trace and of nothing else."""

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
    """All preemptions of one scheduling step in one kept window, under one option."""

    figure: str
    """Which figure it was measured for; empty for one of a profile."""
    level: int
    """See :data:`kvpolicy.overflow.LEVELS`; 0 for one of a profile."""
    state_id: str
    repeat: int
    arm: Kind
    cause: str
    block_size: int
    pinned: bool | None
    """Whether its copies went to page-locked memory; None where nothing was copied."""
    victims: int
    evicted_tokens: int
    running_requests: int
    """Besides the first victim."""
    engine_s: float

    @property
    def victim_tokens(self) -> float:
        return self.evicted_tokens / self.victims


@dataclass(frozen=True, slots=True)
class Mark:
    """A preemption or the return of a victim, by what was executed."""

    time_s: float
    """Since the run began."""
    kind: Kind


@dataclass(frozen=True, slots=True)
class ServedRun:
    """A workload served to its end, the steps of it one entry each."""

    figure: str
    level: int
    arm: str
    """The policy."""
    repeat: int
    makespan_s: float
    overhead_s: float
    """Sum of the attributed ``engine_s`` of its preemptions."""
    unattributed: int
    """Preemptions whose cost could not be attributed and is missing from that."""
    preemptions: Mapping[str, int]
    """By what was executed."""
    requests: int
    scaling: str
    """What was served, beside what the paper served; empty where the trace does not say."""
    end_s: tuple[float, ...]
    """When each step ended, since the run began."""
    duration_s: tuple[float, ...]
    decoded: tuple[int, ...]
    """Requests that emitted a token by decoding; first tokens are not in it."""
    used_share: tuple[float, ...]
    """Of the device's KV blocks."""
    host_bytes: tuple[float, ...]
    """Saved KV that waits in host memory."""
    running: tuple[int, ...]
    waiting: tuple[int, ...]
    returning: tuple[bool, ...]
    """Whether the step admits a waiting request or brings a preempted one back."""
    taken: tuple[Mark, ...]
    resumed: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Material:
    """Everything of one machine, model and link that figures are drawn from."""

    trace: Trace
    overflows: tuple[Overflow, ...]
    runs: tuple[ServedRun, ...]
    left_out: Mapping[str, int]
    d0_error_s: Mapping[str, float]
    """Held-out error of the step-time model, by core: the floor under every cost."""

    @property
    def header(self) -> Header:
        return next(iter(self.trace.headers.values()))

    def of(self, figure: str) -> tuple[Overflow, ...]:
        return tuple(one for one in self.overflows if one.figure == figure)

    def served(self, figure: str) -> tuple[ServedRun, ...]:
        return tuple(run for run in self.runs if run.figure == figure)


def material(trace: Trace) -> Material:
    """Read a trace; missing costs are attributed from its steps. Raises TraceError where it contradicts itself."""
    models = _step_times(trace)
    trace = attribute(trace, models) if trace.table("outcomes")["engine_s"].null_count and models else trace
    errors = {core: model.error.mean_s for core, model in models.items()}
    outcomes = {(row["core"], row["preemption_id"]): row for row in trace.rows("outcomes", OUTCOMES)}
    windows = [row for row in trace.rows("windows", WINDOWS) if not row["discarded"]]
    decisions = trace.rows("decisions", DECISIONS)
    left_out: Counter[str] = Counter()
    overflows = _overflows(trace, decisions, outcomes, windows, left_out)
    runs = _Served(trace, decisions, outcomes).runs(windows)
    return Material(trace, overflows, runs, dict(left_out), errors)


def _step_times(trace: Trace) -> dict[str, StepTimeModel]:
    try:
        return step_time_models(trace)
    except TraceError:
        # Costs that are stored need no steps.
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
    counting = {_labels(row): range(row["first_step"], row["last_step"] + 1) for row in windows}
    pinned = {(row["core"], row["preemption_id"]): row["pinned"] for row in trace.rows("transfers", PINNED)}
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in decisions:
        if row["state_id"] is not None and _served_figure(row["state_id"]) is None:
            groups[row["core"], row["overflow_id"]].append(row)
    found = []
    for (core, _), rows in groups.items():
        first = rows[0]
        # A discarded window and its second try have the same labels, and different steps.
        if first["step"] not in counting.get(_labels(first), ()):
            left_out["overflows in windows that do not count"] += 1
            continue
        ended = [outcomes.get((core, row["preemption_id"])) for row in rows]
        reason = _why_not(rows, ended)
        if reason:
            left_out[reason] += 1
            continue
        engine_s = sum(one["engine_s"] for one in ended if one is not None)
        found.append(_overflow(rows, engine_s, pinned.get((core, first["preemption_id"]))))
    return tuple(sorted(found, key=lambda one: (one.figure, one.level, one.state_id, one.repeat, one.arm)))


def _labels(row: Row) -> tuple[str, str, str, int]:
    return row["core"], row["state_id"], row["arm"], row["repeat"]


def _served_figure(state: str) -> str | None:
    known = figure_and_level(state)
    return known[0] if known and known[0] in SERVED else None


def _why_not(rows: Sequence[Row], outcomes: Sequence[Row | None]) -> str:
    if any(row["executed"] != row["arm"] for row in rows):
        return "overflows in which something else was executed"
    if any(one is None or one["ended"] != "resumed" for one in outcomes):
        return "overflows whose outcome is not whole"
    if any(one is not None and one["engine_s"] is None for one in outcomes):
        return "overflows whose cost could not be attributed"
    return ""


def _overflow(rows: Sequence[Row], engine_s: float, pinned: bool | None) -> Overflow:
    first = rows[0]
    figure, level = figure_and_level(first["state_id"]) or ("", 0)
    return Overflow(
        figure, level, first["state_id"], first["repeat"], first["arm"], first["cause"], first["block_size"], pinned,
        len(rows), sum(row["computed_tokens"] for row in rows), first["running_requests"], engine_s,
    )  # fmt: skip


class _Served:
    """Served runs out of a trace's tables."""

    def __init__(self, trace: Trace, decisions: Sequence[Row], outcomes: Mapping[tuple[str, str], Row]) -> None:
        self._trace = trace
        self._outcomes = outcomes
        self._decisions = _by_core(decisions)
        self._steps = _by_core(trace.rows("steps", STEPS))
        self._transfers = _by_core(trace.rows("transfers", ("core", "preemption_id", "direction", "bytes", "end_s")))
        self._asked = _by_core(trace.rows("requests", ("core", "arrival_s")))

    def runs(self, windows: Iterable[Row]) -> tuple[ServedRun, ...]:
        wanted = [row for row in windows if _served_figure(row["state_id"]) and row["preemption_id"] is None]
        found = [self._run(row) for row in wanted]
        return tuple(sorted(found, key=lambda run: (run.figure, run.level, run.arm, run.repeat)))

    def _run(self, window: Row) -> ServedRun:
        core, numbers = window["core"], range(window["first_step"], window["last_step"] + 1)
        figure, level = figure_and_level(window["state_id"]) or ("", 0)
        steps = sorted((row for row in self._steps[core] if row["step"] in numbers), key=lambda row: row["start_s"])
        if not steps:
            raise TraceError(
                f"core {core}: table windows names steps {numbers.start} to {numbers.stop - 1} of "
                f"{window['state_id']}, table steps has none of them"
            )
        taken = [row for row in self._decisions[core] if row["step"] in numbers]
        ended = [(row, self._outcomes.get((core, row["preemption_id"]))) for row in taken]
        costs = [one["engine_s"] for _, one in ended if one is not None and one["engine_s"] is not None]
        began = steps[0]["start_s"]
        header = self._trace.headers[core]
        # One engine serves under several memories.
        blocks = header.noise.get("device_blocks", {}).get(window["state_id"], header.device_blocks)
        before = [row["start_s"] + row["duration_s"] for row in self._steps[core] if row["step"] < numbers.start]
        end_s = [row["start_s"] + row["duration_s"] - began for row in steps]
        return ServedRun(
            figure=figure,
            level=level,
            arm=window["arm"],
            repeat=window["repeat"],
            makespan_s=window["duration_s"],
            overhead_s=sum(costs),
            unattributed=len(taken) - len(costs),
            preemptions={kind: sum(row["executed"] == kind for row in taken) for kind in KINDS},
            # They come after whatever was served before, and before this run's last step.
            requests=sum(
                max(before, default=-inf) <= row["arrival_s"] < began + end_s[-1] for row in self._asked[core]
            ),
            scaling=header.notes,
            end_s=tuple(end_s),
            duration_s=tuple(row["duration_s"] for row in steps),
            decoded=tuple(row["decode_requests"] for row in steps),
            used_share=tuple(row["used_blocks"] / blocks for row in steps),
            host_bytes=self._host_bytes(core, {row["preemption_id"] for row in taken}, [began + at for at in end_s]),
            running=tuple(row["running_requests"] for row in steps),
            waiting=tuple(row["waiting_requests"] for row in steps),
            returning=tuple(
                row["loads"] > 0 or row["recomputed_tokens"] > 0 or row["scheduled_tokens"] > row["decode_requests"]
                for row in steps
            ),
            taken=tuple(Mark(row["time_s"] - began, row["executed"]) for row in taken),
            resumed=tuple(
                Mark(one["closed_s"] - began, row["executed"])
                for row, one in ended
                if one and one["ended"] == "resumed"
            ),
        )

    def _host_bytes(self, core: str, ids: set[str], times_s: Sequence[float]) -> tuple[float, ...]:
        """At each moment: saved and not yet loaded back, nor given up with the end of the preemption."""
        mine = [row for row in self._transfers[core] if row["preemption_id"] in ids]
        changes = []
        for _, rows in groupby(sorted(mine, key=lambda row: row["preemption_id"]), lambda row: row["preemption_id"]):
            of_one = list(rows)
            saves = [row for row in of_one if row["direction"] == "save"]
            size = sum(row["bytes"] for row in saves)
            if not saves:
                continue
            loads = [row["end_s"] for row in of_one if row["direction"] == "load"]
            outcome = self._outcomes.get((core, of_one[0]["preemption_id"]))
            changes.append((max(row["end_s"] for row in saves), size))
            if loads or outcome is not None:
                changes.append((max(loads) if loads else outcome["closed_s"] if outcome else 0.0, -size))
        changes.sort()
        found, held, at = [], 0, 0
        for time_s in times_s:
            while at < len(changes) and changes[at][0] <= time_s:
                held += changes[at][1]
                at += 1
            found.append(float(max(0, held)))
        return tuple(found)


def _by_core(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["core"]].append(row)
    return found
