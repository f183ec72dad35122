"""Advice on what to deploy: the user's workload on the user's hardware under every policy, compared run by run.

Two policies are compared on the same runs by the ratio of their figures, with an interval over the pairs of runs. The
advice says which policy to deploy, and how much better than always-recompute it was: vLLM's default, unless an order of
service is given, which then holds for every policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from statistics import fmean
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy.extensions import FORM
from kvpolicy.fields import WrongValue, refuse_non_integer, refuse_other, refuse_single
from kvpolicy.hardware.link import NATIVE
from kvpolicy.headroom import Headroom
from kvpolicy.latency import Slo
from kvpolicy.policy import Policy, spec_lines, specs_by_label
from kvpolicy.stats import CONFIDENCE, Ratio, geometric_means, student_ratio
from kvpolicy.study.cache import Result
from kvpolicy.study.class_report import class_warnings, service_means
from kvpolicy.study.config import Criterion, Run, Serving
from kvpolicy.study.contender import contender_of
from kvpolicy.study.figure import Figure
from kvpolicy.study.grid import simulate
from kvpolicy.study.inputs import HardwareObject, workload_named
from kvpolicy.study.machine import open_machine
from kvpolicy.study.report import (
    aligned,
    beyond_warning,
    class_table,
    figure_text,
    figures,
    mean_headroom,
    server_words,
)
from kvpolicy.study.run_cell import ORACLE, granted, source_named
from kvpolicy.study.server_flags import DEFAULT, FCFS, baseline_words, config_line, order_of, uses_model_object
from kvpolicy.study.workload_parts import Part
from kvpolicy.workload import DEFAULT_CLASS, Source, Workload


@dataclass(frozen=True, slots=True)
class Compared:
    """A policy compared with always-recompute over the same runs, under the same order of service."""

    policy: str
    gain: Ratio
    """How many times better than always-recompute, by the criterion; above 1 is better."""
    to_best: Ratio
    """How many times better the best policy was than this one."""
    throughput: Ratio
    e2e_p99: Ratio
    ttft_p99: Ratio
    choices: int
    """Preemptions at which swap was feasible, in all runs."""
    extrapolated: int
    figures: Mapping[str, float | None]
    service: Mapping[str, Any] = field(default_factory=dict)
    """Latencies, fairness and goodput, of all requests and under ``classes``: means over the runs, in the shape that
    they have in one."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Which policy to deploy, and why."""

    workload: str
    hardware: str
    kv_blocks: int
    server: str
    """The server's limits, in words."""
    judge_by: str
    min_gain: float
    """The gain, as a share, from which on a change is worth it."""
    seeds_differ: bool
    """Whether every seed of a part is a separate pair; else all its seeds together are one."""
    best: str
    """The policy with the highest mean gain, of those significantly better by ``min_gain``, or of all without such."""
    deploy: str
    """``best``, where it is significantly better by more than ``min_gain``; else ``always-recompute``."""
    reason: str
    config_line: str
    """The command that prints the server's flags; empty where stock vLLM is to be left as it is."""
    compared: tuple[Compared, ...]
    warnings: tuple[str, ...]
    whole: str = ""
    """Figures of the workload as one run; empty where there is only one part."""
    headroom: Headroom | None = None
    """What there was to win in the runs under always-recompute; None where they do not say."""
    by_class: tuple[str, ...] = ()
    """Lines of a table by class; none where it would say no more than that of all requests."""
    specs: Mapping[str, str] = field(default_factory=dict)
    """By label, what was given where the label does not say it; see :func:`kvpolicy.policy.specs_by_label`."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON: the service of each policy stands beside its other figures, as in a cell."""
        values = asdict(self)
        del values["by_class"]
        for comparison in values["compared"]:
            comparison |= comparison.pop("service")
        return values

    def text(self) -> str:
        pairs = self.compared[0].gain.pairs
        rows = [["policy", f"{self.judge_by} gain", "throughput", "e2e p99", "ttft p99", *COST_COLUMNS]]
        for comparison in self.compared:
            ratios = (comparison.gain, comparison.throughput, comparison.e2e_p99, comparison.ttft_p99)
            shown = (figure_text(name, comparison.figures) for name in COST_COLUMNS)
            rows.append([comparison.policy, *(ratio.text() for ratio in ratios), *shown])
        seeds_note = (
            "" if self.seeds_differ else "; seeds do not change the requests, so that the runs of a part count as one"
        )
        lines = [
            f"{self.workload} on {self.hardware}, {self.kv_blocks} KV blocks: {pairs} pairs of runs per policy"
            f"{seeds_note}",
            f"ratios to {DEFAULT}: better is a {self.judge_by} gain above 1, a throughput above 1, a p99 below 1",
            f"server: {self.server}",
            f"intervals: {CONFIDENCE:.0%}, simultaneous; a change is recommended where the whole interval of the gain "
            f"lies above {1.0 + self.min_gain:g}",
            *aligned(rows),
            *self.by_class,
            *spec_lines(self.specs),
            "",
            *([] if self.headroom is None else [f"under {DEFAULT}, {self.headroom.sentence()}"]),
            f"deploy this: {self.deploy}: {self.reason}",
        ]
        if self.config_line:
            lines.append(f"  {self.config_line}")
        if self.whole:
            lines.append(f"the whole workload as one run, without an interval: {self.whole}")
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])


COST_COLUMNS = ("e2e s", "recompute", "swap", "repeated tok")


def extrapolation_warning(comparison: Compared) -> str | None:
    """A warning about decisions in which the policy's cost model extrapolated; None without such decisions."""
    if not comparison.extrapolated:
        return None
    share = comparison.extrapolated / comparison.choices
    return (
        f"{comparison.policy}: its cost model extrapolated beyond its training range in "
        f"{comparison.extrapolated} of {comparison.choices} decisions ({share:.0%}); "
        "`kvpolicy profile` and `kvpolicy train` on the serving machine cover these cases"
    )


THRESHOLD_LEVELS = (0.25, 0.5, 0.75, 0.9)
"""Quantile levels of the requests' total lengths at which thresholds are tried."""
FEWER_USERS = (
    "a closed loop in parts: each part has only a share of the users and of the load; --parts 1 keeps them together, "
    "with --seeds for several runs where sessions depend on the seed"
)
UNLIMITED = (
    "these runs granted every request the class and the deadlines of the workload; a server grants only what --classes "
    "lists, and without it every request is of the class default, without deadlines: give --classes here too"
)
MAX_UNLIKE = 1.2
"""Factor by which the whole workload may differ from the mean of its parts without a warning."""
INTERVALS_PER_POLICY = 4
"""Intervals shown per policy: the criterion, throughput and two tails."""


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
    """Simulate ``workload`` under always-recompute, the usual policies and ``policies``, and say which to deploy.

    The order of service, the classes and the limits of ``serving`` hold for all of them; without an order,
    always-recompute is vLLM's own behaviour.

    ``workload``, ``hardware`` and ``policies`` are names or objects, as for :func:`simulate`.

    Each part of the workload is one pair of a comparison, under each seed a separate one where the seed draws the
    requests; where it does not, as for a recorded file, seeds are averaged. A single pair gives no interval and so no
    significant result. Raises KVPolicyError as :func:`kvpolicy.simulate` does, and where a cell fails.
    """
    refuse_non_integer("kv_blocks", kv_blocks)
    refuse_single(policies=policies)
    refuse_other("link", link, str, "a text, as in native")
    by_label = {contender_of(policy, f"policies[{number}]").label: policy for number, policy in enumerate(policies)}
    refuse_other("serving", serving, Serving, "a Serving")
    refuse_other("run", run, Run, "a Run")
    refuse_other("criterion", criterion, Criterion, "a Criterion")
    machine = open_machine(hardware)
    source = granted(source_named(workload_named(workload), 0), serving)
    figure = Figure.parse(criterion.judge_by)
    _refuse_unjudgeable(source, figure, run.slo)
    for part in range(run.parts if run.parts > 1 and (figure.class_name or figure.needs_deadlines) else 0):
        _refuse_unjudgeable(Part(source, part, run.parts), figure, run.slo)
    defaults = candidates(source, machine.own_model, serving.block_size)
    by_label = {**{contender_of(candidate).label: candidate for candidate in defaults}, **by_label}

    def results_of(policies: Sequence[str | Policy], run: Run) -> Sequence[Result]:
        report = simulate([workload], policies, [kv_blocks], hardware, [link], serving, run)
        if report.failed:
            raise InputError(f"{len(report.failed)} cells failed, the first: {report.failed[0].text()}")
        return report.results

    results = results_of(list(by_label.values()), run)
    runs = {policy: [result for result in results if result["inputs"]["policy"] == policy] for policy in by_label}
    host_gib = serving.host_gib_of(machine.block_bytes(serving.block_size))
    advice = advise(runs, criterion, host_gib, run.seeds == 1 or depends_on_seed(workload))
    specs = specs_by_label(list(by_label.values()), list(by_label))
    advice = replace(advice, headroom=mean_headroom(runs[DEFAULT]), specs=specs)
    if run.parts > 1 and is_closed_loop(source):
        advice = replace(advice, warnings=(*advice.warnings, FEWER_USERS))
    if advice.config_line and serving.order != FCFS and serving.classes is None and says_what_it_is(source):
        advice = replace(advice, warnings=(*advice.warnings, UNLIMITED))
    if run.parts == 1:
        return advice
    whole = results_of([DEFAULT, by_label[advice.best]], replace(run, seeds=1, parts=1))
    whole_text, warning = whole_run_summary(whole, runs[DEFAULT], criterion.judge_by)
    return replace(advice, whole=whole_text, warnings=(*advice.warnings, *([warning] if warning else [])))


def _refuse_unjudgeable(source: Source, figure: Figure, slo: Slo | None) -> None:
    """Raise WrongValue for a figure that no run of this workload, or of this part of one, can have, before any is
    simulated."""
    classes = sorted({request.class_name for request in source})
    if figure.class_name and figure.class_name not in classes:
        fewer = "; give fewer parts" if isinstance(source, Part) else ""
        raise WrongValue("judge_by", f"is {figure.text}; the classes of {source.name} are {', '.join(classes)}{fewer}")
    of_class = (request for request in source if figure.class_name in ("", request.class_name))
    if figure.needs_deadlines and slo is None and all(one.ttft_s is one.tpot_s is None for one in of_class):
        where = f" in {source.name}" if isinstance(source, Part) else ""
        raise WrongValue(
            "judge_by", f"is {figure.text}, but no request{where} has a deadline: give slo, as ttft=1,tpot=0.05"
        )


def whole_run_summary(whole: Sequence[Result], parts: Sequence[Result], judge_by: str) -> tuple[str, str]:
    """Figures of the workload as one run, under the default and the best policy; and a warning where its parts differ
    from it, else an empty text. With one run each there is no interval."""
    figure = Figure.parse(judge_by)
    default, best = whole[0], whole[-1]
    default_value, best_value, unit = figure.of(default), figure.of(best), figure.unit
    gain = best_value / default_value if figure.more_is_better else default_value / best_value
    preempted = sum(default["preemptions"].values())
    summary = f"{DEFAULT} {default_value:.4g} {unit}, {preempted} preemptions"
    if best["inputs"]["policy"] != DEFAULT:
        summary += f"; {best['inputs']['policy']} {best_value:.4g} {unit}, {gain:.3f} times better"
    part_mean = fmean(figure.of(result) for result in parts)
    if 1 / MAX_UNLIKE <= default_value / part_mean <= MAX_UNLIKE:
        return summary, ""
    return summary, (
        f"under {DEFAULT} the whole workload takes {default_value:.4g} {unit} in one run, and {part_mean:.4g} "
        f"{unit} in parts: every part begins with an empty server, so the intervals hold for shorter runs under less "
        "load; fewer --parts are closer to one run"
    )


def is_closed_loop(source: Source) -> bool:
    """Whether it is a closed loop of users who all begin together: each of its parts then has fewer users."""
    starts = {request.session: request.arrival_s for request in reversed(list(source))}
    thinks = any(request.think_s is not None for request in source)
    return thinks and len(starts) > 1 and len(set(starts.values())) == 1


def says_what_it_is(source: Source) -> bool:
    """Whether any request claims a class or a deadline."""
    return any(
        request.class_name != DEFAULT_CLASS or request.ttft_s is not None or request.tpot_s is not None
        for request in source
    )


def depends_on_seed(workload: str | Workload) -> bool:
    """Whether requests depend on the seed; not so for a recorded file or an object."""
    named = workload_named(workload)
    pairs = zip_longest(*(source_named(named, seed) for seed in (0, 1)))
    return any(first != second for first, second in pairs)


def candidates(source: Source, own_model: str | None, block_size: int) -> list[str]:
    """The policies that are always tried, each once: the fixed ones, thresholds between short and long requests, and,
    where the hardware has a cost model, those that use it. Raises InputError for an empty workload."""
    totals = sorted(request.total_tokens for request in source)
    if not totals:
        raise InputError(f"workload {source.name} holds no request")
    lengths = (totals[int(share * (len(totals) - 1))] for share in THRESHOLD_LEVELS)
    thresholds = (f"threshold:{max(1, round(tokens / block_size)) * block_size}" for tokens in lengths)
    model_policies = () if own_model is None else (f"minwaste:{own_model}", f"cheapest:{own_model}")
    return list(dict.fromkeys((DEFAULT, "always-swap", *thresholds, *model_policies)))


@dataclass(frozen=True, slots=True)
class Pairs:
    """Runs by policy, each in the same order of seeds and parts, and how they form pairs."""

    runs: Mapping[str, Sequence[Result]]
    seeds_differ: bool
    """Whether seeds give different requests; else the runs of a part form one pair by their geometric mean."""

    def ratio(self, policy: str, other: str, figure: str) -> Ratio:
        """Ratio of two policies by a figure. Intervals are wide enough for all that are shown to hold at once
        (Bonferroni), since the most favourable is picked."""
        values, other_values = (self._values(one, Figure.parse(figure)) for one in (policy, other))
        return student_ratio(values, other_values, comparisons=INTERVALS_PER_POLICY * max(1, len(self.runs) - 1))

    def gain(self, policy: str, other: str, figure: str) -> Ratio:
        """How many times better a policy is than another by a figure."""
        pair = (policy, other) if Figure.parse(figure).more_is_better else (other, policy)
        return self.ratio(*pair, figure)

    def _values(self, policy: str, figure: Figure) -> list[float]:
        values = [figure.of(result) for result in self.runs[policy]]
        if self.seeds_differ:
            return values
        return geometric_means(values, [result["inputs"]["part"] for result in self.runs[policy]])


def advise(
    runs: Mapping[str, Sequence[Result]],
    criterion: Criterion,
    host_gib: float,
    seeds_differ: bool = True,
) -> Advice:
    """Advice from these runs; see :class:`Pairs`. A change is advised where the whole interval of a gain lies above
    ``1 + min_gain``, to the policy with the highest mean gain of those. The oracle, which no server can run, is only
    shown."""
    judge_by, min_gain = criterion.judge_by, criterion.min_gain
    pairs = Pairs(runs, seeds_differ)
    gains = {policy: pairs.gain(policy, DEFAULT, judge_by) for policy in runs if policy != ORACLE}
    significant = [policy for policy, gain in gains.items() if gain.low is not None and gain.low > 1.0 + min_gain]
    best = max(significant or gains, key=lambda policy: gains[policy].value)
    compared = tuple(_compared(pairs, policy, best, judge_by) for policy in runs)
    best_comparison = next(comparison for comparison in compared if comparison.policy == best)
    change = best_comparison.gain.low is not None and best_comparison.gain.low > 1.0 + min_gain
    deploy = best if change else DEFAULT
    inputs, deployed = runs[best][0]["inputs"], runs[deploy][0]["inputs"]
    warnings = [extrapolation_warning(best_comparison)] if change else []
    warnings.append(beyond_warning([result for results in runs.values() for result in results]))
    warnings += [f"not measured: {note}" for note in runs[best][0]["unmeasured"]]
    warnings += list(runs[best][0]["warnings"])
    warnings += class_warnings([result for results in runs.values() for result in results])
    if change and uses_model_object(deploy, inputs):
        warnings.append(
            f"{deploy} uses the cost model that was given as an object: a server loads it from the folder that `train` "
            "or `calibrate` writes"
        )
    if change and "policy_digest" in inputs:
        warnings.append(f"{best} was given as an object: a server takes it by name, as python:MODULE:FACTORY")
    if "order_digest" in deployed["serving"]:
        warnings.append(f"the order {order_of(deployed)} was given as an object: a server takes it by name, as {FORM}")
    return Advice(
        workload=inputs["workload"],
        hardware=inputs["hardware"],
        kv_blocks=inputs["kv_blocks"],
        server=server_words(inputs["serving"], runs[best][0]["device"]),
        judge_by=judge_by,
        min_gain=min_gain,
        seeds_differ=seeds_differ,
        best=best,
        deploy=deploy,
        reason=_reason(best_comparison, compared, change, judge_by, min_gain, baseline_words(inputs)),
        config_line=config_line(deploy, deployed, host_gib) if change or order_of(deployed) != FCFS else "",
        compared=compared,
        warnings=tuple(warning for warning in warnings if warning),
        by_class=tuple(class_table(runs)),
    )


def _compared(pairs: Pairs, policy: str, best: str, judge_by: str) -> Compared:
    results = pairs.runs[policy]
    return Compared(
        policy=policy,
        gain=pairs.gain(policy, DEFAULT, judge_by),
        to_best=pairs.gain(best, policy, judge_by),
        throughput=pairs.gain(policy, DEFAULT, "throughput"),
        e2e_p99=pairs.ratio(policy, DEFAULT, "e2e.p99"),
        ttft_p99=pairs.ratio(policy, DEFAULT, "ttft.p99"),
        choices=sum(result["choices"] for result in results),
        extrapolated=sum(result["extrapolated"] for result in results),
        figures=figures(results),
        service=service_means(results),
    )


def _reason(
    best: Compared, compared: Sequence[Compared], change: bool, judge_by: str, min_gain: float, baseline: str
) -> str:
    base = next(comparison for comparison in compared if comparison.policy == DEFAULT)
    if not base.choices and not base.figures["recompute"]:
        return f"nothing was preempted in any run, so every policy does the same; keep {baseline}"
    if best.policy == DEFAULT:
        return f"keep {baseline}; no other policy had a better mean in these runs"
    if best.gain.low is None:
        return (
            f"keep {baseline}; with one run there is no interval, so that the gain of {best.policy}, "
            f"{best.gain.value:.3f} times better by {judge_by}, may be chance; "
            "set --parts, or --seeds where the requests depend on the seed"
        )
    if not change:
        claim = "" if not best.gain.significant else f" above the smallest gain worth a change, {min_gain:.1%}"
        return (
            f"keep {baseline}; the best other policy, {best.policy}, is {best.gain.text()} times better by "
            f"{judge_by}, but not significantly{claim}"
        )
    ties = [
        comparison.policy
        for comparison in compared
        if comparison.policy != best.policy and not comparison.to_best.significant
    ]
    text = f"{judge_by} {best.gain.text()} times better than {baseline}"
    return f"{text}; not significantly different: {', '.join(ties)}" if ties else text
