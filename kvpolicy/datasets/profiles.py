"""States measured under both options, which cost models are fitted to and policies are evaluated on.

A state is one situation. Its windows are repeats of it, in one or several engine cores. Only windows that the profile
did not discard count, and only preemptions whose complete cost could be attributed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from pathlib import Path
from statistics import fmean, median

import pyarrow as pa
import pyarrow.compute as pc

from kvpolicy import trace as traces
from kvpolicy.attribution.offline import attribute, common_step_time, step_time_models
from kvpolicy.attribution.step_time import StepTimeModel
from kvpolicy.attribution.step_work import BatchPrices, batch_prices, batches_of
from kvpolicy.datasets.host_memory import memory_name, pinned_by_core
from kvpolicy.datasets.quality import DataQuality, floor_of
from kvpolicy.datasets.tables import Arms, Sample, Situations, TransferRecord, TransferTable, key
from kvpolicy.datasets.validation import refuse_doubled
from kvpolicy.datasets.windows import all_transfers, valid_windows
from kvpolicy.events import KINDS, SITUATION_FIELDS, Kind, Preemption
from kvpolicy.features import Features, features_of, with_hits
from kvpolicy.hardware import Geometry, fingerprint, same_machine
from kvpolicy.trace import Header, Trace, TraceError

__all__ = ["Dataset", "Sample", "State", "TransferRecord", "dataset_of", "one_option_always_wins", "read_dataset"]

MIXING = ", or take them together with --mixed-hardware"


@dataclass(frozen=True)
class State:
    """One situation, measured under both options."""

    name: str
    """``state_id`` in its trace."""
    ids: frozenset[str]
    """``CORE/STATE``, one per core it was measured in, as a model records them."""
    samples: Mapping[Kind, tuple[Sample, ...]]
    """In order of repeat and core, which is the order of time."""

    @cached_property
    def mean_s(self) -> dict[Kind, float]:
        """Mean cost by option: the price of an option in evaluations."""
        return {kind: fmean(self.costs_s(kind)) for kind in self.samples}

    @cached_property
    def typical_s(self) -> dict[Kind, float]:
        """Median cost by option: the training target, robust against a disturbance of the machine in one window."""
        return {kind: median(self.costs_s(kind)) for kind in self.samples}

    @cached_property
    def mean_features(self) -> dict[Kind, Features]:
        """Mean features by option over the samples, of what was really lost. Cached, because every fold of a fit uses
        them."""
        return {
            kind: _mean(
                features_of(with_hits(sample.situation, sample.hit_tokens), sample.option) for sample in samples
            )
            for kind, samples in self.samples.items()
        }

    @cached_property
    def expected_features(self) -> dict[Kind, Features]:
        """The same as they were known at the decisions."""
        return {
            kind: _mean(features_of(sample.situation, sample.option) for sample in samples)
            for kind, samples in self.samples.items()
        }

    @cached_property
    def computed_tokens(self) -> float:
        return fmean(self.lengths)

    @cached_property
    def preemptions(self) -> tuple[str, ...]:
        """Keys of its preemptions, as made by :func:`kvpolicy.datasets.tables.key`."""
        return tuple(key(sample.core, sample.preemption_id) for samples in self.samples.values() for sample in samples)

    @property
    def cores(self) -> set[str]:
        """Engine cores that it was measured in."""
        return {name.removesuffix(f"/{self.name}") for name in self.ids}

    @property
    def lengths(self) -> list[int]:
        """Computed tokens of each window."""
        if isinstance(self.samples, Arms):
            return self.samples.computed_tokens()
        return [sample.situation.computed_tokens for samples in self.samples.values() for sample in samples]

    def costs_s(self, kind: Kind) -> list[float]:
        """Cost of each of its windows under one option."""
        if isinstance(self.samples, Arms):
            return self.samples.costs_s(kind)
        return [sample.engine_s for sample in self.samples[kind]]

    @property
    def faster(self) -> Kind:
        return min(KINDS, key=self.mean_s.__getitem__)


def _mean(rows: Iterable[Features]) -> Features:
    return Features(*map(fmean, zip(*rows, strict=True)))


@dataclass(frozen=True, slots=True)
class Dataset:
    """States and transfers of traces of one machine, one model and one link."""

    states: tuple[State, ...]
    transfers: Sequence[TransferRecord]
    natural: Sequence[Preemption]
    """Situations of all preemptions that were caused by lack of memory, whether or not in a state."""
    headers: Mapping[str, Header]
    digests: tuple[str, ...]
    left_out: Mapping[str, int]
    """Number of excluded preemptions and states, by reason."""
    common_step_time: StepTimeModel | None = None
    """Step-time model (what a step would have taken undisturbed) of all cores together; None with too few undisturbed
    steps."""
    step_times: Mapping[str, StepTimeModel] = field(default_factory=dict)
    """Step-time model by core; absent for a core with too few undisturbed steps."""
    floor: DataQuality = field(default_factory=lambda: DataQuality((), (), {}))
    """Quality of the costs."""
    pinned_by_core: Mapping[str, bool] = field(default_factory=dict)
    """Whether a core's host pool was page-locked; absent for a core without transfers."""

    @property
    def pinned(self) -> bool | None:
        """Whether the host pools were page-locked; None if it is unknown, or both kinds were measured."""
        kinds = set(self.pinned_by_core.values())
        return kinds.pop() if len(kinds) == 1 else None

    def of_host_memory(self, pinned: bool | None) -> Dataset:
        """The part that was measured over this kind of host memory, if both kinds were; else, and for None, itself."""
        if pinned is None or len(set(self.pinned_by_core.values())) < 2:
            return self
        others = {core for core, value in self.pinned_by_core.items() if value is not pinned}
        states = tuple(state for state in self.states if not others & state.cores)
        return replace(
            self,
            states=states,
            headers={core: header for core, header in self.headers.items() if core not in others},
            left_out={
                **self.left_out,
                f"states measured over {memory_name(not pinned)} host memory": len(self.states) - len(states),
            },
            pinned_by_core={core: value for core, value in self.pinned_by_core.items() if core not in others},
        )

    @property
    def budget_tokens(self) -> float:
        """Maximum tokens of a step; infinite if the headers state none, or different ones."""
        budgets = {header.token_budget for header in self.headers.values()}
        (budget,) = budgets if len(budgets) == 1 else (None,)
        return inf if budget is None else float(budget)

    def transfers_of(self, states: Iterable[State]) -> TransferTable:
        """The transfers that belong to windows of these states."""
        return TransferTable.of(self.transfers).of_preemptions(name for state in states for name in state.preemptions)

    @property
    def prices(self) -> BatchPrices:
        """What a recomputed token costs beside the batches of the states, over a decoded one."""
        first = (state.samples[kind][0].situation for state in self.states for kind in KINDS)
        return batch_prices(self.common_step_time, batches_of(first))

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


def read_dataset(folders: Sequence[Path | str], mixed_hardware: bool | None = None) -> Dataset:
    """Read traces; missing costs are attributed from their steps.

    ``mixed_hardware``: whether machines may differ; None if the caller offers no such flag.

    Raises TraceError, naming table and row, for impossible values and duplicate rows; naming both cores for traces of
    different machines, models or links; naming the option for traces in which one was never measured.
    """
    if not folders:
        raise TraceError("no trace was given")
    read: dict[str, Trace] = {}
    for folder in map(str, folders):
        if folder in read:
            raise TraceError(f"{folder}: given twice")
        read[folder] = traces.read(folder)
    return dataset_of(read, mixed_hardware)


def dataset_of(traces_by_name: Mapping[str, Trace], mixed_hardware: bool | None = None) -> Dataset:
    """Like :func:`read_dataset`, for traces in memory by the names used in error messages."""
    for folder, trace in traces_by_name.items():
        refuse_doubled(folder, trace)
    step_times = {folder: _step_times(trace) for folder, trace in traces_by_name.items()}
    attributed = {folder: _attributed(trace, step_times[folder]) for folder, trace in traces_by_name.items()}
    models = {core: model for core_models in step_times.values() for core, model in core_models.items()}
    headers: dict[str, Header] = {}
    for folder, trace in attributed.items():
        for core, header in trace.headers.items():
            if core in headers:
                raise TraceError(f"{folder}: core {core} is in another of the traces too; is one given twice?")
            headers[core] = header
    refuse_mixture(headers, mixed_hardware)
    left_out: Counter[str] = Counter()
    states = [state for folder, trace in attributed.items() for state in _states(folder, trace, left_out)]
    return Dataset(
        states=tuple(states),
        transfers=all_transfers(attributed),
        natural=_natural(attributed.values()),
        headers=headers,
        digests=tuple(trace.digest() for trace in attributed.values()),
        left_out=dict(left_out),
        common_step_time=None if _mixed(headers) else common_step_time(list(attributed.values())),
        step_times=models,
        floor=floor_of(headers, models),
        pinned_by_core={
            core: value for folder, trace in attributed.items() for core, value in pinned_by_core(folder, trace).items()
        },
    )


def one_option_always_wins(states: Iterable[State]) -> Kind | None:
    """The option with the lower mean cost in every state, if there is one."""
    winners: set[Kind] = set()
    for state in states:
        winners.add(state.faster)
        if len(winners) > 1:
            return None
    return next(iter(winners), None)


def _natural(traces_read: Iterable[Trace]) -> Situations:
    decisions = [trace.table("decisions").select(list(SITUATION_FIELDS)) for trace in traces_read]
    return Situations(pa.concat_tables([table.filter(pc.equal(table["cause"], "memory")) for table in decisions]))


def _attributed(trace: Trace, step_times: Mapping[str, StepTimeModel]) -> Trace:
    return attribute(trace, step_times) if _unattributed(trace) else trace


def _unattributed(trace: Trace) -> bool:
    return bool(trace.table("outcomes")["engine_s"].null_count and trace.table("steps").num_rows)


def _step_times(trace: Trace) -> dict[str, StepTimeModel]:
    try:
        return step_time_models(trace)
    except TraceError:
        # Stored costs do not need the steps; missing ones do.
        if _unattributed(trace):
            raise
        return {}


def _mixed(headers: Mapping[str, Header]) -> bool:
    first = next(iter(headers.values()))
    return any(not same_machine(first.hardware, header.hardware) for header in headers.values())


def refuse_mixture(headers: Mapping[str, Header], mixed_hardware: bool | None) -> None:
    """Raises TraceError, naming both cores, for different machines, models or links.

    ``mixed_hardware``: see :func:`read_dataset`.
    """
    first_core, first = next(iter(headers.items()))
    for core, header in headers.items():
        compared = {
            "machines": (fingerprint(first.hardware), fingerprint(header.hardware)),
            "models": (dict(first.geometry), dict(header.geometry)),
            "links": (dict(first.link), dict(header.link)),
            "KV bytes per token": (first.block_bytes / first.block_size, header.block_bytes / header.block_size),
        }
        different = {quantity: values for quantity, values in compared.items() if values[0] != values[1]}
        if mixed_hardware or same_machine(first.hardware, header.hardware):
            different.pop("machines", None)
        for quantity, (first_value, value) in different.items():
            raise TraceError(
                f"cores {first_core} and {core} were measured on different {quantity}: {first_value} and {value} "
                "(header.json); use the traces of one at a time"
                + (MIXING if quantity == "machines" and mixed_hardware is not None else "")
            )


def _states(folder: str, trace: Trace, left_out: Counter[str]) -> list[State]:
    windows, bounds = valid_windows(folder, trace, left_out)
    states = []
    for name, rows in bounds:
        arms = Arms(windows, rows)
        states.append(State(name, frozenset(f"{core}/{name}" for core in arms.cores()), arms))
    return states
