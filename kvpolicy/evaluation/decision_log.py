"""A production log as numbers: what was decided with what probability, and what it cost.

What a record teaches is said once, here, for every estimator:

- The *intended* action counts, with the consequence of what was *executed*: where a save failed and the victim was
  recomputed, the cost belongs to choosing swap. Whoever chooses swap will meet such failures too. Counted by reason.
- A run in shadow mode executed nothing but recomputes, whatever it intended: it is read as a log of always-recompute.
- ``aborted`` and ``superseded`` preemptions have a cost, what was spent until then, and count with it.
- A decision that is still *open*, or whose cost could not be attributed, has no known cost. It stays in the records:
  the known ones of the same action stand for it, with their weight over the share of that action that is known. Costs
  are taken to be missing at random given the action, and :mod:`kvpolicy.evaluation.diagnostics` refuses where many are.
- Resets leave no choice and profiles no chance; both are left out and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvpolicy import trace as traces
from kvpolicy.arrays import Flags, Floats, Ints
from kvpolicy.datasets.logs import attributed
from kvpolicy.datasets.validation import COUNTS, refuse_doubled
from kvpolicy.errors import KVPolicyError
from kvpolicy.evaluation import estimation
from kvpolicy.events import KINDS, SITUATION_FIELDS, Option, Preemption
from kvpolicy.features import COLUMNS, feature_columns
from kvpolicy.fields import one_of
from kvpolicy.policy import Policy, probabilities_of
from kvpolicy.policy.objective import ENGINE, Objective
from kvpolicy.trace import Header, Trace, TraceError

CLUSTERS: Mapping[str, str] = dict(zip(estimation.CLUSTERS, ("overflow_id", "request"), strict=True))
"""Records that are resampled together, and the column that tells them."""
SUM_ERROR = 1e-6
"""Probabilities may miss a sum of 1 by that much."""


@dataclass(frozen=True)
class Log:
    """n decisions over the actions of :data:`kvpolicy.events.KINDS`, K of them."""

    cost_s: Floats
    """(n,) measured, by the objective; NaN where it is not known."""
    action: Ints
    """(n,) intended."""
    probability: Floats
    """(n, K) as logged; 0 for what was not feasible."""
    feasible: Flags
    """(n, K)"""
    cluster: Ints
    """(n,) numbered from 0 without gaps."""
    x: Floats
    """(n, d) what a direct model sees of the situation, see :func:`situation_columns`."""
    situations: tuple[Preemption, ...]
    options: tuple[tuple[Option, ...], ...]
    requests: tuple[str, ...]
    """``CORE/REQUEST`` of each: what a model trained from logs remembers."""
    headers: Mapping[str, Header]
    counts: Mapping[str, int]
    """Records treated specially, by what they are; those left out begin with ``left out:``."""

    def __len__(self) -> int:
        return len(self.cost_s)

    @property
    def known(self) -> Flags:
        """(n,) whether the cost is known."""
        return ~np.isnan(self.cost_s)

    @property
    def known_share(self) -> Floats:
        """(K,) of the records of each action, those with a known cost; NaN where an action was never taken."""
        taken = np.bincount(self.action, minlength=len(KINDS)).astype(np.float64)
        with np.errstate(invalid="ignore"):
            return np.bincount(self.action, self.known, len(KINDS)) / taken

    def without(self, requests: frozenset[str], what: str) -> Log:
        """The log without the records of these requests, counted as ``what``. Raises TraceError if none is left."""
        kept = np.array([request not in requests for request in self.requests], np.bool_)
        if kept.all():
            return self
        if not kept.any():
            raise TraceError(f"{', '.join(self.headers)}: all records are {what}; evaluate on another log")
        return replace(
            self,
            cost_s=self.cost_s[kept],
            action=self.action[kept],
            probability=self.probability[kept],
            feasible=self.feasible[kept],
            cluster=np.unique(self.cluster[kept], return_inverse=True)[1].astype(np.int64),
            x=self.x[kept],
            situations=tuple(compress(self.situations, kept)),
            options=tuple(compress(self.options, kept)),
            requests=tuple(compress(self.requests, kept)),
            counts=dict(self.counts) | {f"left out: {what}": int((~kept).sum())},
        )

    def targets(self, policy: Policy) -> Floats:
        """(n, K) what ``policy`` would do, asked in its first state throughout."""
        state = policy.initial_state()
        shares = np.zeros(self.probability.shape)
        number = {kind: i for i, kind in enumerate(KINDS)}
        for row, (situation, options) in enumerate(zip(self.situations, self.options, strict=True)):
            if len(options) == 1:
                shares[row, number[options[0].kind]] = 1.0
                continue
            for option, share in zip(options, probabilities_of(policy, situation, options, state), strict=True):
                shares[row, number[option.kind]] += share
        return shares


def logged(folders: Sequence[Path | str], objective: Objective = ENGINE, cluster: str = "overflow") -> Log:
    """Read production logs. Costs that are missing are attributed from their steps.

    Raises TraceError, naming folder, table and row, for probabilities that are missing or none, impossible values,
    rows that are there twice, and where no decision is left.
    """
    read: dict[str, Trace] = {}
    for folder in map(str, folders):
        if folder in read:
            raise TraceError(f"{folder}: given twice")
        read[folder] = traces.read(folder)
    return log_of(read, objective, cluster)


def log_of(given: Mapping[str, Trace], objective: Objective = ENGINE, cluster: str = "overflow") -> Log:
    """As :func:`logged`, of traces in memory; their names stand in error messages."""
    one_of(*CLUSTERS).refuse("cluster", cluster)
    counts: Counter[str] = Counter()
    headers: dict[str, Header] = {}
    parts = []
    for folder, trace in given.items():
        doubled = sorted(headers.keys() & trace.headers.keys())
        if doubled:
            raise TraceError(f"{folder}: core {doubled[0]} is in another of the traces too; is one given twice?")
        headers |= trace.headers
        _count_others(headers, trace, counts)
        refuse_doubled(folder, trace)
        parts.append(_read_one(folder, attributed(trace), objective, cluster, counts))
    names = np.concatenate([part["cluster"] for part in parts])
    if not len(names):
        raise TraceError(f"{', '.join(given)}: table decisions holds no decision that a policy made")
    joined = {name: np.concatenate([part[name] for part in parts]) for name in ("cost_s", "action", "x")}
    return Log(
        **joined,
        probability=np.concatenate([part["probability"] for part in parts]),
        feasible=np.concatenate([part["feasible"] for part in parts]),
        cluster=np.unique(names, return_inverse=True)[1].astype(np.int64),
        situations=tuple(one for part in parts for one in part["situations"]),
        options=tuple(one for part in parts for one in part["options"]),
        requests=tuple(one for part in parts for one in part["requests"]),
        headers=headers,
        counts=dict(counts),
    )


def _count_others(headers: Mapping[str, Header], trace: Trace, counts: Counter[str]) -> None:
    """Decisions of cores that are not like the first one: what is estimated is a mean over all of them."""
    first, like = next(iter(headers.items()))
    for core, header in trace.headers.items():
        for what, same in (("link", header.link == like.link), ("hardware", header.hardware == like.hardware)):
            if not same:
                mine = pc.sum(pc.equal(trace.table("decisions")["core"], core)).as_py() or 0
                counts[f"pooled with those of {first}, though their {what} is another"] += mine


def situation_columns(decisions: pa.Table) -> Floats:
    """(n, 12) what a direct model regresses on: 1, and what either action moves, computes and meets."""
    got = {name: _reals(decisions, name) for name in COLUMNS}
    recompute, swap = feature_columns(got, "recompute"), feature_columns(got, "swap")
    lost = recompute["recomputed_tokens"]
    return np.column_stack(
        [
            np.ones(len(lost)),
            lost,
            recompute["recomputed_pairs"],
            swap["save_bytes"],
            swap["load_bytes"],
            *(got[name] for name in ("queued_save_bytes", "queued_load_bytes", "running_requests")),
            *(got[name] for name in ("batch_tokens", "waiting_requests", "free_blocks")),
            lost * got["running_requests"],
        ]
    )


def _read_one(folder: str, trace: Trace, objective: Objective, cluster: str, counts: Counter[str]) -> dict[str, Any]:
    table = trace.table("decisions")
    rows = np.arange(table.num_rows)
    profiled = np.asarray(pc.is_valid(table["state_id"]), dtype=np.bool_)
    reset = np.asarray(pc.equal(table["cause"], "reset"), dtype=np.bool_) & ~profiled
    counts["left out: windows of a profile"] += int(profiled.sum())
    counts["left out: preemptions by a reset, which leave no choice"] += int(reset.sum())
    kept = ~(profiled | reset)
    table, rows = table.filter(pa.array(kept)), rows[kept]
    _refuse_situations(folder, table, rows)
    probability, feasible, options = _chances(folder, table, rows)
    action = _actions(folder, table, rows, probability)
    _in_shadow(table, probability, action, counts)
    names = pc.binary_join_element_wise(table["core"], table[CLUSTERS[cluster]], "/")
    return {
        "cost_s": _costs(folder, trace, table, objective, action, counts),
        "action": action,
        "probability": probability,
        "feasible": feasible,
        "cluster": np.asarray(names.to_pylist(), object),
        "x": situation_columns(table),
        "situations": [Preemption(*row) for row in zip(*(table[n].to_pylist() for n in SITUATION_FIELDS), strict=True)],
        "options": options,
        "requests": pc.binary_join_element_wise(table["core"], table["request"], "/").to_pylist(),
    }


def _refuse_situations(folder: str, table: pa.Table, rows: Ints) -> None:
    for name in COUNTS:
        values = _reals(table, name)
        for at in np.flatnonzero(values < 0)[:1]:
            raise TraceError(
                f"{folder}: table decisions, row {rows[at]}: {name} is {values[at]:g}, should be 0 or above"
            )


def _chances(folder: str, table: pa.Table, rows: Ints) -> tuple[Floats, Flags, list[tuple[Option, ...]]]:
    """Logged probabilities and feasibility, (n, K) each, and the options. Raises TraceError where one is missing."""
    probability, feasible = np.zeros((len(rows), len(KINDS))), np.zeros((len(rows), len(KINDS)), np.bool_)
    options = []
    number = {kind: i for i, kind in enumerate(KINDS)}
    for at, (given, shares) in enumerate(
        zip(table["options"].to_pylist(), table["probabilities"].to_pylist(), strict=True)
    ):
        where = f"{folder}: table decisions, row {rows[at]}"
        for i in range(len(given)):
            if i >= len(shares) or shares[i] is None or np.isnan(shares[i]):
                raise TraceError(f"{where}: probability of option {i} ({given[i]['kind']}) missing")
        kinds = [one["kind"] for one in given]
        if not kinds or len(set(kinds)) < len(kinds) or not set(kinds) <= set(KINDS) or len(shares) != len(kinds):
            raise TraceError(
                f"{where}: options are {kinds} with {len(shares)} probabilities; there should be one of each, and no "
                f"kind twice, of {', '.join(KINDS)}"
            )
        if min(shares) < 0 or abs(sum(shares) - 1.0) > SUM_ERROR:
            raise TraceError(f"{where}: probabilities are {shares}, should be 0 or above and sum to 1")
        for kind, share in zip(kinds, shares, strict=True):
            probability[at, number[kind]], feasible[at, number[kind]] = share, True
        options.append(tuple(Option(**one) for one in given))
    return probability, feasible, options


def _actions(folder: str, table: pa.Table, rows: Ints, probability: Floats) -> Ints:
    number = {kind: i for i, kind in enumerate(KINDS)}
    action = np.zeros(len(rows), np.int64)
    for at, (given, chosen) in enumerate(zip(table["options"].to_pylist(), table["chosen"].to_pylist(), strict=True)):
        if not 0 <= chosen < len(given):
            raise TraceError(
                f"{folder}: table decisions, row {rows[at]}: chosen is {chosen}, there are {len(given)} options"
            )
        action[at] = number[given[chosen]["kind"]]
    for at in np.flatnonzero(probability[np.arange(len(rows)), action] <= 0)[:1]:
        raise TraceError(
            f"{folder}: table decisions, row {rows[at]}: {KINDS[action[at]]} was chosen with probability 0; what was "
            "chosen should have a probability above 0"
        )
    return action


def _in_shadow(table: pa.Table, probability: Floats, action: Ints, counts: Counter[str]) -> None:
    """Decisions of cores in shadow mode become what was executed, with certainty. Counts what else was not executed."""
    executed = np.array([KINDS.index(kind) for kind in table["executed"].to_pylist()], np.int64)
    cores = table["core"]
    shadowed = pc.unique(cores.filter(pc.equal(table["reason"], "shadow")))
    if len(shadowed):
        mine = np.asarray(pc.is_in(cores, value_set=shadowed), dtype=np.bool_)
        counts["in shadow mode: read as always-recompute, which is what was executed"] += int(mine.sum())
        action[mine] = executed[mine]
        probability[mine] = np.eye(len(KINDS))[executed[mine]]
    other = np.flatnonzero(executed != action)
    reasons = table["reason"].take(pa.array(other)).to_pylist()
    for kind, reason in zip(executed[other], reasons, strict=True):
        counts[f"intended otherwise, {KINDS[kind]} executed: {reason or 'no reason told'}"] += 1


def _costs(
    folder: str, trace: Trace, table: pa.Table, objective: Objective, action: Ints, counts: Counter[str]
) -> Floats:
    """(n,) by the objective; NaN where it is not known."""
    found = {}
    columns = ("core", "preemption_id", "ended", "engine_s", "victim_delay_s", "others_delay_s")
    for row in trace.rows("outcomes", columns):
        found[row["core"], row["preemption_id"]] = row
    cost_s = np.full(table.num_rows, np.nan)
    keys = zip(table["core"].to_pylist(), table["preemption_id"].to_pylist(), strict=True)
    for at, key in enumerate(keys):
        outcome = found.get(key)
        if outcome is None or outcome["engine_s"] is None:
            what = "still open" if outcome is None else "cost could not be attributed"
            counts[f"no known cost, {what}, {KINDS[action[at]]}"] += 1
            continue
        if outcome["ended"] != "resumed":
            counts[f"{outcome['ended']}: counted with what was spent until then"] += 1
        try:
            cost_s[at] = objective.weigh(outcome["engine_s"], outcome["victim_delay_s"], outcome["others_delay_s"])
        except KVPolicyError as error:
            raise TraceError(f"{folder}: table outcomes, preemption {key[1]} of core {key[0]}: {error}") from error
    return cost_s


def _reals(table: pa.Table, column: str) -> Floats:
    return np.asarray(table[column].to_numpy(), dtype=np.float64)
