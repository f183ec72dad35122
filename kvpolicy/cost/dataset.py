"""States measured under both options: what cost models are fitted to and policies are priced on.

A state is the unit: its windows are repeats of one situation, in one or several engine cores. Only windows that a
profile kept count, and only preemptions whose cost could be attributed in full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Any

from kvpolicy import trace as traces
from kvpolicy.cost.floor import Floor, floor_of
from kvpolicy.cost.impossible import (
    refuse_cost,
    refuse_doubled,
    refuse_negative,
    refuse_situation,
    refuse_sizes,
    spans_s,
)
from kvpolicy.cost.steps import attribute, common_step_time, step_time_models
from kvpolicy.cost.undisturbed import StepTimeModel
from kvpolicy.events import KINDS, SITUATION_FIELDS, Kind, Option, Preemption, situation_of
from kvpolicy.features import Features, features_of
from kvpolicy.hardware import Geometry, fingerprint, same_machine
from kvpolicy.trace import Header, Trace, TraceError

Row = Mapping[str, Any]

DECISION_COLUMNS = (*SITUATION_FIELDS, "core", "preemption_id", "state_id", "arm", "repeat", "executed")
WINDOW_COLUMNS = ("core", "preemption_id", "duration_s", "discarded")
"""What is read of the tables; the lists in them are most of what they hold."""

MIXING = ", or take them together with --mixed-hardware"


@dataclass(frozen=True, slots=True)
class Sample:
    """One kept window: a situation, what was done, what it cost."""

    situation: Preemption
    kind: Kind
    engine_s: float
    """Measured; noise can bring a small cost below 0."""
    core: str
    repeat: int
    preemption_id: str
    victim_delay_s: float | None = None
    others_delay_s: float | None = None

    @property
    def option(self) -> Option:
        if self.kind == "recompute":
            return Option("recompute")
        return Option("swap", self.situation.computed_tokens, "host")


@dataclass(frozen=True)
class State:
    """One situation, measured under both options."""

    name: str
    """``state_id`` in its trace."""
    ids: frozenset[str]
    """``CORE/STATE``, one per core it was measured in: what a model remembers."""
    samples: Mapping[Kind, tuple[Sample, ...]]
    """In the order of repeat and core, which is that of time."""

    @cached_property
    def mean_s(self) -> dict[Kind, float]:
        """What options are priced at."""
        return {kind: fmean(sample.engine_s for sample in some) for kind, some in self.samples.items()}

    @cached_property
    def typical_s(self) -> dict[Kind, float]:
        """Medians: what is learned. A hiccup of the machine in one window is no cost of the option."""
        return {kind: median(sample.engine_s for sample in some) for kind, some in self.samples.items()}

    @cached_property
    def mean_features(self) -> dict[Kind, Features]:
        """Over the samples. Kept: every fold of a fit asks again."""
        return {
            kind: Features(
                *map(fmean, zip(*(features_of(sample.situation, sample.option) for sample in some), strict=True))
            )
            for kind, some in self.samples.items()
        }

    @cached_property
    def computed_tokens(self) -> float:
        return fmean(sample.situation.computed_tokens for some in self.samples.values() for sample in some)

    @property
    def faster(self) -> Kind:
        return min(KINDS, key=self.mean_s.__getitem__)


@dataclass(frozen=True, slots=True)
class Move:
    """One finished transfer, one rank's part of it."""

    core: str
    preemption_id: str
    direction: str
    size_bytes: int
    segments: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class Dataset:
    """What a few traces of one machine, one model and one link hold."""

    states: tuple[State, ...]
    moves: tuple[Move, ...]
    natural: tuple[Preemption, ...]
    """Situations of all preemptions for want of memory, of the states and of any other."""
    headers: Mapping[str, Header]
    digests: tuple[str, ...]
    left_out: Mapping[str, int]
    """Preemptions and states that could not be used, by reason."""
    common_step_time: StepTimeModel | None = None
    """d0 of all cores together, which are of one machine and model; None where they hold too few undisturbed steps."""
    step_times: Mapping[str, StepTimeModel] = field(default_factory=dict)
    """d0 by core; none of a core without steps enough to tell it."""
    floor: Floor = field(default_factory=lambda: Floor((), (), {}))
    """What the costs rest on."""

    @property
    def budget_tokens(self) -> float:
        """Most tokens of a step; infinite where headers do not tell, or tell of several."""
        budgets = {header.token_budget for header in self.headers.values()}
        (budget,) = budgets if len(budgets) == 1 else (None,)
        return inf if budget is None else float(budget)

    def moves_of(self, states: Iterable[State]) -> tuple[Move, ...]:
        """The transfers that belong to windows of these states."""
        mine = {(one.core, one.preemption_id) for state in states for some in state.samples.values() for one in some}
        return tuple(move for move in self.moves if (move.core, move.preemption_id) in mine)

    @property
    def any_header(self) -> Header:
        return next(iter(self.headers.values()))

    @property
    def geometry(self) -> Geometry:
        return Geometry.from_dict(self.any_header.geometry)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        return tuple(sorted({header.block_size for header in self.headers.values()}))

    @property
    def kv_bytes_per_token(self) -> float:
        return self.any_header.block_bytes / self.any_header.block_size


def measured(folders: Sequence[Path | str], mixed_hardware: bool | None = None) -> Dataset:
    """Read traces; costs that are missing are attributed from their steps.

    ``mixed_hardware``: whether machines may differ; None where that is not to be had for the asking.

    Raises TraceError, naming table and row, for values that cannot be and rows that are there twice; naming both for
    traces of different machines, models or links; naming the option for traces in which one was never measured.
    """
    if not folders:
        raise TraceError("no trace was given")
    read: dict[str, Trace] = {}
    for folder in map(str, folders):
        if folder in read:
            raise TraceError(f"{folder}: given twice")
        read[folder] = traces.read(folder)
    return dataset_of(read, mixed_hardware)


def dataset_of(given: Mapping[str, Trace], mixed_hardware: bool | None = None) -> Dataset:
    """As :func:`measured`, of traces in memory; their names stand in error messages."""
    for folder, trace in given.items():
        refuse_doubled(folder, trace)
    step_times = {folder: _step_times(trace) for folder, trace in given.items()}
    read = {folder: _attributed(trace, step_times[folder]) for folder, trace in given.items()}
    models = {core: model for some in step_times.values() for core, model in some.items()}
    headers: dict[str, Header] = {}
    for folder, trace in read.items():
        for core, header in trace.headers.items():
            if core in headers:
                raise TraceError(f"{folder}: core {core} is in another of the traces too; is one given twice?")
            headers[core] = header
    refuse_mixture(headers, mixed_hardware)
    left_out: Counter[str] = Counter()
    states = [state for folder, trace in read.items() for state in _states(folder, trace, left_out)]
    return Dataset(
        states=tuple(states),
        moves=tuple(move for folder, trace in read.items() for move in _moves(folder, trace)),
        natural=tuple(
            situation_of(row)
            for trace in read.values()
            for row in trace.rows("decisions", SITUATION_FIELDS)
            if row["cause"] == "memory"
        ),
        headers=headers,
        digests=tuple(trace.digest() for trace in read.values()),
        left_out=dict(left_out),
        common_step_time=None if _mixed(headers) else common_step_time(list(read.values())),
        step_times=models,
        floor=floor_of(headers, models),
    )


def one_option_always_wins(states: Iterable[State]) -> Kind | None:
    """The option with the lower mean cost in every one of the states, if there is one."""
    winners = {state.faster for state in states}
    return winners.pop() if len(winners) == 1 else None


def _attributed(trace: Trace, step_times: Mapping[str, StepTimeModel]) -> Trace:
    return attribute(trace, step_times) if _unattributed(trace) else trace


def _unattributed(trace: Trace) -> bool:
    return bool(trace.table("outcomes")["engine_s"].null_count and trace.table("steps").num_rows)


def _step_times(trace: Trace) -> dict[str, StepTimeModel]:
    try:
        return step_time_models(trace)
    except TraceError:
        # Costs that are stored do not need the steps; those still to be attributed do.
        if _unattributed(trace):
            raise
        return {}


def _mixed(headers: Mapping[str, Header]) -> bool:
    first = next(iter(headers.values()))
    return any(not same_machine(first.hardware, header.hardware) for header in headers.values())


def refuse_mixture(headers: Mapping[str, Header], mixed_hardware: bool | None) -> None:
    """Raises TraceError naming both cores for different machines, models or links; ``mixed_hardware`` as above."""
    first_core, first = next(iter(headers.items()))
    for core, header in headers.items():
        pairs = {
            "machines": (fingerprint(first.hardware), fingerprint(header.hardware)),
            "models": (dict(first.geometry), dict(header.geometry)),
            "links": (dict(first.link), dict(header.link)),
            "KV bytes per token": (first.block_bytes / first.block_size, header.block_bytes / header.block_size),
        }
        different = {what: pair for what, pair in pairs.items() if pair[0] != pair[1]}
        if mixed_hardware or same_machine(first.hardware, header.hardware):
            different.pop("machines", None)
        for what, (one, other) in different.items():
            raise TraceError(
                f"cores {first_core} and {core} were measured on different {what}: {one} and {other} (header.json); "
                "use the traces of one at a time"
                + (MIXING if what == "machines" and mixed_hardware is not None else "")
            )


def _states(folder: str, trace: Trace, left_out: Counter[str]) -> list[State]:
    outcomes = {(row["core"], row["preemption_id"]): row for row in _outcomes(folder, trace)}
    windows = {}
    for number, row in enumerate(trace.rows("windows", WINDOW_COLUMNS)):
        refuse_negative(folder, "windows", number, row, "duration_s")
        if row["preemption_id"] is not None:
            windows[row["core"], row["preemption_id"]] = row
    found: dict[str, dict[Kind, list[Sample]]] = {}
    for number, row in enumerate(trace.rows("decisions", DECISION_COLUMNS)):
        refuse_situation(folder, number, row)
        if row["state_id"] is None:
            continue
        key = row["core"], row["preemption_id"]
        reason = _why_not(row, windows.get(key), outcomes.get(key))
        if reason:
            left_out[reason] += 1
            continue
        sample = _sample(folder, number, row, outcomes[key])
        found.setdefault(row["state_id"], {}).setdefault(sample.kind, []).append(sample)
    _refuse_missing_arm(folder, found)
    left_out["states measured under one option only"] += sum(len(arms) < len(KINDS) for arms in found.values())
    return [_state(name, arms) for name, arms in sorted(found.items()) if len(arms) == len(KINDS)]


def _why_not(decision: Row, window: Row | None, outcome: Row | None) -> str:
    if window is None or window["discarded"]:
        return "windows that were discarded"
    if outcome is None or outcome["ended"] != "resumed":
        return "preemptions whose outcome is not whole"
    if outcome["engine_s"] is None:
        return "preemptions whose cost could not be attributed"
    if decision["executed"] != decision["arm"]:
        return "preemptions in which something else was executed"
    return ""


def _outcomes(folder: str, trace: Trace) -> list[dict[str, Any]]:
    """The outcomes, each time and cost of which can be."""
    rows, span_s = trace.rows("outcomes"), spans_s(trace)
    for number, row in enumerate(rows):
        for name in ("victim_delay_s", "wait_blocks_s"):
            refuse_negative(folder, "outcomes", number, row, name)
        if row["engine_s"] is not None:
            refuse_cost(folder, number, row, span_s[row["core"]])
    return rows


def _sample(folder: str, number: int, row: Row, outcome: Row) -> Sample:
    refuse_sizes(folder, number, row)
    return Sample(
        situation_of(row), row["arm"], outcome["engine_s"], row["core"], row["repeat"], row["preemption_id"],
        outcome["victim_delay_s"], outcome["others_delay_s"],
    )  # fmt: skip


def _state(name: str, arms: Mapping[Kind, list[Sample]]) -> State:
    ids = frozenset(f"{sample.core}/{name}" for some in arms.values() for sample in some)
    ordered = {kind: tuple(sorted(arms[kind], key=lambda sample: (sample.repeat, sample.core))) for kind in KINDS}
    return State(name, ids, ordered)


def _refuse_missing_arm(folder: str, found: Mapping[str, Mapping[Kind, Any]]) -> None:
    arms = {kind for state in found.values() for kind in state}
    if not found:
        raise TraceError(
            f"{folder}: tables decisions and windows hold no measured state; `kvpolicy profile` measures some"
        )
    for kind in KINDS:
        if kind not in arms:
            raise TraceError(f"{folder}: table decisions has no kept row with arm {kind!r}: it was not measured")


def _moves(folder: str, trace: Trace) -> list[Move]:
    moves = []
    for number, row in enumerate(trace.rows("transfers")):
        refuse_negative(folder, "transfers", number, row | {"duration_s": row["end_s"] - row["start_s"]}, "duration_s")
        if row["ok"]:
            # `bytes` is summed over ranks, segments are one rank's.
            size = row["segments"] * row["segment_bytes"]
            took_s = row["end_s"] - row["start_s"]
            moves.append(Move(row["core"], row["preemption_id"], row["direction"], size, row["segments"], took_s))
    return moves
