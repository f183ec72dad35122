"""What preemptions cost the engine: the definition of overhead, out of a trace's step table.

d0, the step-time model, is fitted on the trace's *undisturbed* steps and says how long a step of a given composition
takes when nothing was preempted. A preemption's ``engine_s`` is then, over the steps it is involved in,

    sum of (duration - d0(the step's composition without the victims' repeated tokens))

where d0 is scaled to how fast the machine was around the step (:meth:`StepTimeModel.pace`).
Involved are the step in which it lost its blocks and its KV was saved, the steps its copies overlapped in time, the
steps that compute its lost tokens again, and the two working steps after each of these, which find the caches cold
(twins showed more than a tenth of a recompute's cost there). A step without anything left in it once the repeated
tokens are gone would not have been executed: its d0 is 0, and so is that of a step that computes nothing because
everybody waits for a load.

Where several preemptions share a step, its extra time is split by what each of them did in it: seconds its copies
overlapped the step, plus d0's price of its repeated tokens; in equal parts where that is 0 for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvpolicy.arrays import Flags, Floats, Ints
from kvpolicy.attribution.completeness import Span, Timeline, unbroken
from kvpolicy.attribution.step_time_fit import (
    AFTERMATH_STEPS,
    PARTS,
    StepTimeModel,
    fit_step_time,
    with_aftermath,
)
from kvpolicy.hardware import fingerprint
from kvpolicy.trace import Trace, TraceError

REPEATED_PARTS = ("tokens", "decodes", "kv_read_tokens", "chunk_context")
"""The parts of a step by their names in ``steps.repeated``, in the order of :data:`PARTS`."""

OWN_FIT_STEPS = 80
"""A core with fewer undisturbed steps is fitted together with the other cores of its machine and model."""


def step_time_models(trace: Trace) -> dict[str, StepTimeModel]:
    """d0 of each core that has steps: its own fit, or a common one where it has too few undisturbed steps."""
    return _models(trace, _cores(trace))


def common_step_time(traces: Sequence[Trace]) -> StepTimeModel | None:
    """One d0 for a server of the kind these traces come from: fitted to all their cores, which are alike.

    None where they hold too few undisturbed steps to tell.
    """
    cores = [core for trace in traces for core in _cores(trace).values()]
    if sum(len(core.calm) for core in cores) < OWN_FIT_STEPS:
        return None
    return _fit(cores, f"core {cores[0].name}" if len(cores) == 1 else f"{len(cores)} cores")


def attribute(trace: Trace, models: Mapping[str, StepTimeModel] | None = None) -> Trace:
    """The trace with ``engine_s`` and ``others_delay_s`` of its outcomes, where empty, from its steps and transfers.

    An outcome whose steps or transfers are not all in the trace (dropped, or lost with a killed server) keeps them
    empty: a part of a cost is no cost; see :mod:`kvpolicy.attribution.completeness`. ``models``: what
    :func:`step_time_models` returns for this trace, fitted here without it. Raises TraceError, naming table and row,
    for steps that contradict themselves.
    """
    outcomes = trace.table("outcomes")
    if not outcomes.num_rows:
        return trace
    ids = outcomes["preemption_id"].combine_chunks()
    engine_s, delay_s, tokens, loads = (np.zeros(len(ids)) for _ in range(4))
    whole = np.zeros(len(ids), dtype=np.bool_)
    cores = _cores(trace)
    for name, model in (_models(trace, cores) if models is None else models).items():
        core = cores[name]
        shares = _shares(core, model)
        at = _index_in(shares.preemption_id, ids)
        known = at >= 0
        np.add.at(engine_s, at[known], shares.extra_s[known])
        np.add.at(delay_s, at[known], (shares.extra_s * shares.others)[known])
        np.add.at(tokens, at[known], shares.tokens[known])
        whole[_index_in(core.whole, ids)] = True
        loaded = _index_in(core.loaded, ids)
        loads[loaded[loaded >= 0]] = 1
    whole &= tokens >= _ints(outcomes, "recomputed_tokens")
    whole &= (_ints(outcomes, "loaded_tokens") == 0) | (loads > 0)
    outcomes = _filled(_filled(outcomes, "engine_s", engine_s, ~whole), "others_delay_s", delay_s, ~whole)
    return Trace(trace.headers, dict(trace.tables) | {"outcomes": outcomes})


def _filled(table: pa.Table, column: str, values: Floats, empty: Flags) -> pa.Table:
    """What is stored stays: it may have been attributed with more of the trace at hand."""
    at = table.schema.get_field_index(column)
    found = pa.chunked_array([pa.array(values, pa.float64(), mask=empty)])
    return table.set_column(at, table.schema.field(at), pc.coalesce(table[column], found))


@dataclass(frozen=True, slots=True)
class _Involved:
    """One row per reason for which a preemption is involved in a step."""

    row: Ints
    preemption_id: pa.Array
    copy_s: Floats
    """Seconds that one of its copies overlapped the step."""
    repeated: Floats
    """Its repeated tokens in the step, shape (rows, 4)."""


@dataclass(frozen=True, slots=True)
class _Core:
    """One engine core: its steps in the order of their start, and which preemptions had to do with them."""

    name: str
    steps: pa.Table
    parts: Floats
    duration_s: Floats
    involved: _Involved
    calm: Ints
    """Rows of the undisturbed steps."""
    whole: pa.Array
    """Preemptions whose steps are all here, and their save if they were swapped."""
    loaded: pa.Array
    """Preemptions that a load is recorded of."""


def _cores(trace: Trace) -> dict[str, _Core]:
    return {name: _core(trace, name) for name in pc.unique(trace.table("steps")["core"]).to_pylist()}


def _core(trace: Trace, name: str) -> _Core:
    steps, transfers, outcomes, decisions, requests = (
        table.filter(pc.equal(table["core"], name))
        for table in map(trace.table, ("steps", "transfers", "outcomes", "decisions", "requests"))
    )
    steps = steps.sort_by("start_s")
    duration_s = _reals(steps, "duration_s")
    for row in np.flatnonzero(duration_s <= 0)[:1]:
        raise TraceError(f"steps of core {name}, row {row}: duration_s is {duration_s[row]:g}, should be above 0")
    first = _row_of(steps, outcomes["first_step"])
    outcomes, first = outcomes.filter(pa.array(first >= 0)), first[first >= 0]
    begun = outcomes["preemption_id"].combine_chunks()
    involved = _joined(_begun(first, begun), _repeating(steps), _copying(steps, transfers))
    whole = unbroken(_timeline(steps, requests), _span(steps, outcomes, first, involved, _seen(decisions, requests)))
    whole &= ~_lacks_save(outcomes, decisions, transfers)
    loads = _moved(transfers, "load")
    calm = _calm(steps, involved.row)
    return _Core(name, steps, _parts(steps), duration_s, involved, calm, begun.filter(pa.array(whole)), loads)


def _row_of(steps: pa.Table, numbers: pa.ChunkedArray) -> Ints:
    return _index_in(numbers.combine_chunks(), steps["step"].combine_chunks())


def _timeline(steps: pa.Table, requests: pa.Table) -> Timeline:
    start_s = _reals(steps, "start_s")
    served = [_reals(requests, name) for name in ("arrival_s", "first_token_s", "last_token_s")]
    return Timeline(_ints(steps, "step"), start_s, start_s + _reals(steps, "duration_s"), *served)


def _span(steps: pa.Table, outcomes: pa.Table, first: Ints, involved: _Involved, seen: pa.Array) -> Span:
    """Where the outcomes' steps are; ``first``: rows of their first ones. ``seen``: preemptions of known requests."""
    ids = outcomes["preemption_id"].combine_chunks()
    latest = first.copy()
    who = _index_in(involved.preemption_id, ids)
    np.maximum.at(latest, who[who >= 0], involved.row[who >= 0])
    numbers = _ints(outcomes, "first_step"), _ints(outcomes, "last_step")
    return Span(first, _row_of(steps, outcomes["last_step"]), *numbers, latest, _index_in(ids, seen) >= 0)


def _seen(decisions: pa.Table, requests: pa.Table) -> pa.Array:
    """The preemptions whose request has a record."""
    known = pc.is_in(decisions["request"], value_set=requests["request"].combine_chunks())
    return decisions.filter(known)["preemption_id"].combine_chunks()


def _lacks_save(outcomes: pa.Table, decisions: pa.Table, transfers: pa.Table) -> Flags:
    """Of each outcome, whether it was swapped and no save is recorded."""
    ids = outcomes["preemption_id"].combine_chunks()
    swaps = decisions.filter(pc.equal(decisions["executed"], "swap"))["preemption_id"].combine_chunks()
    swapped = (_index_in(ids, swaps) >= 0) | (_ints(outcomes, "loaded_tokens") > 0)
    return np.asarray(swapped & (_index_in(ids, _moved(transfers, "save")) < 0), dtype=np.bool_)


def _moved(transfers: pa.Table, direction: str) -> pa.Array:
    """The preemptions that a transfer of this direction is recorded of."""
    return transfers.filter(pc.equal(transfers["direction"], direction))["preemption_id"].combine_chunks()


def _begun(row: Ints, ids: pa.Array) -> _Involved:
    return _Involved(row, ids, np.zeros(len(row)), np.zeros((len(row), len(PARTS))))


def _repeating(steps: pa.Table) -> _Involved:
    lists = steps["repeated"].combine_chunks()
    flat = lists.flatten()
    row = np.asarray(pc.list_parent_indices(lists), dtype=np.int64)
    parts = np.column_stack([np.asarray(flat.field(name), dtype=np.float64) for name in REPEATED_PARTS])
    return _Involved(row, flat.field("preemption_id"), np.zeros(len(row)), parts)


def _copying(steps: pa.Table, transfers: pa.Table) -> _Involved:
    """The steps that copies overlapped in time."""
    start_s = _reals(steps, "start_s")
    end_s = np.maximum.accumulate(start_s + _reals(steps, "duration_s"))
    from_s, to_s = _reals(transfers, "start_s"), _reals(transfers, "end_s")
    first = np.searchsorted(end_s, from_s, side="right")
    last = np.searchsorted(start_s, to_s, side="right") - 1
    count = np.maximum(0, last - first + 1)
    of = np.repeat(np.arange(len(count)), count)
    row = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count) + first[of]
    seconds = np.maximum(0.0, np.minimum(to_s[of], end_s[row]) - np.maximum(from_s[of], start_s[row]))
    ids = transfers["preemption_id"].combine_chunks().take(pa.array(of))
    return _Involved(row, ids, seconds, np.zeros((len(row), len(PARTS))))


def _joined(*some: _Involved) -> _Involved:
    return _Involved(
        np.concatenate([one.row for one in some]),
        pa.concat_arrays([one.preemption_id for one in some]),
        np.concatenate([one.copy_s for one in some]),
        np.concatenate([one.repeated for one in some]),
    )


def _calm(steps: pa.Table, involved: Ints) -> Ints:
    """Rows of the steps that computed something, and that nothing of a preemption or its aftermath touched."""
    touched = np.zeros(steps.num_rows + AFTERMATH_STEPS, dtype=np.bool_)
    touched[involved] = True
    for column in ("recomputed_tokens", "preemptions", "saves", "loads"):
        touched[: steps.num_rows] |= _ints(steps, column) > 0
    for _ in range(AFTERMATH_STEPS):
        touched[1:] |= touched[:-1].copy()
    return np.flatnonzero(~touched[: steps.num_rows] & (_ints(steps, "scheduled_tokens") > 0))


def _models(trace: Trace, cores: Mapping[str, _Core]) -> dict[str, StepTimeModel]:
    together: dict[str, StepTimeModel] = {}
    models = {}
    for name, core in cores.items():
        if len(core.calm) >= OWN_FIT_STEPS or len(cores) == 1:
            models[name] = _fit([core], f"core {name}")
            continue
        kin = _kin(trace, name, list(cores))
        if kin[0] not in together:
            together[kin[0]] = _fit([cores[each] for each in kin], f"{len(kin)} cores")
        models[name] = together[kin[0]]
    return models


def _fit(cores: Sequence[_Core], fitted_on: str) -> StepTimeModel:
    design = np.concatenate([with_aftermath(core.parts)[core.calm] for core in cores])
    return fit_step_time(design, np.concatenate([core.duration_s[core.calm] for core in cores]), fitted_on)


def _kin(trace: Trace, name: str, names: Sequence[str]) -> list[str]:
    """The cores whose steps can take as long as this one's: same machine, same model."""

    def kind(core: str) -> tuple[str, str]:
        header = trace.headers[core]
        return fingerprint(header.hardware), str(sorted(header.geometry.items()))

    return [other for other in names if kind(other) == kind(name)]


@dataclass(frozen=True, slots=True)
class _Shares:
    """One row per (preemption, step it is involved in)."""

    preemption_id: pa.Array
    extra_s: Floats
    others: Floats
    """Requests in the step besides the victim."""
    tokens: Floats
    """Repeated tokens of the preemption in the step."""


def _shares(core: _Core, model: StepTimeModel) -> _Shares:
    direct = core.involved
    names = pc.unique(direct.preemption_id)
    who = _index_in(direct.preemption_id, names)
    row, of = _with_aftermath_steps(core, direct.row, who)
    key = row * len(names) + of
    direct_at = np.searchsorted(key, direct.row * len(names) + who)
    own, weight = np.zeros((len(key), len(PARTS))), np.zeros(len(key))
    np.add.at(own, direct_at, direct.repeated)
    np.add.at(weight, direct_at, direct.copy_s)
    weight += np.maximum(0.0, model.price(own))
    last = np.zeros(len(names), dtype=np.int64)
    np.maximum.at(last, who, direct.row)
    # The victim takes part where it computes lost tokens, and once it is through with everything.
    others = _ints(core.steps, "scheduled_requests")[row] - ((own[:, 0] > 0) | (row > last[of]))
    extra_s = _extra(core, model, row, own) * _split(row, weight, len(core.parts))
    return _Shares(names.take(pa.array(of)), extra_s, np.maximum(0.0, others), own[:, 0])


def _with_aftermath_steps(core: _Core, row: Ints, who: Ints) -> tuple[Ints, Ints]:
    """Each (row, preemption) once, with the working steps right after it, in ascending order."""
    later = [row + lag for lag in range(AFTERMATH_STEPS + 1)]
    pairs = np.column_stack([np.concatenate(later), np.tile(who, len(later))])
    is_direct = np.arange(len(pairs)) < len(row)
    inside = pairs[:, 0] < len(core.parts)
    working = core.parts[np.minimum(pairs[:, 0], len(core.parts) - 1), 0] > 0
    pairs = np.unique(pairs[inside & (is_direct | working)], axis=0)
    return pairs[:, 0], pairs[:, 1]


def _split(row: Ints, weight: Floats, rows: int) -> Floats:
    """Each entry's share of its step: by weight, in equal parts where nobody has any."""
    total = np.bincount(row, weight, rows)[row]
    sharers = np.bincount(row, minlength=rows)[row]
    return np.where(total > 0, weight / np.where(total > 0, total, 1.0), 1.0 / sharers)


def _extra(core: _Core, model: StepTimeModel, row: Ints, own: Floats) -> Floats:
    """Seconds beyond d0 of the steps ``row``, all victims' repeated tokens taken out."""
    left = core.parts.copy()
    np.subtract.at(left, row, own)
    for bad in np.flatnonzero(left[:, 0] < 0)[:1]:
        number = core.steps["step"][int(bad)].as_py()
        raise TraceError(
            f"steps of core {core.name}, row {bad} (step {number}): repeated holds more tokens than scheduled_tokens"
        )
    pace = model.pace(core.calm, core.parts, core.duration_s, row) if len(core.calm) else 1.0
    return np.asarray(core.duration_s[row] - pace * model.predict(left)[row], dtype=np.float64)


def _parts(steps: pa.Table) -> Floats:
    return np.column_stack([_ints(steps, name) for name in PARTS]).astype(np.float64)


def _ints(table: pa.Table, column: str) -> Ints:
    return np.asarray(table[column].to_numpy(), dtype=np.int64)


def _reals(table: pa.Table, column: str) -> Floats:
    return np.asarray(table[column].to_numpy(), dtype=np.float64)


def _index_in(values: pa.Array, among: pa.Array) -> Ints:
    """Position of each value in ``among``; -1 where it is not in there."""
    return np.asarray(pc.fill_null(pc.index_in(values, among), -1), dtype=np.int64)
