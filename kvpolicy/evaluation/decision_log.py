"""A production log as arrays: the decisions, their logged probabilities and their costs.

How records are interpreted is defined here for all estimators:

- The action of a record is the *intended* one; its cost is that of what was *executed*. If a save failed and the victim
  was recomputed, the cost counts for swap: another policy that chooses swap would meet such failures too. These records
  are counted by reason.
- A run in shadow mode executed recomputes only: it is read as a log of always-recompute.
- ``aborted`` and ``superseded`` preemptions count with the cost incurred until then.
- A decision that is still *open*, or whose cost could not be attributed, has no known cost. It stays in the log, and
  the known records of the same action represent it: their weight is divided by the known share of that action. Costs
  are assumed to be missing at random given the action; :mod:`kvpolicy.evaluation.diagnostics` refuses a log in which
  too many are missing.
- Resets leave no choice, and windows of a profile are not left to chance; both are left out and counted.
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
from kvpolicy.datasets.host_memory import common_host_memory
from kvpolicy.datasets.logs import with_attributed_costs
from kvpolicy.datasets.validation import COUNTS, refuse_choices_of_victims, refuse_doubled
from kvpolicy.errors import KVPolicyError
from kvpolicy.evaluation import estimation
from kvpolicy.events import KINDS, SITUATION_FIELDS, Option, Preemption
from kvpolicy.features import COLUMNS, feature_columns
from kvpolicy.fields import one_of
from kvpolicy.policy import Policy, initial_state_of, probabilities_of
from kvpolicy.policy.objective import ENGINE, Objective
from kvpolicy.trace import Header, Trace, TraceError

CLUSTERS: Mapping[str, str] = dict(zip(estimation.CLUSTERS, ("overflow_id", "request"), strict=True))
"""Kinds of clusters (records that are resampled together), and the column that identifies them."""
SUM_ERROR = 1e-6
"""Tolerance of the sum of probabilities."""


@dataclass(frozen=True)
class Log:
    """n decisions over the actions of :data:`kvpolicy.events.KINDS`, K of them."""

    cost_s: Floats
    """(n,) measured cost by the objective; NaN where unknown."""
    action: Ints
    """(n,) intended action."""
    probability: Floats
    """(n, K) as logged; 0 for actions that were not feasible."""
    feasible: Flags
    """(n, K)"""
    cluster: Ints
    """(n,) numbered from 0 without gaps."""
    x: Floats
    """(n, d) inputs of a direct model, see :func:`situation_columns`."""
    situations: tuple[Preemption, ...]
    options: tuple[tuple[Option, ...], ...]
    requests: tuple[str, ...]
    """``CORE/REQUEST`` of each record; a model trained from logs stores those it was trained on."""
    headers: Mapping[str, Header]
    counts: Mapping[str, int]
    """Numbers of records that were treated specially, by reason; ``left out:`` begins the reasons of those left out."""
    pinned: bool | None = None
    """Whether the host pools were page-locked; None without transfers."""

    def __len__(self) -> int:
        return len(self.cost_s)

    @property
    def known(self) -> Flags:
        """(n,) whether the cost is known."""
        return ~np.isnan(self.cost_s)

    @property
    def known_share(self) -> Floats:
        """(K,) share of each action's records with a known cost; NaN for an action that was never taken."""
        counts = np.bincount(self.action, minlength=len(KINDS)).astype(np.float64)
        with np.errstate(invalid="ignore"):
            return np.bincount(self.action, self.known, len(KINDS)) / counts

    def without(self, requests: frozenset[str], what: str) -> Log:
        """The log without the records of these requests, which are counted as ``what``.

        Raises TraceError if no record is left.
        """
        remaining = np.array([request not in requests for request in self.requests], np.bool_)
        if remaining.all():
            return self
        if not remaining.any():
            raise TraceError(f"{', '.join(self.headers)}: all records are {what}; evaluate on another log")
        return self.only(remaining, what)

    def only(self, remaining: Flags, what: str) -> Log:
        """The log with some of its records, at least one; the others are counted as ``what``."""
        return replace(
            self,
            cost_s=self.cost_s[remaining],
            action=self.action[remaining],
            probability=self.probability[remaining],
            feasible=self.feasible[remaining],
            cluster=np.unique(self.cluster[remaining], return_inverse=True)[1].astype(np.int64),
            x=self.x[remaining],
            situations=tuple(compress(self.situations, remaining)),
            options=tuple(compress(self.options, remaining)),
            requests=tuple(compress(self.requests, remaining)),
            counts=dict(self.counts) | {f"left out: {what}": int((~remaining).sum())},
        )

    def targets(self, policy: Policy) -> Floats:
        """(n, K) probabilities of ``policy``, which stays in its initial state throughout."""
        state = initial_state_of(policy)
        shares = np.zeros(self.probability.shape)
        number = {kind: i for i, kind in enumerate(KINDS)}
        for row, (situation, options) in enumerate(zip(self.situations, self.options, strict=True)):
            if len(options) == 1:
                shares[row, number[options[0].kind]] = 1.0
                continue
            for option, share in zip(options, probabilities_of(policy, situation, options, state), strict=True):
                shares[row, number[option.kind]] += share
        return shares


def read_log(folders: Sequence[Path | str], objective: Objective = ENGINE, cluster: str = "overflow") -> Log:
    """Read production logs. Missing costs are attributed from the steps.

    Raises TraceError, naming folder, table and row, for missing or invalid probabilities, impossible values, duplicate
    rows, and if no decision is left; naming both cores, for logs under different orders of service.
    """
    return attributed_log(read_traces(folders), objective, cluster)


def read_traces(folders: Sequence[Path | str], between: tuple[str, str] | None = None) -> dict[str, Trace]:
    """Traces by folder. Missing costs of their outcomes are attributed from the steps.

    ``between``: as for :func:`kvpolicy.trace.read_between`. Raises TraceError, naming the folder, for one that is given
    twice, cannot be read or holds a row twice, and as that function.
    """
    names = list(map(str, folders))
    for number, name in enumerate(names):
        if name in names[:number]:
            raise TraceError(f"{name}: given twice")
    return {name: _attributed(name, trace) for name, trace in traces.read_between(names, between, "decisions").items()}


def _attributed(name: str, trace: Trace) -> Trace:
    refuse_doubled(name, trace)
    refuse_choices_of_victims(name, trace)
    return with_attributed_costs(trace)


def log_from_traces(
    traces_by_name: Mapping[str, Trace], objective: Objective = ENGINE, cluster: str = "overflow"
) -> Log:
    """As :func:`read_log`, of traces in memory, by the name that error messages give them."""
    by_name = {name: _attributed(name, trace) for name, trace in traces_by_name.items()}
    return attributed_log(by_name, objective, cluster)


def attributed_log(
    traces_by_name: Mapping[str, Trace], objective: Objective = ENGINE, cluster: str = "overflow"
) -> Log:
    """As :func:`log_from_traces`, of the result of :func:`read_traces`."""
    one_of(*CLUSTERS).refuse("cluster", cluster)
    counts: Counter[str] = Counter()
    headers: dict[str, Header] = {}
    parts = []
    for name, trace in traces_by_name.items():
        shared_cores = sorted(headers.keys() & trace.headers.keys())
        if shared_cores:
            raise TraceError(f"{name}: core {shared_cores[0]} is in another of the traces too; is one given twice?")
        headers |= trace.headers
        _refuse_other_order(headers)
        _count_others(headers, trace, counts)
        parts.append(_read_one(name, trace, objective, cluster, counts))
    names = np.concatenate([part["cluster"] for part in parts])
    if not len(names):
        raise TraceError(f"{', '.join(traces_by_name)}: table decisions holds no decision that a policy made")
    joined = {name: np.concatenate([part[name] for part in parts]) for name in ("cost_s", "action", "x")}
    return Log(
        **joined,
        probability=np.concatenate([part["probability"] for part in parts]),
        feasible=np.concatenate([part["feasible"] for part in parts]),
        cluster=np.unique(names, return_inverse=True)[1].astype(np.int64),
        situations=tuple(situation for part in parts for situation in part["situations"]),
        options=tuple(options for part in parts for options in part["options"]),
        requests=tuple(request for part in parts for request in part["requests"]),
        headers=headers,
        counts=dict(counts),
        pinned=common_host_memory(traces_by_name),
    )


def _refuse_other_order(headers: Mapping[str, Header]) -> None:
    """Raise TraceError, naming both cores, for logs under different orders of service. Headers that name none are taken
    for any."""
    named = {core: header for core, header in headers.items() if header.order is not None}
    for core, header in named.items():
        first, first_header = next(iter(named.items()))
        if (header.order, header.order_digest) != (first_header.order, first_header.order_digest):
            raise TraceError(
                f"cores {first} and {core} were recorded under different orders of service, {first_header.order} and "
                f"{header.order} (header.json): who is preempted, and for how long, follows from the order; evaluate "
                "the logs of one at a time"
            )


def _count_others(headers: Mapping[str, Header], trace: Trace, counts: Counter[str]) -> None:
    """Count decisions of cores whose link or hardware differs from the first core's: the estimate is over all cores."""
    first, first_header = next(iter(headers.items()))
    for core, header in trace.headers.items():
        for property_name, same in (
            ("link", header.link == first_header.link),
            ("hardware", header.hardware == first_header.hardware),
        ):
            if not same:
                decisions = pc.sum(pc.equal(trace.table("decisions")["core"], core)).as_py() or 0
                counts[f"pooled with those of {first}, although their {property_name} differs"] += decisions


def situation_columns(decisions: pa.Table) -> Floats:
    """(n, 12) inputs of a direct model: 1, what each action copies or computes, and the load of the engine."""
    values = {name: _float_column(decisions, name) for name in COLUMNS}
    recompute, swap = feature_columns(values, "recompute"), feature_columns(values, "swap")
    lost_tokens = recompute["recomputed_tokens"]
    return np.column_stack(
        [
            np.ones(len(lost_tokens)),
            lost_tokens,
            recompute["recomputed_pairs"],
            swap["save_bytes"],
            swap["load_bytes"],
            *(values[name] for name in ("queued_save_bytes", "queued_load_bytes", "running_requests")),
            *(values[name] for name in ("batch_tokens", "waiting_requests", "free_blocks")),
            lost_tokens * values["running_requests"],
        ]
    )


def _read_one(folder: str, trace: Trace, objective: Objective, cluster: str, counts: Counter[str]) -> dict[str, Any]:
    table = trace.table("decisions")
    rows = np.arange(table.num_rows)
    profiled = np.asarray(pc.is_valid(table["state_id"]), dtype=np.bool_)
    reset = np.asarray(pc.equal(table["cause"], "reset"), dtype=np.bool_) & ~profiled
    counts["left out: windows of a profile"] += int(profiled.sum())
    counts["left out: preemptions by a reset, which leave no choice"] += int(reset.sum())
    included = ~(profiled | reset)
    table, rows = table.filter(pa.array(included)), rows[included]
    _refuse_situations(folder, table, rows)
    probability, feasible, options = _logged_probabilities(folder, table, rows)
    action = _actions(folder, table, rows, probability)
    _apply_shadow_mode(table, probability, action, counts)
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
        values = _float_column(table, name)
        for index in np.flatnonzero(values < 0)[:1]:
            raise TraceError(
                f"{folder}: table decisions, row {rows[index]}: {name} is {values[index]:g}, should be 0 or above"
            )


def _logged_probabilities(folder: str, table: pa.Table, rows: Ints) -> tuple[Floats, Flags, list[tuple[Option, ...]]]:
    """Logged probabilities and feasibility, (n, K) each, and the options of each record.

    Raises TraceError for a missing or invalid probability.
    """
    probability, feasible = np.zeros((len(rows), len(KINDS))), np.zeros((len(rows), len(KINDS)), np.bool_)
    option_tuples = []
    number = {kind: i for i, kind in enumerate(KINDS)}
    for index, (options, shares) in enumerate(
        zip(table["options"].to_pylist(), table["probabilities"].to_pylist(), strict=True)
    ):
        where = f"{folder}: table decisions, row {rows[index]}"
        for i in range(len(options)):
            if i >= len(shares) or shares[i] is None or np.isnan(shares[i]):
                raise TraceError(f"{where}: probability of option {i} ({options[i]['kind']}) missing")
        kinds = [option["kind"] for option in options]
        if not kinds or len(set(kinds)) < len(kinds) or not set(kinds) <= set(KINDS) or len(shares) != len(kinds):
            raise TraceError(
                f"{where}: options are {kinds} with {len(shares)} probabilities; there should be one of each, and no "
                f"kind twice, of {', '.join(KINDS)}"
            )
        if min(shares) < 0 or abs(sum(shares) - 1.0) > SUM_ERROR:
            raise TraceError(f"{where}: probabilities are {shares}, should be 0 or above and sum to 1")
        for kind, share in zip(kinds, shares, strict=True):
            probability[index, number[kind]], feasible[index, number[kind]] = share, True
        option_tuples.append(tuple(Option(**option) for option in options))
    return probability, feasible, option_tuples


def _actions(folder: str, table: pa.Table, rows: Ints, probability: Floats) -> Ints:
    number = {kind: i for i, kind in enumerate(KINDS)}
    action = np.zeros(len(rows), np.int64)
    for index, (options, chosen) in enumerate(
        zip(table["options"].to_pylist(), table["chosen"].to_pylist(), strict=True)
    ):
        if not 0 <= chosen < len(options):
            raise TraceError(
                f"{folder}: table decisions, row {rows[index]}: chosen is {chosen}, there are {len(options)} options"
            )
        action[index] = number[options[chosen]["kind"]]
    for index in np.flatnonzero(probability[np.arange(len(rows)), action] <= 0)[:1]:
        raise TraceError(
            f"{folder}: table decisions, row {rows[index]}: {KINDS[action[index]]} was chosen with probability 0; "
            "what was chosen should have a probability above 0"
        )
    return action


def _apply_shadow_mode(table: pa.Table, probability: Floats, action: Ints, counts: Counter[str]) -> None:
    """Replace the decisions of cores in shadow mode, in place, by what was executed, with probability 1.

    Counts the other decisions that were not executed as intended.
    """
    executed = np.array([KINDS.index(kind) for kind in table["executed"].to_pylist()], np.int64)
    cores = table["core"]
    shadowed = pc.unique(cores.filter(pc.equal(table["reason"], "shadow")))
    if len(shadowed):
        in_shadow = np.asarray(pc.is_in(cores, value_set=shadowed), dtype=np.bool_)
        counts["in shadow mode: read as always-recompute, which is what was executed"] += int(in_shadow.sum())
        action[in_shadow] = executed[in_shadow]
        probability[in_shadow] = np.eye(len(KINDS))[executed[in_shadow]]
    differing = np.flatnonzero(executed != action)
    reasons = table["reason"].take(pa.array(differing)).to_pylist()
    for kind, reason in zip(executed[differing], reasons, strict=True):
        counts[f"intended otherwise, {KINDS[kind]} executed: {reason or 'no reason recorded'}"] += 1


def _costs(
    folder: str, trace: Trace, table: pa.Table, objective: Objective, action: Ints, counts: Counter[str]
) -> Floats:
    """(n,) costs by the objective; NaN where unknown."""
    outcomes = {}
    columns = ("core", "preemption_id", "ended", "engine_s", "victim_delay_s", "others_delay_s")
    for row in trace.rows("outcomes", columns):
        outcomes[row["core"], row["preemption_id"]] = row
    cost_s = np.full(table.num_rows, np.nan)
    keys = zip(table["core"].to_pylist(), table["preemption_id"].to_pylist(), strict=True)
    for index, key in enumerate(keys):
        outcome = outcomes.get(key)
        if outcome is None or outcome["engine_s"] is None:
            reason = "still open" if outcome is None else "cost could not be attributed"
            counts[f"no known cost, {reason}, {KINDS[action[index]]}"] += 1
            continue
        if outcome["ended"] != "resumed":
            counts[f"{outcome['ended']}: counted with what was spent until then"] += 1
        try:
            cost_s[index] = objective.weigh(outcome["engine_s"], outcome["victim_delay_s"], outcome["others_delay_s"])
        except KVPolicyError as error:
            raise TraceError(f"{folder}: table outcomes, preemption {key[1]} of core {key[0]}: {error}") from error
    return cost_s


def _float_column(table: pa.Table, column: str) -> Floats:
    return np.asarray(table[column].to_numpy(), dtype=np.float64)
