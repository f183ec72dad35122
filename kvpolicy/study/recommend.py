"""What to deploy: the user's own workload on the user's hardware under every policy, compared run by run.

Two policies on the same runs are compared by the ratio of what they came to, with an interval over the pairs. The
answer says which policy to deploy, and how much better than vLLM's own it was.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from math import exp, isfinite, log
from statistics import fmean
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy.hardware.link import NATIVE
from kvpolicy.policy import Policy
from kvpolicy.stats import student_interval
from kvpolicy.study.cache import Result
from kvpolicy.study.config import DEFAULT_HOST_GIB, JUDGED, Criterion, Run, Serving
from kvpolicy.study.contender import contender_of
from kvpolicy.study.grid import simulate
from kvpolicy.study.inputs import HardwareObject, workload_named
from kvpolicy.study.machine import open_machine
from kvpolicy.study.report import aligned, beyond_warning, figures, server_words, written
from kvpolicy.study.run_cell import ORACLE, source_named
from kvpolicy.workload import Source, Workload

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Ratio:
    """Geometric mean of the pairs' ratios. The ends are None where a single pair leaves nothing to judge by."""

    value: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def told(self) -> bool:
        """Whether it is told from 1."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high

    def text(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3f} (1 pair, no interval)"
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def geometric_means(values: Sequence[float], groups: Sequence[int]) -> list[float]:
    """One per group, in the order of their first values. Raises ValueError for values without a logarithm."""
    logs: dict[int, list[float]] = {}
    for value, group in zip(values, groups, strict=True):
        if not (isfinite(value) and value > 0):
            raise InputError(f"geometric mean of {list(values)}: numbers above 0 are needed")
        logs.setdefault(group, []).append(log(value))
    return [exp(fmean(some)) for some in logs.values()]


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], level: float = LEVEL, comparisons: int = 1) -> Ratio:
    """Ours over theirs: Student's interval of the mean log ratio over pairs that met the same requests and chance.

    ``comparisons``: of how many such intervals the most favourable will be shown; all of them then hold together with
    ``level`` (Bonferroni). Raises ValueError for values that have no ratio, or no pairs.
    """
    pairs = list(zip(ours, theirs, strict=True))
    if not pairs or not all(isfinite(a) and isfinite(b) and a > 0 and b > 0 for a, b in pairs):
        raise InputError(f"paired ratio of {list(ours)} over {list(theirs)}: pairs of numbers above 0 are needed")
    logs = [log(a / b) for a, b in pairs]
    if len(logs) == 1:
        return Ratio(exp(logs[0]), None, None, 1)
    value, low, high = map(exp, student_interval(logs, (1.0 - level) / (2 * comparisons)))
    return Ratio(value, low, high, len(logs))


DEFAULT = "always-recompute"
"""What vLLM does by itself."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One policy beside vLLM's own, over the same runs."""

    policy: str
    gain: Ratio
    """How many times better than vLLM's own behaviour, by what it is judged by; above 1 is better."""
    to_best: Ratio
    """The best policy over this one: how many times better the best was."""
    throughput: Ratio
    e2e_p99: Ratio
    ttft_p99: Ratio
    choices: int
    """Preemptions at which swap was feasible, in all runs."""
    extrapolated: int
    figures: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Advice:
    """What to deploy, and why."""

    workload: str
    hardware: str
    kv_blocks: int
    server: str
    """What it may take at a time."""
    judge_by: str
    min_gain: float
    """The share by which a policy has to be better to be worth a change."""
    seeds_differ: bool
    """Whether every seed of a part was a pair of its own, or all of them one."""
    best: str
    """The best in the mean of those told to be better by more than ``min_gain``, or of all where none is."""
    deploy: str
    """``best``, where it is told to be better by more than ``min_gain``; else ``always-recompute``."""
    reason: str
    config_line: str
    """The command that prints the flags; empty where nothing is to be changed."""
    compared: tuple[Compared, ...]
    warnings: tuple[str, ...]
    whole: str = ""
    """What the workload as one run came to; empty where the parts are the whole."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        pairs = self.compared[0].gain.pairs
        rows = [["policy", f"{self.judge_by} gain", "throughput", "e2e p99", "ttft p99", *SHOWN]]
        for one in self.compared:
            ratios = (one.gain, one.throughput, one.e2e_p99, one.ttft_p99)
            shown = (written(name, one.figures) for name in SHOWN)
            rows.append([one.policy, *(ratio.text() for ratio in ratios), *shown])
        once = "" if self.seeds_differ else "; seeds do not change the requests: the runs of a part are one"
        lines = [
            f"{self.workload} on {self.hardware}, {self.kv_blocks} KV blocks: {pairs} pairs of runs per policy{once}",
            f"ratios against {DEFAULT}: {self.judge_by} gain above 1 is better; throughput above 1, p99 below 1",
            f"server: {self.server}",
            f"all intervals shown together at {LEVEL:.0%}; a change is advised where all of the gain's interval lies "
            f"above {1.0 + self.min_gain:g}",
            *aligned(rows),
            "",
            f"deploy this: {self.deploy}: {self.reason}",
        ]
        if self.config_line:
            lines.append(f"  {self.config_line}")
        if self.whole:
            lines.append(f"the whole workload as one run, without an interval: {self.whole}")
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])


SHOWN = ("e2e s", "recompute", "swap", "again tok")


def figure_of(result: Result, name: str, which: str | None) -> float:
    """That figure of a run. Raises ValueError where the run has none, as no inter-token time of single tokens."""
    value = result[name] if which is None else result[name][which]
    if value is None:
        said = name if which is None else f"{name}.{which}"
        raise InputError(f"workload {result['inputs']['workload']}: its runs have no {said}, so nothing compares them")
    return float(value)


def extrapolation_warning(one: Compared) -> str | None:
    """Where a policy's cost model was beyond its training in some of its decisions."""
    if not one.extrapolated:
        return None
    share = one.extrapolated / one.choices
    return (
        f"{one.policy}: its cost model was asked beyond what it was trained on in {one.extrapolated} of {one.choices} "
        f"decisions ({share:.0%}); `kvpolicy profile` and `kvpolicy train` on the serving machine measure there"
    )


SHARES = (0.25, 0.5, 0.75, 0.9)
"""Of requests that are shorter in all: where thresholds are tried."""
FEWER_USERS = (
    "a closed loop in parts: each has its share of the users and so of the load; with --parts 1 and --seeds all of "
    "them are there, where the seed draws their sessions"
)
UNLIKE = 1.2
"""Times by which the whole workload may differ from the mean of its parts before it is said."""
INTERVALS = 4
"""That are shown per policy: what it is judged by, throughput and two tails."""


def recommend(
    workload: str | Workload,
    hardware: str | HardwareObject,
    kv_blocks: int,
    policies: Sequence[str | Policy] = (),
    link: str = NATIVE,
    serving: Serving = Serving(),
    run: Run = Run(parts=8),
    criterion: Criterion = Criterion(),
) -> Advice:
    """Simulate ``workload`` under vLLM's own behaviour, the usual policies and ``policies``, and say which to deploy.

    ``policies``: each by its name or itself; so are ``workload`` and ``hardware``, as :func:`simulate` takes them.

    Each of the parts of the workload is one pair of a comparison, and so it is anew under each seed where the seed
    draws the requests; where it does not, as of a recorded file, seeds are averaged. One pair tells nothing from
    chance. Raises ValueError as :func:`kvpolicy.study.simulate`, and where a cell fails.
    """
    machine = open_machine(hardware)
    source = source_named(workload_named(workload), 0)
    usual = candidates(source, machine.own_model, serving.block_size)
    tried: dict[str, str | Policy] = {contender_of(one).label: one for one in (*usual, *policies)}

    def results_of(policies: Sequence[str | Policy], run: Run) -> Sequence[Result]:
        report = simulate([workload], policies, [kv_blocks], hardware, [link], serving, run)
        if report.failed:
            raise InputError(f"{len(report.failed)} cells failed, the first: {report.failed[0].text()}")
        return report.results

    results = results_of(list(tried.values()), run)
    runs = {policy: [one for one in results if one["inputs"]["policy"] == policy] for policy in tried}
    host_gib = serving.host_gib_of(machine.block_bytes(serving.block_size))
    found = advise(runs, criterion, host_gib, run.seeds == 1 or drawn(workload))
    if run.parts > 1 and closed(source):
        found = replace(found, warnings=(*found.warnings, FEWER_USERS))
    if run.parts == 1:
        return found
    whole = results_of([DEFAULT, tried[found.best]], replace(run, seeds=1, parts=1))
    told, warning = uncut(whole, runs[DEFAULT], criterion.judge_by)
    return replace(found, whole=told, warnings=(*found.warnings, *([warning] if warning else [])))


def uncut(whole: Sequence[Result], parts: Sequence[Result], judge_by: str) -> tuple[str, str]:
    """What the workload as one run came to, under the default and the best; and a warning, or nothing, where its parts
    are no picture of it. One run each: there is no interval."""
    name, which = JUDGED[judge_by]
    default, best = whole[0], whole[-1]
    was, becomes = figure_of(default, name, which), figure_of(best, name, which)
    unit = "tokens/s" if judge_by == "throughput" else "s"
    gain = becomes / was if judge_by == "throughput" else was / becomes
    preempted = sum(default["preemptions"].values())
    told = f"{DEFAULT} {was:.4g} {unit}, {preempted} preemptions"
    if best["inputs"]["policy"] != DEFAULT:
        told += f"; {best['inputs']['policy']} {becomes:.4g} {unit}, {gain:.3f} times better"
    pieces = fmean(figure_of(one, name, which) for one in parts)
    if 1 / UNLIKE <= was / pieces <= UNLIKE:
        return told, ""
    return told, (
        f"under {DEFAULT} the workload as one run comes to {was:.4g} {unit}, its parts to {pieces:.4g} {unit}: every "
        "part begins with an empty server, so the intervals are of shorter and calmer runs; fewer --parts are more "
        "like it"
    )


def closed(source: Source) -> bool:
    """Whether it is a loop of users who are all there from the beginning: a part of it has fewer of them at a time."""
    starts = {request.session: request.arrival_s for request in reversed(list(source))}
    thinks = any(request.think_s is not None for request in source)
    return thinks and len(starts) > 1 and len(set(starts.values())) == 1


def drawn(workload: str | Workload) -> bool:
    """Whether two seeds give other requests; not so of a file that is replayed as it was recorded, or of an object."""
    named = workload_named(workload)
    pairs = zip_longest(*(source_named(named, seed) for seed in (0, 1)))
    return any(one != other for one, other in pairs)


def candidates(source: Source, own_model: str | None, block_size: int) -> list[str]:
    """The policies that are tried: the fixed ones, thresholds between short and long requests, and, where the
    hardware has a cost model of its own, those that ask it. Each once. Raises ValueError for an empty workload."""
    totals = sorted(request.total_tokens for request in source)
    if not totals:
        raise InputError(f"workload {source.name} holds no request")
    lengths = (totals[int(share * (len(totals) - 1))] for share in SHARES)
    thresholds = (f"threshold:{max(1, round(tokens / block_size)) * block_size}" for tokens in lengths)
    asking = () if own_model is None else (f"minwaste:{own_model}", f"cheapest:{own_model}")
    return list(dict.fromkeys((DEFAULT, "always-swap", *thresholds, *asking)))


@dataclass(frozen=True, slots=True)
class Pairs:
    """Runs by policy, in the same order of seeds and parts for each, and what of them is one pair."""

    runs: Mapping[str, Sequence[Result]]
    seeds_differ: bool
    """Whether the seeds' requests do; else the runs of one part are one pair, their geometric mean."""

    def ratio(self, policy: str, other: str, name: str, which: str | None, more_is_better: bool = True) -> Ratio:
        """Of that figure of a result. The most favourable of several is looked for, so that all that are shown hold
        together (Bonferroni)."""
        ours, theirs = self._values(policy, name, which), self._values(other, name, which)
        if not more_is_better:
            ours, theirs = theirs, ours
        return paired_ratio(ours, theirs, comparisons=INTERVALS * max(1, len(self.runs) - 1))

    def _values(self, policy: str, name: str, which: str | None) -> list[float]:
        values = [figure_of(one, name, which) for one in self.runs[policy]]
        if self.seeds_differ:
            return values
        return geometric_means(values, [one["inputs"]["part"] for one in self.runs[policy]])


def advise(
    runs: Mapping[str, Sequence[Result]],
    criterion: Criterion,
    host_gib: float,
    seeds_differ: bool = True,
) -> Advice:
    """What follows from the runs; see :class:`Pairs`. A change is advised where the whole interval of a gain lies above
    ``1 + min_gain``, to the best in the mean of those; the oracle is no policy that a server could have."""
    judge_by, min_gain = criterion.judge_by, criterion.min_gain
    pairs = Pairs(runs, seeds_differ)
    gains = {policy: _gain(pairs, policy, DEFAULT, judge_by) for policy in runs if policy != ORACLE}
    surely = [policy for policy, gain in gains.items() if gain.low is not None and gain.low > 1.0 + min_gain]
    best = max(surely or gains, key=lambda policy: gains[policy].value)
    compared = tuple(_compared(pairs, policy, best, judge_by) for policy in runs)
    mine = next(one for one in compared if one.policy == best)
    told = mine.gain.low is not None and mine.gain.low > 1.0 + min_gain
    deploy = best if told else DEFAULT
    given = runs[best][0]["inputs"]
    warnings = [extrapolation_warning(mine)] if told else []
    warnings.append(beyond_warning([one for some in runs.values() for one in some]))
    warnings += [f"not measured by anybody: {note}" for note in runs[best][0]["unmeasured"]]
    warnings += list(runs[best][0]["warnings"])
    if told and _asks_an_object(deploy, given):
        warnings.append(
            f"{deploy} asks the cost model that was given as an object: a server loads it from the folder that `train` "
            "or `calibrate` writes"
        )
    if told and "policy_digest" in given:
        warnings.append(f"{best} was given as an object: a server takes it by name, as python:MODULE:FACTORY")
    return Advice(
        workload=given["workload"],
        hardware=given["hardware"],
        kv_blocks=given["kv_blocks"],
        server=server_words(given["serving"], runs[best][0]["device"]),
        judge_by=judge_by,
        min_gain=min_gain,
        seeds_differ=seeds_differ,
        best=best,
        deploy=deploy,
        reason=_reason(mine, compared, told, judge_by, min_gain),
        config_line=_config_line(deploy, given, host_gib) if told else "",
        compared=compared,
        warnings=tuple(warning for warning in warnings if warning),
    )


def _compared(pairs: Pairs, policy: str, best: str, judge_by: str) -> Compared:
    mine = pairs.runs[policy]
    return Compared(
        policy=policy,
        gain=_gain(pairs, policy, DEFAULT, judge_by),
        to_best=_gain(pairs, best, policy, judge_by),
        throughput=_gain(pairs, policy, DEFAULT, "throughput"),
        e2e_p99=pairs.ratio(policy, DEFAULT, "e2e_s", "p99"),
        ttft_p99=pairs.ratio(policy, DEFAULT, "ttft_s", "p99"),
        choices=sum(one["choices"] for one in mine),
        extrapolated=sum(one["extrapolated"] for one in mine),
        figures=figures(mine),
    )


def _gain(pairs: Pairs, policy: str, other: str, judge_by: str) -> Ratio:
    """How many times better."""
    return pairs.ratio(policy, other, *JUDGED[judge_by], more_is_better=judge_by == "throughput")


def _reason(best: Compared, compared: Sequence[Compared], told: bool, judge_by: str, min_gain: float) -> str:
    base = next(one for one in compared if one.policy == DEFAULT)
    if not base.choices and not base.figures["recompute"]:
        return "nothing was preempted in any run, so every policy does the same; keep vLLM's default"
    if best.policy == DEFAULT:
        return "keep vLLM's default; in the mean of these runs no other policy did better"
    if best.gain.low is None:
        return (
            f"keep vLLM's default; one run: no interval, so that nothing tells {best.policy}, which came to "
            f"{best.gain.value:.3f} of its {judge_by}, from chance; give --parts, or --seeds where they draw requests"
        )
    if not told:
        short = "no difference" if not best.gain.told else f"less than the least gain that is worth it, {min_gain:.1%}"
        return (
            f"keep vLLM's default; the best other, {best.policy}, comes to {best.gain.text()} of its {judge_by}, "
            f"which is not told from {short}"
        )
    ties = [one.policy for one in compared if one.policy != best.policy and not one.to_best.told]
    said = f"{judge_by} {best.gain.text()} times better than vLLM's default"
    return f"{said}; not told from it: {', '.join(ties)}" if ties else said


def _config_line(policy: str, given: Mapping[str, Any], host_gib: float) -> str:
    """``given``: the inputs of its runs. Empty where the policy is an object, or asks a cost model that is one: no
    command line can name it."""
    if "policy_digest" in given or _asks_an_object(policy, given):
        return ""
    module = given.get("module", "")
    line = f"kvpolicy config --policy {shlex.quote(module or policy)}"
    line += " --allow-python-policies" if module else ""
    return line if host_gib == DEFAULT_HOST_GIB else f"{line} --host-gib {host_gib:g}"


def _asks_an_object(policy: str, given: Mapping[str, Any]) -> bool:
    model = policy.partition(":")[2].partition(",")[0]
    return "hardware_digest" in given and model == given["hardware"]
