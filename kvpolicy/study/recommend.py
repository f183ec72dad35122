"""What to deploy: the user's own workload on the user's hardware under every policy, compared run by run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from kvpolicy.study.advice import DEFAULT, JUDGED, Advice, Compared, extrapolation_warning, figure_of
from kvpolicy.study.cells import DEFAULT_HOST_GIB
from kvpolicy.study.grid import Progress, simulate
from kvpolicy.study.kept import Result
from kvpolicy.study.machine import open_machine
from kvpolicy.study.opening import opened
from kvpolicy.study.paired import Ratio, geometric_means, paired_ratio
from kvpolicy.study.report import beyond_warning, figures, server_words
from kvpolicy.study.running import NATIVE, seeded, workload_digest
from kvpolicy.workload import Source

SHARES = (0.25, 0.5, 0.75, 0.9)
"""Of requests that are shorter in all: where thresholds are tried."""
LEAST_GAIN = 0.01
"""Share by which a policy has to be better for it to be worth a change."""
FEWER_USERS = (
    "a closed loop in parts: each has its share of the users and so of the load; with --parts 1 and --seeds all of "
    "them are there, where the seed draws their sessions"
)
INTERVALS = 4
"""That are shown per policy: what it is judged by, throughput and two tails."""


def recommend(
    workload: str,
    hardware: str,
    kv_blocks: int,
    policies: Sequence[str] = (),
    link: str = NATIVE,
    engine: str = "builtin",
    block_size: int = 16,
    host_gib: float = DEFAULT_HOST_GIB,
    token_budget: int | None = None,
    max_num_seqs: int | None = None,
    prefix_caching: bool = True,
    scheduling: str = "fcfs",
    asynchronous: bool | None = None,
    watermark: float = 0.0,
    seeds: int = 1,
    parts: int = 8,
    judge_by: str = "e2e",
    least_gain: float = LEAST_GAIN,
    jobs: int | None = None,
    ray: str | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Advice:
    """Simulate ``workload`` under vLLM's own behaviour, the named policies and ``policies``, and say which to deploy.

    Each of ``parts`` of the workload is one pair of a comparison, and so it is anew under each of ``seeds`` where the
    seed draws the requests; where it does not, as of a recorded file, seeds are averaged. One pair tells nothing from
    chance. ``judge_by``: ``e2e``, ``ttft`` or ``itl`` (mean seconds), or ``throughput``. ``least_gain``: a policy that
    is not better by more than this share, with all of its interval, is not worth a change. Raises ValueError as
    :func:`kvpolicy.study.simulate`, and where a cell fails.
    """
    if judge_by not in JUDGED:
        raise ValueError(f"judge_by is {judge_by!r}: should be one of {', '.join(JUDGED)}")
    if not 0 <= least_gain < float("inf"):
        raise ValueError(f"least_gain is {least_gain}: should be a share, 0 or above, as 0.01")
    machine = open_machine(hardware)
    source = opened(seeded(workload, 0), workload_digest(workload))
    tried = candidates(source, machine.own_model, block_size, policies)
    report = simulate(
        workloads=[workload],
        policies=tried,
        kv_blocks=[kv_blocks],
        hardware=hardware,
        links=[link],
        engine=engine,
        block_size=block_size,
        host_gib=host_gib,
        token_budget=token_budget,
        max_num_seqs=max_num_seqs,
        prefix_caching=prefix_caching,
        scheduling=scheduling,
        asynchronous=asynchronous,
        watermark=watermark,
        seeds=seeds,
        parts=parts,
        jobs=jobs,
        ray=ray,
        cache=cache,
        progress=progress,
    )
    if report.failed:
        raise ValueError(f"{len(report.failed)} cells failed, the first: {report.failed[0].text()}")
    runs = {policy: [one for one in report.results if one["inputs"]["policy"] == policy] for policy in tried}
    found = advise(runs, judge_by, host_gib, least_gain, seeds == 1 or drawn(workload))
    if parts > 1 and closed(source):
        return replace(found, warnings=(*found.warnings, FEWER_USERS))
    return found


def closed(source: Source) -> bool:
    """Whether it is a loop of users who are all there from the beginning: a part of it has fewer of them at a time."""
    starts = {request.session: request.arrival_s for request in reversed(list(source))}
    thinks = any(request.think_s is not None for request in source)
    return thinks and len(starts) > 1 and len(set(starts.values())) == 1


def drawn(workload: str) -> bool:
    """Whether two seeds give other requests; not so of a file that is replayed as it was recorded."""
    digest = workload_digest(workload)
    pairs = zip_longest(*(opened(seeded(workload, seed), digest) for seed in (0, 1)))
    return any(one != other for one, other in pairs)


def candidates(source: Source, own_model: str | None, block_size: int, more: Sequence[str] = ()) -> list[str]:
    """The policies that are tried: the fixed ones, thresholds between short and long requests, and, where the
    hardware has a cost model of its own, those that ask it. Each once. Raises ValueError for an empty workload."""
    totals = sorted(request.total_tokens for request in source)
    if not totals:
        raise ValueError(f"workload {source.name} holds no request")
    lengths = (totals[int(share * (len(totals) - 1))] for share in SHARES)
    thresholds = (f"threshold:{max(1, round(tokens / block_size)) * block_size}" for tokens in lengths)
    asking = () if own_model is None else (f"minwaste:{own_model}", f"cheapest:{own_model}")
    return list(dict.fromkeys((DEFAULT, "always-swap", *thresholds, *asking, *more)))


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
    judge_by: str,
    host_gib: float,
    least_gain: float = LEAST_GAIN,
    seeds_differ: bool = True,
) -> Advice:
    """What follows from the runs; see :class:`Pairs`. A change is advised where the whole interval of the gain lies
    above ``1 + least_gain``."""
    pairs = Pairs(runs, seeds_differ)
    best = max(runs, key=lambda policy: _gain(pairs, policy, DEFAULT, judge_by).value)
    compared = tuple(_compared(pairs, policy, best, judge_by) for policy in runs)
    mine = next(one for one in compared if one.policy == best)
    told = mine.gain.low is not None and mine.gain.low > 1.0 + least_gain
    deploy = best if told else DEFAULT
    given = runs[best][0]["inputs"]
    warnings = [extrapolation_warning(mine)] if told else []
    warnings.append(beyond_warning([one for some in runs.values() for one in some]))
    warnings += [f"not measured by anybody: {note}" for note in runs[best][0]["unmeasured"]]
    warnings += list(runs[best][0]["warnings"])
    return Advice(
        workload=given["workload"],
        hardware=given["hardware"],
        kv_blocks=given["kv_blocks"],
        server=server_words(given["serving"]),
        judge_by=judge_by,
        least_gain=least_gain,
        seeds_differ=seeds_differ,
        best=best,
        deploy=deploy,
        reason=_reason(mine, compared, told, judge_by, least_gain),
        config_line=_config_line(deploy, host_gib) if told else "",
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


def _reason(best: Compared, compared: Sequence[Compared], told: bool, judge_by: str, least_gain: float) -> str:
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
        short = (
            "no difference" if not best.gain.told else f"less than the least gain that is worth it, {least_gain:.1%}"
        )
        return (
            f"keep vLLM's default; the best other, {best.policy}, comes to {best.gain.text()} of its {judge_by}, "
            f"which is not told from {short}"
        )
    ties = [one.policy for one in compared if one.policy != best.policy and not one.to_best.told]
    said = f"{judge_by} {best.gain.text()} times better than vLLM's default"
    return f"{said}; not told from it: {', '.join(ties)}" if ties else said


def _config_line(policy: str, host_gib: float) -> str:
    line = f"kvpolicy config --policy {shlex.quote(policy)}"
    return line if host_gib == DEFAULT_HOST_GIB else f"{line} --host-gib {host_gib:g}"
