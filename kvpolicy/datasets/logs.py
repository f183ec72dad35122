"""Records of production logs: situations with the measured cost of one option each.

A record holds the cost of the *executed* option. Excluded, and counted by reason, are preemptions in which another
option was executed than was intended (a failed save, a run in shadow mode), preemptions that ended before their victim
was back, and those without a known cost. The choice of the option depends on the situation and chance alone, so an
option's records determine its cost. A record whose option had a small probability represents more situations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from kvpolicy import trace as traces
from kvpolicy.attribution.offline import attribute, common_step_time
from kvpolicy.attribution.step_time import StepTimeModel
from kvpolicy.datasets.examples import MIN_FLOOR_S, Example, option_of
from kvpolicy.datasets.host_memory import common_host_memory
from kvpolicy.datasets.profiles import refuse_mixture
from kvpolicy.datasets.validation import refuse_doubled, refuse_negative_hits, refuse_situation, refuse_sizes
from kvpolicy.events import KINDS, SITUATION_FIELDS, Kind, Preemption, copy_was_used, situation_of
from kvpolicy.features import Features, features_of, with_hits
from kvpolicy.hardware import Geometry
from kvpolicy.trace import Header, Trace, TraceError

Row = Mapping[str, Any]

DECISION_COLUMNS = (
    *SITUATION_FIELDS, "core", "preemption_id", "request", "options", "probabilities", "chosen", "executed", "state_id",
    "arm", "repeat",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Record:
    """One preemption: its situation, the executed option with its probability, and the cost."""

    situation: Preemption
    kind: Kind
    chance: float
    """Logged probability of the executed option, above 0."""
    engine_s: float
    """Measured; noise can bring a small cost below 0."""
    request: str
    """``CORE/REQUEST``. Records of one request are not independent."""
    hit_tokens: int
    """Tokens that were found on the device at resume."""
    had_choice: bool = True
    """Whether both options were feasible."""

    @property
    def expected(self) -> Features:
        """Features as they were known at the decision."""
        return features_of(self.situation, option_of(self.kind, self.situation.computed_tokens))

    @property
    def example(self) -> Example:
        """Features of what was really lost, with the cost."""
        option = option_of(self.kind, self.situation.computed_tokens)
        return Example(features_of(with_hits(self.situation, self.hit_tokens), option), self.engine_s)


@dataclass(frozen=True, slots=True)
class Records:
    """Records of logs of one machine, one model and one link."""

    records: tuple[Record, ...]
    headers: Mapping[str, Header]
    digests: tuple[str, ...]
    left_out: Mapping[str, int]
    step_time: StepTimeModel | None
    """Step-time model (what a step would have taken undisturbed) of all cores together; None with too few undisturbed
    steps."""
    pinned: bool | None = None
    """Whether the host pools were page-locked; None without transfers."""

    def of_kind(self, kind: Kind) -> tuple[Record, ...]:
        return tuple(record for record in self.records if record.kind == kind)

    @property
    def any_header(self) -> Header:
        return next(iter(self.headers.values()))

    @property
    def geometry(self) -> Geometry:
        return Geometry.from_dict(self.any_header.geometry)

    @property
    def budget_tokens(self) -> float:
        """Maximum tokens of a step; infinite if the headers state none, or different ones."""
        budgets = {header.token_budget for header in self.headers.values()}
        (budget,) = budgets if len(budgets) == 1 else (None,)
        return inf if budget is None else float(budget)

    @property
    def floor_s(self) -> dict[Kind, float]:
        """Noise floor of single costs: the step-time model's error on one step, if there is a model."""
        noise_s = MIN_FLOOR_S if self.step_time is None else max(MIN_FLOOR_S, self.step_time.error.mean_s)
        return dict.fromkeys(KINDS, noise_s)


def holds_logs(folders: Sequence[Path | str]) -> bool:
    """Whether these are logs of production or simulation, not profiles. Raises TraceError for a mixture of both."""
    sources = {
        core: Header.read(core / "header.json").source
        for folder in folders
        for core in traces.core_folders(Path(folder))
    }
    profiles = [core for core, source in sources.items() if source == "profile"]
    others = [core for core in sources if core not in profiles]
    if profiles and others:
        raise TraceError(
            f"{profiles[0]} is of a profile, {others[0]} of a {sources[others[0]]} (header.json, field source): take "
            "one kind at a time"
        )
    return bool(others)


def read_records(folders: Sequence[Path | str], mixed_hardware: bool | None = None) -> Records:
    """Read logs; missing costs are attributed from their steps.

    Raises TraceError, naming folder, table and row, for impossible values, missing probabilities and duplicate rows;
    naming both cores for logs of different machines, models or links.
    """
    read: dict[str, Trace] = {}
    for folder in map(str, folders):
        if folder in read:
            raise TraceError(f"{folder}: given twice")
        read[folder] = traces.read(folder)
    return records_of(read, mixed_hardware)


def records_of(traces_by_name: Mapping[str, Trace], mixed_hardware: bool | None = None) -> Records:
    """Like :func:`read_records`, for traces in memory by the names used in error messages."""
    headers: dict[str, Header] = {}
    left_out: Counter[str] = Counter()
    records: list[Record] = []
    for folder, trace in traces_by_name.items():
        refuse_doubled(folder, trace)
        for core, header in trace.headers.items():
            if core in headers:
                raise TraceError(f"{folder}: core {core} is in another of the traces too; is one given twice?")
            headers[core] = header
        records += _records(folder, with_attributed_costs(trace), left_out)
    refuse_mixture(headers, mixed_hardware)
    pinned = common_host_memory(traces_by_name)
    digests = tuple(trace.digest() for trace in traces_by_name.values())
    step_time = common_step_time(list(traces_by_name.values()))
    return Records(tuple(records), headers, digests, dict(left_out), step_time, pinned)


def with_attributed_costs(trace: Trace) -> Trace:
    """The trace with missing costs attributed from its steps."""
    unknown = trace.table("outcomes")["engine_s"].null_count
    return attribute(trace) if unknown and trace.table("steps").num_rows else trace


def _records(folder: str, trace: Trace, left_out: Counter[str]) -> list[Record]:
    columns = (
        "core", "preemption_id", "ended", "engine_s", "loaded_tokens", "recomputed_tokens", "local_hit_tokens",
    )  # fmt: skip
    outcomes = {}
    for number, row in enumerate(trace.rows("outcomes", columns)):
        refuse_negative_hits(folder, number, row)
        outcomes[row["core"], row["preemption_id"]] = row
    records = []
    for number, row in enumerate(trace.rows("decisions", DECISION_COLUMNS)):
        refuse_situation(folder, number, row)
        outcome = outcomes.get((row["core"], row["preemption_id"]))
        reason = _why_not(row, outcome)
        if reason or outcome is None:
            left_out[reason] += 1
            continue
        refuse_sizes(folder, number, row)
        chance = _chance(folder, number, row)
        request, hit_tokens = f"{row['core']}/{row['request']}", outcome["local_hit_tokens"]
        had_choice = {option["kind"] for option in row["options"]} == set(KINDS)
        records.append(
            Record(situation_of(row), row["executed"], chance, outcome["engine_s"], request, hit_tokens, had_choice)
        )
    return records


def _why_not(row: Row, outcome: Row | None) -> str:
    if row["state_id"] is not None:
        return "windows of a profile"
    if row["cause"] == "reset" or row["computed_tokens"] == 0:
        return "preemptions by a reset, or of nothing computed"
    if outcome is None:
        return "preemptions still open"
    if outcome["ended"] != "resumed":
        return f"preemptions that ended before the victim was back ({outcome['ended']})"
    if outcome["engine_s"] is None:
        return "preemptions whose cost could not be attributed"
    chosen = row["chosen"]
    if not 0 <= chosen < len(row["options"]) or row["options"][chosen]["kind"] != row["executed"]:
        return "preemptions in which something else was executed than was chosen"
    if not copy_was_used(row["executed"], outcome["loaded_tokens"], outcome["recomputed_tokens"]):
        return "swaps of which nothing was loaded"
    if row["executed"] == "recompute" and outcome["loaded_tokens"] > 0:
        return "recomputes of which a part was in host memory all the same, in the cache of prompts"
    return ""


def _chance(folder: str, number: int, row: Row) -> float:
    probabilities, chosen = row["probabilities"], row["chosen"]
    chance = probabilities[chosen] if chosen < len(probabilities) else None
    if chance is None or not 0.0 < chance <= 1.0 + 1e-9:
        problem = "missing" if chance is None or chance != chance else f"{chance:g}, should be above 0 and at most 1"
        raise TraceError(f"{folder}: table decisions, row {number}: probability of option {chosen} {problem}")
    return float(min(1.0, chance))
