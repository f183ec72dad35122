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

import pyarrow as pa
import pyarrow.compute as pc

from kvpolicy import trace as traces
from kvpolicy.attribution.offline import attribute, common_step_time, step_time_models
from kvpolicy.attribution.step_time import StepTimeModel
from kvpolicy.datasets.quality import Floor, floor_of
from kvpolicy.datasets.tables import Arms, Move, Moves, Sample, Situations, key
from kvpolicy.datasets.validation import refuse_doubled
from kvpolicy.datasets.windows import all_moves, kept_windows
from kvpolicy.events import KINDS, SITUATION_FIELDS, Kind, Preemption
from kvpolicy.features import Features, features_of
from kvpolicy.hardware import Geometry, fingerprint, same_machine
from kvpolicy.trace import Header, Trace, TraceError

__all__ = ["Dataset", "Move", "Sample", "State", "dataset_of", "measured", "one_option_always_wins"]

MIXING = ", or take them together with --mixed-hardware"


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
        return {kind: fmean(self.costs_s(kind)) for kind in self.samples}

    @cached_property
    def typical_s(self) -> dict[Kind, float]:
        """Medians: what is learned. A hiccup of the machine in one window is no cost of the option."""
        return {kind: median(self.costs_s(kind)) for kind in self.samples}

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
        return fmean(self.lengths)

    @cached_property
    def preemptions(self) -> tuple[str, ...]:
        """As :func:`kvpolicy.datasets.tables.key` tells them apart."""
        return tuple(key(one.core, one.preemption_id) for some in self.samples.values() for one in some)

    @property
    def lengths(self) -> list[int]:
        """Computed tokens of all windows."""
        if isinstance(self.samples, Arms):
            return self.samples.computed_tokens()
        return [sample.situation.computed_tokens for some in self.samples.values() for sample in some]

    def costs_s(self, kind: Kind) -> list[float]:
        """What its windows cost under one option."""
        if isinstance(self.samples, Arms):
            return self.samples.costs_s(kind)
        return [sample.engine_s for sample in self.samples[kind]]

    @property
    def faster(self) -> Kind:
        return min(KINDS, key=self.mean_s.__getitem__)


@dataclass(frozen=True, slots=True)
class Dataset:
    """What a few traces of one machine, one model and one link hold."""

    states: tuple[State, ...]
    moves: Sequence[Move]
    natural: Sequence[Preemption]
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

    def moves_of(self, states: Iterable[State]) -> Moves:
        """The transfers that belong to windows of these states."""
        return Moves.of(self.moves).of_preemptions(name for state in states for name in state.preemptions)

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
        moves=all_moves(read),
        natural=_natural(read.values()),
        headers=headers,
        digests=tuple(trace.digest() for trace in read.values()),
        left_out=dict(left_out),
        common_step_time=None if _mixed(headers) else common_step_time(list(read.values())),
        step_times=models,
        floor=floor_of(headers, models),
    )


def one_option_always_wins(states: Iterable[State]) -> Kind | None:
    """The option with the lower mean cost in every one of the states, if there is one."""
    winners: set[Kind] = set()
    for state in states:
        winners.add(state.faster)
        if len(winners) > 1:
            return None
    return next(iter(winners), None)


def _natural(read: Iterable[Trace]) -> Situations:
    decisions = [trace.table("decisions").select(list(SITUATION_FIELDS)) for trace in read]
    return Situations(pa.concat_tables([some.filter(pc.equal(some["cause"], "memory")) for some in decisions]))


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
    windows, bounds = kept_windows(folder, trace, left_out)
    made = []
    for name, rows in bounds:
        arms = Arms(windows, rows)
        made.append(State(name, frozenset(f"{core}/{name}" for core in arms.cores()), arms))
    return made
