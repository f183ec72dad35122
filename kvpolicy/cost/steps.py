"""What preemptions cost the engine: the definition of overhead, out of a trace's step table.

d0, the step-time model, is fitted on the trace's *undisturbed* steps and says how long a step of a given composition
takes when nothing was preempted. A preemption's ``engine_s`` is then, over the steps it is involved in,

    sum of (duration - d0(the step's composition without the victims' repeated tokens))

where d0 is scaled to how fast the machine was around the step (:meth:`StepTimeModel.pace`).
Involved are the step in which its KV was saved, the steps its copies overlapped in time, and the steps that compute
its lost tokens again. A step without anything left in it once the repeated tokens are gone would not have been
executed: its d0 is 0, and so is that of a step that computes nothing because everybody waits for a load.

Where several preemptions share a step, its extra time is split by what each of them did in it: seconds its copies
overlapped the step, plus d0's price of its repeated tokens; in equal parts where that is 0 for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kvpolicy.cost.steptime import PARTS, Floats, StepTimeModel, Whole, fit_step_time
from kvpolicy.hardware import fingerprint
from kvpolicy.trace import Trace, TraceError

REPEATED_PARTS = ("tokens", "decodes", "kv_read_tokens", "chunk_context")
"""The parts of a step by their names in ``steps.repeated``, in the order of :data:`PARTS`."""

OWN_FIT_STEPS = 80
"""A core with fewer undisturbed steps is fitted together with the other cores of its machine and model."""


def step_time_models(trace: Trace) -> dict[str, StepTimeModel]:
    """d0 of each core that has steps: its own fit, or a common one where it has too few undisturbed steps."""
    return {name: core.model for name, core in _cores(trace).items()}


def attribute(trace: Trace) -> Trace:
    """The trace with ``engine_s`` and ``others_delay_s`` of its outcomes filled from its steps and transfers.

    An outcome whose steps or transfers are not all in the trace (dropped, or lost with a killed server) keeps them
    empty: a part of a cost is no cost. Raises TraceError, naming table and row, for steps that contradict themselves.
    """
    outcomes = trace.table("outcomes")
    ids = outcomes["preemption_id"].combine_chunks()
    engine_s, delay_s = np.zeros(len(ids)), np.zeros(len(ids))
    found_tokens, loads = np.zeros(len(ids)), np.zeros(len(ids))
    incomplete = np.zeros(len(ids), bool)
    for core in _cores(trace).values():
        shares = _shares(core)
        at = _index_in(shares.preemption_id, ids)
        known = at >= 0
        np.add.at(engine_s, at[known], shares.extra_s[known])
        np.add.at(delay_s, at[known], (shares.extra_s * shares.others)[known])
        np.add.at(found_tokens, at[known], shares.tokens[known])
        copied = _index_in(core.transfers["preemption_id"].combine_chunks(), ids)
        is_load = _strings(core.transfers, "direction") == "load"
        np.add.at(loads, copied[(copied >= 0) & is_load], 1)
        lost = (copied >= 0) & ~is_load & (core.save_row < 0)
        incomplete[copied[lost]] = True
    incomplete |= found_tokens < _ints(outcomes, "recomputed_tokens")
    incomplete |= (_ints(outcomes, "loaded_tokens") > 0) & (loads == 0)
    incomplete |= ~np.isin(_strings(outcomes, "core"), list(_cores_with_steps(trace)))
    tables = dict(trace.tables)
    if len(ids):
        tables["outcomes"] = _filled(
            _filled(outcomes, "engine_s", engine_s, incomplete), "others_delay_s", delay_s, incomplete
        )
    return Trace(trace.headers, tables)


def _filled(table: pa.Table, column: str, values: Floats, empty: NDArray[np.bool_]) -> pa.Table:
    at = table.schema.get_field_index(column)
    return table.set_column(at, table.schema.field(at), pa.array(values, pa.float64(), mask=empty))


@dataclass(frozen=True, slots=True)
class _Core:
    """Steps and transfers of one engine core, steps in the order of their start."""

    name: str
    steps: pa.Table
    transfers: pa.Table
    parts: Floats
    start_s: Floats
    end_s: Floats
    first_row: Whole
    """Per transfer, the first step it overlaps in time."""
    last_row: Whole
    """Per transfer, the last one; below ``first_row`` where it overlaps none."""
    save_row: Whole
    """Per transfer, the step a save was handed over in; -1 for a load and where that step is not in the trace."""
    model: StepTimeModel


def _cores_with_steps(trace: Trace) -> list[str]:
    return [str(name) for name in pc.unique(trace.table("steps")["core"]).to_pylist()]


def _cores(trace: Trace) -> dict[str, _Core]:
    loose = {name: _loose_core(trace, name) for name in _cores_with_steps(trace)}
    calm = {name: undisturbed(*core) for name, core in loose.items()}
    together: dict[str, StepTimeModel] = {}
    found = {}
    for name, (steps, transfers) in loose.items():
        if np.count_nonzero(calm[name]) >= OWN_FIT_STEPS or len(loose) == 1:
            model = fit_step_time(_parts(steps)[calm[name]], _reals(steps, "duration_s")[calm[name]], f"core {name}")
        else:
            kin = _kin(trace, name, list(loose))
            key = kin[0]
            if key not in together:
                together[key] = _common_fit({each: loose[each][0] for each in kin}, calm)
            model = together[key]
        found[name] = _Core(name, steps, transfers, _parts(steps), *_spans(steps, transfers), model)
    return found


def _loose_core(trace: Trace, name: str) -> tuple[pa.Table, pa.Table]:
    steps, transfers = (
        table.filter(pc.equal(table["core"], name)) for table in (trace.table("steps"), trace.table("transfers"))
    )
    _refuse_bad_steps(steps, name)
    return steps.sort_by("start_s"), _with_save_steps(transfers, trace.table("outcomes"))


def _with_save_steps(transfers: pa.Table, outcomes: pa.Table) -> pa.Table:
    """A save is handed over in the step of its preemption; under asynchronous scheduling it is reported later."""
    at = _index_in(transfers["preemption_id"].combine_chunks(), outcomes["preemption_id"].combine_chunks())
    known = (at >= 0) & (_strings(transfers, "direction") == "save")
    number = _ints(transfers, "step").copy()
    number[known] = _ints(outcomes, "first_step")[at[known]]
    return transfers.set_column(transfers.schema.get_field_index("step"), "step", pa.array(number))


def _kin(trace: Trace, name: str, names: list[str]) -> list[str]:
    """The cores whose steps can take as long as this one's: same machine, same model."""

    def kind(core: str) -> tuple[str, str]:
        header = trace.headers[core]
        return fingerprint(header.hardware), str(sorted(header.geometry.items()))

    return [other for other in names if kind(other) == kind(name)]


def _common_fit(steps: Mapping[str, pa.Table], calm: Mapping[str, NDArray[np.bool_]]) -> StepTimeModel:
    parts = np.concatenate([_parts(table)[calm[name]] for name, table in steps.items()])
    duration_s = np.concatenate([_reals(table, "duration_s")[calm[name]] for name, table in steps.items()])
    return fit_step_time(parts, duration_s, f"{len(steps)} cores")


def undisturbed(steps: pa.Table, transfers: pa.Table) -> NDArray[np.bool_]:
    """Which of one core's steps (sorted by start) computed something, nothing of it again, and no copy touched them."""
    calm = _ints(steps, "scheduled_tokens") > 0
    for column in ("recomputed_tokens", "preemptions", "saves", "loads"):
        calm &= _ints(steps, column) == 0
    _, _, first, last, saved = _spans(steps, transfers)
    touched = np.zeros(len(calm) + 1)
    some = first <= last
    np.add.at(touched, first[some], 1)
    np.add.at(touched, last[some] + 1, -1)
    calm &= np.cumsum(touched)[:-1] == 0
    calm[saved[saved >= 0]] = False
    return np.asarray(calm, dtype=np.bool_)


def _spans(steps: pa.Table, transfers: pa.Table) -> tuple[Floats, Floats, Whole, Whole, Whole]:
    """Start and end of the steps; first and last step each transfer overlaps; the step each save was handed over in."""
    start_s = _reals(steps, "start_s")
    end_s = np.maximum.accumulate(start_s + _reals(steps, "duration_s")) if len(start_s) else start_s
    first = np.searchsorted(end_s, _reals(transfers, "start_s"), side="right")
    last = np.searchsorted(start_s, _reals(transfers, "end_s"), side="right") - 1
    numbers = _ints(steps, "step")
    order = np.argsort(numbers)
    wanted = _ints(transfers, "step")
    at = np.searchsorted(numbers, wanted, sorter=order)
    row = order[np.minimum(at, len(order) - 1)] if len(order) else np.zeros(len(wanted), np.int64)
    is_save = _strings(transfers, "direction") == "save"
    saved = np.where(is_save & (numbers[row] == wanted), row, -1) if len(order) else np.full(len(wanted), -1)
    return start_s, end_s, first, last, saved


@dataclass(frozen=True, slots=True)
class _Shares:
    """One row per (preemption, step it is involved in)."""

    preemption_id: pa.Array
    extra_s: Floats
    others: Floats
    """Requests in the step besides the victim."""
    tokens: Floats
    """Repeated tokens of the preemption in the step."""


def _shares(core: _Core) -> _Shares:
    row, ids, seconds, repeated = _involved(core)
    names = pc.unique(ids)
    key = row * max(1, len(names)) + _index_in(ids, names)
    unique, where = np.unique(key, return_inverse=True)
    at = unique // max(1, len(names))
    own = np.zeros((len(unique), len(PARTS)))
    weight = np.zeros(len(unique))
    np.add.at(own, where, repeated)
    np.add.at(weight, where, seconds)
    weight += np.maximum(0.0, core.model.price(own))
    extra_s = _extra(core, at, own)
    in_step = np.bincount(at, weight, len(core.parts))
    sharers = np.bincount(at, minlength=len(core.parts))
    share = np.where(in_step[at] > 0, weight / np.where(in_step[at] > 0, in_step[at], 1.0), 1.0 / sharers[at])
    others = np.maximum(0, _ints(core.steps, "scheduled_requests")[at] - (own[:, 0] > 0))
    return _Shares(names.take(pa.array(unique % max(1, len(names)))), share * extra_s, others, own[:, 0])


def _extra(core: _Core, at: Whole, own: Floats) -> Floats:
    """Seconds beyond d0 of the steps ``at``, all victims' repeated tokens taken out."""
    left = core.parts.copy()
    np.subtract.at(left, at, own)
    _refuse_overdrawn(core, left)
    calm = np.flatnonzero(undisturbed(core.steps, core.transfers))
    duration_s = _reals(core.steps, "duration_s")
    pace = core.model.pace(calm, core.parts[calm], duration_s[calm], at) if len(calm) else 1.0
    return np.asarray(duration_s[at] - pace * core.model.predict(left[at]), dtype=np.float64)


def _involved(core: _Core) -> tuple[Whole, pa.Array, Floats, Floats]:
    """Step rows, preemption ids, copy seconds in the step, repeated parts: one entry per cause of involvement."""
    lists = core.steps["repeated"].combine_chunks()
    flat = lists.flatten()
    parents = np.asarray(pc.list_parent_indices(lists), dtype=np.int64)
    repeated = np.column_stack([np.asarray(flat.field(name), dtype=np.float64) for name in REPEATED_PARTS])
    overlapping = np.maximum(0, core.last_row - core.first_row + 1)
    of = np.repeat(np.arange(len(overlapping)), overlapping)
    row = np.arange(len(of)) - np.repeat(np.cumsum(overlapping) - overlapping, overlapping) + core.first_row[of]
    start_s, end_s = (_reals(core.transfers, name) for name in ("start_s", "end_s"))
    seconds = np.minimum(end_s[of], core.end_s[row]) - np.maximum(start_s[of], core.start_s[row])
    saved = np.flatnonzero(core.save_row >= 0)
    copied = core.transfers["preemption_id"].combine_chunks()
    ids = [flat.field("preemption_id"), copied.take(pa.array(of)), copied.take(pa.array(saved))]
    nothing = len(of) + len(saved)
    return (
        np.concatenate([parents, row, core.save_row[saved]]),
        pa.concat_arrays(ids),
        np.concatenate([np.zeros(len(flat)), np.maximum(0.0, seconds), np.zeros(len(saved))]),
        np.concatenate([repeated, np.zeros((nothing, len(PARTS)))]),
    )


def _refuse_bad_steps(steps: pa.Table, core: str) -> None:
    duration_s = _reals(steps, "duration_s")
    for row in np.flatnonzero(duration_s <= 0)[:1]:
        raise TraceError(f"steps of core {core}, row {row}: duration_s is {duration_s[row]:g}, should be above 0")


def _refuse_overdrawn(core: _Core, left: Floats) -> None:
    for row in np.flatnonzero(left[:, 0] < 0)[:1]:
        number = core.steps["step"][int(row)].as_py()
        raise TraceError(
            f"steps of core {core.name}, row {row} (step {number}): repeated holds more tokens than scheduled_tokens"
        )


def _parts(steps: pa.Table) -> Floats:
    return np.column_stack([_ints(steps, name) for name in PARTS]).astype(np.float64)


def _ints(table: pa.Table, column: str) -> Whole:
    return np.asarray(table[column].to_numpy(), dtype=np.int64)


def _reals(table: pa.Table, column: str) -> Floats:
    return np.asarray(table[column].to_numpy(), dtype=np.float64)


def _strings(table: pa.Table, column: str) -> NDArray[Any]:
    return np.asarray(table[column].to_numpy(zero_copy_only=False), dtype=object)


def _index_in(values: pa.Array, among: pa.Array) -> Whole:
    """Position of each value in ``among``; -1 where it is not in there."""
    return np.asarray(pc.fill_null(pc.index_in(values, among), -1), dtype=np.int64)
