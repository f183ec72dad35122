"""What to deploy: the user's own workload on the user's hardware under every policy, compared run by run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvpolicy.study.advice import DEFAULT, JUDGED, Advice, Compared, extrapolation_warning, gains
from kvpolicy.study.cells import DEFAULT_HOST_GIB
from kvpolicy.study.grid import Progress, simulate
from kvpolicy.study.kept import Result
from kvpolicy.study.machine import open_machine
from kvpolicy.study.opening import opened
from kvpolicy.study.paired import Ratio, paired_ratio
from kvpolicy.study.report import figures
from kvpolicy.study.running import NATIVE, seeded, workload_digest
from kvpolicy.workload import Source

SHARES = (0.25, 0.5, 0.75, 0.9)
"""Of requests that are shorter in all: where thresholds are tried."""


def recommend(
    workload: str,
    hardware: str,
    kv_blocks: int,
    policies: Sequence[str] = (),
    link: str = NATIVE,
    engine: str = "builtin",
    block_size: int = 16,
    host_gib: float = DEFAULT_HOST_GIB,
    token_budget: int = 8192,
    max_num_seqs: int = 256,
    prefix_caching: bool = True,
    scheduling: str = "fcfs",
    asynchronous: bool = False,
    seeds: int = 1,
    parts: int = 8,
    judge_by: str = "e2e",
    jobs: int | None = None,
    ray: str | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Advice:
    """Simulate ``workload`` under vLLM's own behaviour, the named policies and ``policies``, and say which to deploy.

    Each of ``parts`` of the workload under each of ``seeds`` is one pair of a comparison; there should be two at
    least, and more tell more. ``judge_by``: ``e2e``, ``ttft`` or ``itl`` (mean seconds), or ``throughput``. Raises
    ValueError as :func:`kvpolicy.study.simulate`, and where a cell fails.
    """
    if judge_by not in JUDGED:
        raise ValueError(f"judge_by is {judge_by!r}: should be one of {', '.join(JUDGED)}")
    if seeds * parts < 2:
        raise ValueError(f"{seeds} seeds x {parts} parts is one run: nothing tells a difference from chance; give more")
    machine = open_machine(hardware)
    tried = candidates(opened(seeded(workload, 0), workload_digest(workload)), machine.own_model, block_size, policies)
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
    return advise(runs, judge_by, host_gib)


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


def advise(runs: Mapping[str, Sequence[Result]], judge_by: str, host_gib: float) -> Advice:
    """What follows from the runs: by policy, in the same order of seeds and parts for each.

    The most favourable of several comparisons is looked for, so all intervals hold together (Bonferroni).
    """
    best = max(runs, key=lambda policy: _ratio(runs, policy, DEFAULT, judge_by).value)
    compared = tuple(_compared(runs, policy, best, judge_by) for policy in runs)
    mine = next(one for one in compared if one.policy == best)
    told = mine.gain.told and mine.gain.value > 1
    deploy = best if told else DEFAULT
    given = runs[best][0]["inputs"]
    warnings = [extrapolation_warning(mine)] if told else []
    warnings += [f"not measured by anybody: {note}" for note in runs[best][0]["unmeasured"]]
    warnings += list(runs[best][0]["warnings"])
    return Advice(
        workload=given["workload"],
        hardware=given["hardware"],
        kv_blocks=given["kv_blocks"],
        judge_by=judge_by,
        best=best,
        deploy=deploy,
        reason=_reason(mine, compared, told, judge_by),
        config_line=_config_line(deploy, host_gib) if told else "",
        compared=compared,
        warnings=tuple(warning for warning in warnings if warning),
    )


def _compared(runs: Mapping[str, Sequence[Result]], policy: str, best: str, judge_by: str) -> Compared:
    mine, base = runs[policy], runs[DEFAULT]
    many = max(1, len(runs) - 1)

    def over(name: str) -> Ratio:
        return paired_ratio([one[name]["p99"] for one in mine], [one[name]["p99"] for one in base], comparisons=many)

    return Compared(
        policy=policy,
        gain=_ratio(runs, policy, DEFAULT, judge_by),
        to_best=_ratio(runs, best, policy, judge_by),
        throughput=_ratio(runs, policy, DEFAULT, "throughput"),
        e2e_p99=over("e2e_s"),
        ttft_p99=over("ttft_s"),
        choices=sum(one["choices"] for one in mine),
        extrapolated=sum(one["extrapolated"] for one in mine),
        figures=figures(mine),
    )


def _ratio(runs: Mapping[str, Sequence[Result]], policy: str, other: str, judge_by: str) -> Ratio:
    return paired_ratio(gains(runs[policy], judge_by), gains(runs[other], judge_by), comparisons=max(1, len(runs) - 1))


def _reason(best: Compared, compared: Sequence[Compared], told: bool, judge_by: str) -> str:
    base = next(one for one in compared if one.policy == DEFAULT)
    if not base.choices and not base.figures["recompute"]:
        return "nothing was preempted in any run, so every policy does the same; keep vLLM's default"
    if best.policy == DEFAULT:
        return "keep vLLM's default; in the mean of these runs no other policy did better"
    if not told:
        return (
            f"keep vLLM's default; the best other, {best.policy}, comes to {best.gain.text()} of its {judge_by}, "
            "which is not told from no difference"
        )
    ties = [one.policy for one in compared if one.policy != best.policy and not one.to_best.told]
    said = f"{judge_by} {best.gain.text()} times better than vLLM's default"
    return f"{said}; not told from it: {', '.join(ties)}" if ties else said


def _config_line(policy: str, host_gib: float) -> str:
    line = f"kvpolicy config --policy {shlex.quote(policy)}"
    return line if host_gib == DEFAULT_HOST_GIB else f"{line} --host-gib {host_gib:g}"
