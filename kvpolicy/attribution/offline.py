"""Cost of preemptions from a trace's step table: the definition of overhead.

The step-time model d0 (what a step would have taken undisturbed) is fitted on the trace's *undisturbed* steps, which
no preemption touched. A preemption's ``engine_s`` is, over the steps it is involved in,

    sum of (duration - d0(the step's composition without the victims' repeated tokens))

where d0 is scaled by the speed of the machine around the step (:meth:`StepTimeModel.pace`).

A preemption is involved in the step in which it lost its blocks and its KV was saved, in the steps its copies
overlapped in time, in the steps that recompute its lost tokens, and in the two working steps after each of these,
which find the caches cold. Control runs without a preemption showed more than a tenth of a recompute's cost there.

A step that holds nothing but repeated tokens would not have been executed, so its d0 is 0. So is the d0 of a step that
computes nothing because all requests wait for a load.

If several preemptions share a step, its extra time is split in proportion to what each did in it: the seconds that its
copies overlapped the step, plus the d0 price of its repeated tokens. If that is 0 for all, they share equally.

Copies that a measuring tool makes beside a preemption share in no step; what they add to a step is part of its d0
(:mod:`kvpolicy.attribution.tool_effects`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
from kvpolicy.attribution.tool_effects import MIN_STEPS, effects, seconds_of
from kvpolicy.events import OTHER_COPIES
from kvpolicy.hardware import fingerprint
from kvpolicy.trace import Trace, TraceError, left_out_before

REPEATED_PARTS = ("tokens", "decodes", "kv_read_tokens", "chunk_context")
"""Names of the parts in ``steps.repeated``, in the order of :data:`PARTS`."""

OWN_FIT_STEPS = 80
"""Undisturbed steps for a fit of a core's own. With fewer, cores of the same machine and model are fitted together."""


def step_time_models(trace: Trace) -> dict[str, StepTimeModel]:
    """Step-time model of each core that has steps: its own fit, or a common one if it has too few undisturbed steps."""
    return _models(trace, _cores(trace))


def price_models(trace: Trace) -> dict[str, StepTimeModel]:
    """As :func:`step_time_models`, fitted to all steps without copies: what a token costs does not depend on whether it
    is computed for the first time, and where memory is short, most steps with prompts recompute something."""
    cores = {name: replace(core, undisturbed=core.without_copies) for name, core in _cores(trace).items()}
    return _models(trace, cores)


def common_step_time(traces: Sequence[Trace]) -> StepTimeModel | None:
    """One step-time model for a server like those of ``traces``: fitted to all their cores, which must be alike.

    None if the traces hold too few undisturbed steps.
    """
    cores = [core for trace in traces for core in _cores(trace).values()]
    if sum(len(core.undisturbed) for core in cores) < OWN_FIT_STEPS:
        return None
    return _fit(cores, f"core {cores[0].name}" if len(cores) == 1 else f"{len(cores)} cores")


def attribute(trace: Trace, models: Mapping[str, StepTimeModel] | None = None) -> Trace:
    """Fill empty ``engine_s`` and ``others_delay_s`` of a trace's outcomes from its steps and transfers.

    They stay empty for an outcome whose steps or transfers are not all in the trace (dropped, or lost with a killed
    server), because partial costs are discarded; see :mod:`kvpolicy.attribution.completeness`.

    ``models``: result of :func:`step_time_models` for this trace; fitted here if None. Raises TraceError, naming table
    and row, for inconsistent steps.
    """
    outcomes = trace.table("outcomes")
    if not outcomes.num_rows:
        return trace
    ids = outcomes["preemption_id"].combine_chunks()
    engine_s, delay_s, recomputed, has_load = (np.zeros(len(ids)) for _ in range(4))
    complete = np.zeros(len(ids), dtype=np.bool_)
    cores = _cores(trace)
    for name, model in (_models(trace, cores) if models is None else models).items():
        core = cores[name]
        shares = _shares(core, model)
        index = _index_in(shares.preemption_id, ids)
        known = index >= 0
        np.add.at(engine_s, index[known], shares.extra_s[known])
        np.add.at(delay_s, index[known], (shares.extra_s * shares.others)[known])
        np.add.at(recomputed, index[known], shares.tokens[known])
        complete[_index_in(core.complete, ids)] = True
        load_index = _index_in(core.loaded, ids)
        has_load[load_index[load_index >= 0]] = 1
    complete &= recomputed >= _ints(outcomes, "recomputed_tokens")
    complete &= (_ints(outcomes, "loaded_tokens") == 0) | (has_load > 0)
    outcomes = _fill_empty(_fill_empty(outcomes, "engine_s", engine_s, ~complete), "others_delay_s", delay_s, ~complete)
    return replace(trace, tables=dict(trace.tables) | {"outcomes": outcomes})


def _fill_empty(table: pa.Table, column: str, values: Floats, empty: Flags) -> pa.Table:
    """Fill a column's empty values. Stored values stay: they may have been attributed from a more complete trace."""
    index = table.schema.get_field_index(column)
    computed = pa.chunked_array([pa.array(values, pa.float64(), mask=empty)])
    return table.set_column(index, table.schema.field(index), pc.coalesce(table[column], computed))


@dataclass(frozen=True, slots=True)
class _Involved:
    """One row per reason that involves a preemption in a step."""

    row: Ints
    preemption_id: pa.Array
    copy_s: Floats
    """Seconds that one of its copies overlapped the step."""
    repeated: Floats
    """Parts of its repeated tokens in the step, shape (rows, 4)."""


@dataclass(frozen=True, slots=True)
class _Core:
    """One engine core: its steps in order of their start, and the preemptions involved in them."""

    name: str
    steps: pa.Table
    parts: Floats
    duration_s: Floats
    involved: _Involved
    undisturbed: Ints
    """Rows of the undisturbed steps."""
    without_copies: Ints
    """Rows of these, and of the steps that lose blocks or recompute tokens beside no copy."""
    complete: pa.Array
    """Preemptions whose steps are all recorded, and their save if they were swapped."""
    loaded: pa.Array
    """Preemptions with a recorded load."""
    tool_effects: Floats | None
    """What a tool's copies do in each step; None without such copies."""
    tool_rows: Ints
    """Rows of the steps that these touch and no preemption does."""


def _cores(trace: Trace) -> dict[str, _Core]:
    return {name: _core(trace, name) for name in pc.unique(trace.table("steps")["core"]).to_pylist()}


def _core(trace: Trace, name: str) -> _Core:
    steps, transfers, outcomes, decisions, requests = (
        table.filter(pc.equal(table["core"], name))
        for table in map(trace.table, ("steps", "transfers", "outcomes", "decisions", "requests"))
    )
    steps = steps.sort_by("start_s")
    of_tool = pc.is_in(transfers["preemption_id"], pa.array(OTHER_COPIES))
    tool_effects = _tool_effects(steps, transfers.filter(of_tool))
    transfers = transfers.filter(pc.invert(of_tool))
    duration_s = _reals(steps, "duration_s")
    for row in np.flatnonzero(duration_s <= 0)[:1]:
        raise TraceError(f"steps of core {name}, row {row}: duration_s is {duration_s[row]:g}, should be above 0")
    first = _rows_of_steps(steps, outcomes["first_step"])
    outcomes, first = outcomes.filter(pa.array(first >= 0)), first[first >= 0]
    ids = outcomes["preemption_id"].combine_chunks()
    copying = copying_steps(steps, transfers)
    involved = _concatenated(_block_losses(first, ids), _recomputing_steps(steps), copying)
    complete = unbroken(
        _timeline(steps, requests), _span(steps, outcomes, first, involved, _with_request_record(decisions, requests))
    )
    complete &= ~_save_missing(outcomes, decisions, transfers)
    complete &= _index_in(ids, _beside_left_out(steps, transfers)) < 0
    loaded = _with_transfer(transfers, "load")
    tool_rows = np.zeros(0, np.int64)
    beside_tool = np.zeros(0, np.int64)
    if tool_effects is not None:
        beside_tool = np.flatnonzero(tool_effects.any(axis=1))
        tool_rows = np.intersect1d(beside_tool, untouched_rows(steps, involved.row, ("preemptions",)))
        if len(tool_rows) < MIN_STEPS:
            beside_ids = involved.preemption_id.filter(pa.array(np.isin(involved.row, beside_tool)))
            complete &= _index_in(ids, beside_ids) < 0
    undisturbed = untouched_rows(
        steps, np.concatenate([involved.row, beside_tool]), ("recomputed_tokens", "preemptions", "saves", "loads")
    )
    without_copies = untouched_rows(steps, np.concatenate([copying.row, beside_tool]), ("saves", "loads"))
    return _Core(
        name, steps, _parts(steps), duration_s, involved, undisturbed, without_copies, ids.filter(pa.array(complete)),
        loaded, tool_effects, tool_rows,
    )  # fmt: skip


def _tool_effects(steps: pa.Table, copies: pa.Table) -> Floats | None:
    if not copies.num_rows:
        return None
    start_s = _reals(steps, "start_s")
    columns = {name: _reals(copies, name) for name in ("bytes", "submit_s", "start_s", "end_s")}
    is_save = np.asarray(pc.equal(copies["direction"], "save"), dtype=np.bool_)
    return effects(start_s, start_s + _reals(steps, "duration_s"), _ints(steps, "scheduled_tokens"), columns, is_save)


def _rows_of_steps(steps: pa.Table, numbers: pa.ChunkedArray) -> Ints:
    return _index_in(numbers.combine_chunks(), steps["step"].combine_chunks())


def _timeline(steps: pa.Table, requests: pa.Table) -> Timeline:
    start_s = _reals(steps, "start_s")
    arrival_s, first_s, last_s = (_reals(requests, name) for name in ("arrival_s", "first_token_s", "last_token_s"))
    left_out = np.asarray(left_out_before(steps), dtype=np.int64)
    end_s = start_s + _reals(steps, "duration_s")
    return Timeline(_ints(steps, "step"), start_s, end_s, arrival_s, first_s, last_s, left_out)


def _span(steps: pa.Table, outcomes: pa.Table, first: Ints, involved: _Involved, recorded: pa.Array) -> Span:
    """Rows of the outcomes' steps. ``first``: rows of their first steps. ``recorded``: preemptions whose request has a
    record."""
    ids = outcomes["preemption_id"].combine_chunks()
    latest = first.copy()
    index = _index_in(involved.preemption_id, ids)
    np.maximum.at(latest, index[index >= 0], involved.row[index >= 0])
    numbers = _ints(outcomes, "first_step"), _ints(outcomes, "last_step")
    return Span(first, _rows_of_steps(steps, outcomes["last_step"]), *numbers, latest, _index_in(ids, recorded) >= 0)


def _with_request_record(decisions: pa.Table, requests: pa.Table) -> pa.Array:
    """Ids of the preemptions whose request has a record."""
    has_record = pc.is_in(decisions["request"], value_set=requests["request"].combine_chunks())
    return decisions.filter(has_record)["preemption_id"].combine_chunks()


def _save_missing(outcomes: pa.Table, decisions: pa.Table, transfers: pa.Table) -> Flags:
    """Whether each outcome was swapped, lost a block that has to be saved at once, and has no recorded save.

    Hashed blocks may all survive on the device, or be saved with another preemption's. Those of several block tables,
    of which ``hashed_tokens`` says something, are all saved at once.
    """
    ids = outcomes["preemption_id"].combine_chunks()
    swaps = decisions.filter(pc.equal(decisions["executed"], "swap"))["preemption_id"].combine_chunks()
    stays = pc.and_(
        pc.equal(decisions["hashed_blocks"], decisions["held_blocks"]), pc.is_null(decisions["hashed_tokens"])
    )
    survivors = decisions.filter(stays)
    swapped = (_index_in(ids, swaps) >= 0) | (_ints(outcomes, "loaded_tokens") > 0)
    unhashed = _index_in(ids, survivors["preemption_id"].combine_chunks()) < 0
    unsaved = _index_in(ids, _with_transfer(transfers, "save")) < 0
    return np.asarray(swapped & unhashed & unsaved, dtype=np.bool_)


def _with_transfer(transfers: pa.Table, direction: str) -> pa.Array:
    """Ids of the preemptions with a recorded transfer in this direction."""
    return transfers.filter(pc.equal(transfers["direction"], direction))["preemption_id"].combine_chunks()


def _block_losses(row: Ints, ids: pa.Array) -> _Involved:
    return _Involved(row, ids, np.zeros(len(row)), np.zeros((len(row), len(PARTS))))


def _recomputing_steps(steps: pa.Table) -> _Involved:
    row, ids, parts = repeated_parts(steps)
    return _Involved(row, ids, np.zeros(len(row)), parts)


def repeated_parts(steps: pa.Table) -> tuple[Ints, pa.Array, Floats]:
    """Row, preemption and :data:`REPEATED_PARTS` of everything that steps recompute."""
    lists = steps["repeated"].combine_chunks()
    flat = lists.flatten()
    row = np.asarray(pc.list_parent_indices(lists), dtype=np.int64)
    parts = np.column_stack([np.asarray(flat.field(name), dtype=np.float64) for name in REPEATED_PARTS])
    return row, flat.field("preemption_id"), parts


def copying_steps(steps: pa.Table, transfers: pa.Table) -> _Involved:
    """Steps that copies overlapped in time."""
    start_s = _reals(steps, "start_s")
    end_s = np.maximum.accumulate(start_s + _reals(steps, "duration_s"))
    copy_start_s, copy_end_s = _reals(transfers, "start_s"), _reals(transfers, "end_s")
    first = np.searchsorted(end_s, copy_start_s, side="right")
    last = np.searchsorted(start_s, copy_end_s, side="right") - 1
    count = np.maximum(0, last - first + 1)
    copy = np.repeat(np.arange(len(count)), count)
    row = np.arange(len(copy)) - np.repeat(np.cumsum(count) - count, count) + first[copy]
    seconds = np.maximum(0.0, np.minimum(copy_end_s[copy], end_s[row]) - np.maximum(copy_start_s[copy], start_s[row]))
    ids = transfers["preemption_id"].combine_chunks().take(pa.array(copy))
    return _Involved(row, ids, seconds, np.zeros((len(row), len(PARTS))))


def _beside_left_out(steps: pa.Table, transfers: pa.Table) -> pa.Array:
    """Ids of the preemptions with a copy that overlapped steps which were not recorded on purpose."""
    gap = np.flatnonzero(np.asarray(left_out_before(steps)))
    gap = gap[gap > 0]
    start_s = _reals(steps, "start_s")
    begin_s, end_s = (start_s + _reals(steps, "duration_s"))[gap - 1], start_s[gap]
    first = np.searchsorted(end_s, _reals(transfers, "start_s"), side="right")
    begins = np.append(begin_s, np.inf)[first]
    return transfers.filter(pa.array(begins < _reals(transfers, "end_s")))["preemption_id"].combine_chunks()


def _concatenated(*tables: _Involved) -> _Involved:
    return _Involved(
        np.concatenate([table.row for table in tables]),
        pa.concat_arrays([table.preemption_id for table in tables]),
        np.concatenate([table.copy_s for table in tables]),
        np.concatenate([table.repeated for table in tables]),
    )


def untouched_rows(steps: pa.Table, involved: Ints, counts: Sequence[str]) -> Ints:
    """Rows of the steps that computed something, without those ``involved``, those in which one of ``counts`` is above
    0, and their aftermath."""
    touched = np.zeros(steps.num_rows + AFTERMATH_STEPS, dtype=np.bool_)
    touched[involved] = True
    for column in counts:
        touched[: steps.num_rows] |= _ints(steps, column) > 0
    for _ in range(AFTERMATH_STEPS):
        touched[1:] |= touched[:-1].copy()
    # Of a step after some that were left out it is not known how cold these left the caches.
    for row in np.flatnonzero(np.asarray(left_out_before(steps)) > 0):
        touched[row : row + AFTERMATH_STEPS] = True
    return np.flatnonzero(~touched[: steps.num_rows] & (_ints(steps, "scheduled_tokens") > 0))


def _models(trace: Trace, cores: Mapping[str, _Core]) -> dict[str, StepTimeModel]:
    common_models: dict[str, StepTimeModel] = {}
    models = {}
    for name, core in cores.items():
        if len(core.undisturbed) >= OWN_FIT_STEPS or len(cores) == 1:
            models[name] = _fit([core], f"core {name}")
            continue
        similar = _similar_cores(trace, name, list(cores))
        if similar[0] not in common_models:
            common_models[similar[0]] = _fit([cores[other] for other in similar], f"{len(similar)} cores")
        models[name] = common_models[similar[0]]
    return models


def _fit(cores: Sequence[_Core], fitted_on: str) -> StepTimeModel:
    design = np.concatenate([with_aftermath(core.parts)[core.undisturbed] for core in cores])
    return fit_step_time(design, np.concatenate([core.duration_s[core.undisturbed] for core in cores]), fitted_on)


def _similar_cores(trace: Trace, name: str, names: Sequence[str]) -> list[str]:
    """Cores of the same machine and model as ``name``, itself included: their steps take equally long."""

    def signature(core: str) -> tuple[str, str]:
        header = trace.headers[core]
        return fingerprint(header.hardware), str(sorted(header.geometry.items()))

    return [other for other in names if signature(other) == signature(name)]


@dataclass(frozen=True, slots=True)
class _Shares:
    """One row per (preemption, step it is involved in)."""

    preemption_id: pa.Array
    extra_s: Floats
    others: Floats
    """Requests in the step other than the victim."""
    tokens: Floats
    """Repeated tokens of the preemption in the step."""


def _shares(core: _Core, model: StepTimeModel) -> _Shares:
    direct = core.involved
    names = pc.unique(direct.preemption_id)
    direct_of = _index_in(direct.preemption_id, names)
    row, preemption = _with_aftermath_steps(core, direct.row, direct_of)
    key = row * len(names) + preemption
    direct_at = np.searchsorted(key, direct.row * len(names) + direct_of)
    own_parts, weight = np.zeros((len(key), len(PARTS))), np.zeros(len(key))
    np.add.at(own_parts, direct_at, direct.repeated)
    np.add.at(weight, direct_at, direct.copy_s)
    weight += np.maximum(0.0, model.price(own_parts))
    last_row = np.zeros(len(names), dtype=np.int64)
    np.maximum.at(last_row, direct_of, direct.row)
    # The victim is one of the scheduled requests while it computes lost tokens, and after its last own step.
    others = _ints(core.steps, "scheduled_requests")[row] - ((own_parts[:, 0] > 0) | (row > last_row[preemption]))
    extra_s = _extra_s(core, model, row, own_parts) * share_of_step(row, weight, len(core.parts))
    return _Shares(names.take(pa.array(preemption)), extra_s, np.maximum(0.0, others), own_parts[:, 0])


def _with_aftermath_steps(core: _Core, row: Ints, preemption: Ints) -> tuple[Ints, Ints]:
    """Unique (row, preemption) pairs, with the working steps right after each, in ascending order."""
    later = [row + lag for lag in range(AFTERMATH_STEPS + 1)]
    pairs = np.column_stack([np.concatenate(later), np.tile(preemption, len(later))])
    is_direct = np.arange(len(pairs)) < len(row)
    inside = pairs[:, 0] < len(core.parts)
    working = core.parts[np.minimum(pairs[:, 0], len(core.parts) - 1), 0] > 0
    pairs = np.unique(pairs[inside & (is_direct | working)], axis=0)
    return pairs[:, 0], pairs[:, 1]


def share_of_step(row: Ints, weight: Floats, rows: int) -> Floats:
    """Each entry's share of its step: in proportion to weight, or equal if all weights are 0."""
    total = np.bincount(row, weight, rows)[row]
    sharers = np.bincount(row, minlength=rows)[row]
    return np.where(total > 0, weight / np.where(total > 0, total, 1.0), 1.0 / sharers)


def _extra_s(core: _Core, model: StepTimeModel, row: Ints, own_parts: Floats) -> Floats:
    """Seconds of the steps ``row`` beyond their d0 without all victims' repeated tokens."""
    remaining = core.parts.copy()
    np.subtract.at(remaining, row, own_parts)
    for bad_row in np.flatnonzero(remaining[:, 0] < 0)[:1]:
        number = core.steps["step"][int(bad_row)].as_py()
        raise TraceError(
            f"steps of core {core.name}, row {bad_row} (step {number}): repeated holds more tokens than "
            "scheduled_tokens"
        )
    extra_s = _beyond_model(core, model, remaining, row)
    if core.tool_effects is not None and len(core.tool_rows) >= MIN_STEPS:
        beyond_s = _beyond_model(core, model, core.parts, core.tool_rows)
        added_s = seconds_of(core.tool_effects, beyond_s, core.tool_rows)
        # An idle step is over sooner than what is learned from busy ones.
        extra_s -= np.minimum(added_s, core.duration_s)[row]
    return extra_s


def _beyond_model(core: _Core, model: StepTimeModel, parts: Floats, row: Ints) -> Floats:
    """Seconds of the steps ``row`` beyond their d0 for ``parts``."""
    pace = model.pace(core.undisturbed, core.parts, core.duration_s, row) if len(core.undisturbed) else 1.0
    return np.asarray(core.duration_s[row] - pace * model.predict(parts)[row], dtype=np.float64)


def _parts(steps: pa.Table) -> Floats:
    return np.column_stack([_ints(steps, name) for name in PARTS]).astype(np.float64)


def _ints(table: pa.Table, column: str) -> Ints:
    return np.asarray(table[column].to_numpy(), dtype=np.int64)


def _reals(table: pa.Table, column: str) -> Floats:
    return np.asarray(table[column].to_numpy(), dtype=np.float64)


def _index_in(values: pa.Array, among: pa.Array) -> Ints:
    """Position of each value in ``among``; -1 if it is absent."""
    return np.asarray(pc.fill_null(pc.index_in(values, among), -1), dtype=np.int64)
