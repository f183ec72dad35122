"""The statements of the first study, figure by figure, each tested on a trace's material."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log2
from statistics import fmean, median
from typing import Any

import numpy as np

from kvpolicy.events import KINDS, Kind
from kvpolicy.overflow import BLOCK_SIZE, EVICTED_TOKENS, FIGURES, MEMORY, SEQUENCE_LENGTH, TIMELINE
from kvpolicy.reporting.evidence import Evidence, cheaper, coincide, flat, lower, lowest_at, trend
from kvpolicy.reporting.measurements import Material, Overflow, ServedRun

PAPER: Mapping[str, str] = {
    BLOCK_SIZE: "recompute stays flat, swap falls as blocks grow, pinned memory beats pageable at large blocks",
    EVICTED_TOKENS: "both grow with what is evicted; swap is lower when more tokens are evicted",
    SEQUENCE_LENGTH: "both grow with sequence length; swap is better for long sequences",
    MEMORY: "overhead falls as KV memory grows up to 40%; it is lowest at 30 or 50%",
    TIMELINE: "steps spike where waiting and preempted requests come in; the host pool fills as the GPU cache empties",
}
"""Ye, Nicolae, Kougkas, Sun: A100 40 GB, vLLM 0.4.2, Yarn-Llama-2-7B-64k."""

LOWEST_AT = (30, 50)
FALLS_UP_TO = 40
SLOW = 2.0
"""A step is a spike if it takes more than this many times its run's median."""
MOMENTS = 60
"""Equal intervals that a run is cut into."""
MANY_LEVELS = 8
"""From this many states on, a state's repeats are averaged to one point: repeats of one state are not independent."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement of the paper, and the evidence for or against it in this material."""

    figure: str
    claim: str
    evidence: Evidence
    note: str = ""

    def sentence(self) -> str:
        """Verdict, claim and details in words."""
        head = {"yes": "holds here", "no": "does not hold here", "cannot tell": "undecided here"}
        return f"{head[self.evidence.answer]}: {self.claim}. {self.details()}".strip()

    def details(self) -> str:
        """Reason why it is undecided, size of the effect, test, and note."""
        evidence = self.evidence
        parts = [f"{evidence.why[0].upper()}{evidence.why[1:]}."] if evidence.why else []
        if evidence.value is not None:
            parts.append(f"{_sized(evidence)}. {evidence.test}{_p(evidence)}, {evidence.count} {evidence.of}.")
        return " ".join([*parts, *([self.note] if self.note else [])])

    def to_dict(self) -> dict[str, Any]:
        return {"figure": self.figure, "claim": self.claim, "note": self.note, **self.evidence.to_dict()}


def _sized(evidence: Evidence) -> str:
    assert evidence.value is not None
    if evidence.low is None or evidence.high is None:
        return f"{_figures(evidence.value)} {evidence.effect}"
    low, high = _figures(evidence.low), _figures(evidence.high)
    return f"{_figures(evidence.value)} {evidence.effect} ({evidence.confidence:.0%} interval {low} to {high})"


def _figures(value: float) -> str:
    """A number with three significant digits, or as a whole number from 1000 on."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def _p(evidence: Evidence) -> str:
    return "" if evidence.p is None else f", p {'below 0.0001' if evidence.p < 1e-4 else f'{evidence.p:.2g}'}"


def findings(material: Material, figure: str, rng: np.random.Generator) -> tuple[Finding, ...]:
    """Test every statement of the paper about one figure. Empty where :func:`missing` gives a reason."""
    if missing(material, figure):
        return ()
    tests: dict[str, Callable[[Material, np.random.Generator], tuple[Finding, ...]]] = {
        BLOCK_SIZE: _block_size,
        EVICTED_TOKENS: _evicted_tokens,
        SEQUENCE_LENGTH: _sequence_length,
        MEMORY: _memory,
        TIMELINE: _timeline,
    }
    return tests[figure](material, rng)


def missing(material: Material, figure: str) -> str:
    """Why these traces cannot fill a figure; empty where they can."""
    if figure not in FIGURES:
        raise ValueError(f"figure {figure}: should be one of {', '.join(FIGURES)}")
    measure = f"`kvpolicy characterize --figure {figure}` measures it"
    if figure == SEQUENCE_LENGTH:
        return "" if lengths(material) else f"no state was measured under both options; {measure}"
    if figure in (BLOCK_SIZE, EVICTED_TOKENS):
        if material.overflows_of(figure):
            return ""
        content = (
            "the same state with blocks of several sizes" if figure == BLOCK_SIZE else "overflows of several requests"
        )
        return f"these traces hold no windows of {content}; {measure}"
    if material.served(figure):
        return ""
    return f"these traces hold no requests served to their end; {measure}"


def lengths(material: Material) -> tuple[Overflow, ...]:
    """Overflows of figure sequence-length: those measured for it, else a profile's with one victim."""
    return material.overflows_of(SEQUENCE_LENGTH) or tuple(
        overflow for overflow in material.overflows_of("") if overflow.victims == 1
    )


def by_arm(overflows: Sequence[Overflow]) -> dict[Kind, list[Overflow]]:
    return {kind: [overflow for overflow in overflows if overflow.arm == kind] for kind in KINDS}


def _sequence_length(material: Material, rng: np.random.Generator) -> tuple[Finding, ...]:
    return _growing(SEQUENCE_LENGTH, lengths(material), lambda overflow: overflow.victim_tokens, "long sequences", rng)


def _evicted_tokens(material: Material, rng: np.random.Generator) -> tuple[Finding, ...]:
    overflows = material.overflows_of(EVICTED_TOKENS)
    return _growing(
        EVICTED_TOKENS, overflows, lambda overflow: float(overflow.evicted_tokens), "many evicted tokens", rng
    )


def _growing(
    figure: str, overflows: Sequence[Overflow], x: Callable[[Overflow], float], where: str, rng: np.random.Generator
) -> tuple[Finding, ...]:
    results = []
    points = {kind: _points(windows, x) for kind, windows in by_arm(overflows).items()}
    for kind, costs in points.items():
        units = "states" if _many(overflows) else "windows"
        evidence = trend([a for a, _ in costs], [1e6 * b for _, b in costs], True, "ms per 1000 tokens", units)
        results.append(Finding(figure, f"the cost of {kind} grows with the number of tokens", evidence))
    pairs = _pairs(overflows, x)
    long = pairs[len(pairs) - -(-len(pairs) // 3) :] if pairs else []
    evidence = cheaper([swap for _, _, swap in long], [recompute for _, recompute, _ in long], rng)
    note = "" if not long else f"The longest third: from {min(tokens for tokens, _, _ in long):.0f} tokens on."
    results.append(Finding(figure, f"swap costs less than recompute for {where}", evidence, note))
    gain = trend([n for n, _, _ in pairs], [1e6 * (a - b) for _, a, b in pairs], True, "ms per 1000 tokens", "pairs")
    results.append(Finding(figure, "swap's advantage grows with the number of tokens", gain))
    return tuple(results)


def _many(overflows: Sequence[Overflow]) -> bool:
    return len({overflow.state_id for overflow in overflows}) >= MANY_LEVELS


def _points(overflows: Sequence[Overflow], x: Callable[[Overflow], float]) -> list[tuple[float, float]]:
    """(tokens, seconds) of each window, or of each state's mean where there are many states."""
    if not _many(overflows):
        return [(x(overflow), overflow.engine_s) for overflow in overflows]
    groups: dict[str, list[Overflow]] = defaultdict(list)
    for overflow in overflows:
        groups[overflow.state_id].append(overflow)
    return [(fmean(map(x, group)), fmean(overflow.engine_s for overflow in group)) for group in groups.values()]


def _pairs(overflows: Sequence[Overflow], x: Callable[[Overflow], float]) -> list[tuple[float, float, float]]:
    """(tokens, recompute's seconds, swap's seconds), ascending: one per repeat, or per state where there are many."""
    many = _many(overflows)
    groups: dict[tuple[str, int], dict[Kind, list[Overflow]]] = {}
    for overflow in overflows:
        key = overflow.state_id, 0 if many else overflow.repeat
        groups.setdefault(key, {}).setdefault(overflow.arm, []).append(overflow)
    complete_groups = [[group[kind] for kind in KINDS] for group in groups.values() if len(group) == len(KINDS)]
    pairs = [
        (
            fmean(map(x, recompute + swap)),
            fmean(overflow.engine_s for overflow in recompute),
            fmean(overflow.engine_s for overflow in swap),
        )
        for recompute, swap in complete_groups
    ]
    return sorted(pairs)


def _block_size(material: Material, rng: np.random.Generator) -> tuple[Finding, ...]:
    overflows = material.overflows_of(BLOCK_SIZE)
    recompute, swap = (by_arm(overflows)[kind] for kind in KINDS)
    doublings = [[log2(overflow.block_size) for overflow in windows] for windows in (recompute, swap)]
    level = flat(doublings[0], [overflow.engine_s for overflow in recompute])
    falls = trend(
        doublings[1], [1e3 * overflow.engine_s for overflow in swap], False, "ms per doubling of the block size"
    )
    largest = max(overflow.block_size for overflow in overflows)
    pinned, pageable = (
        [overflow.engine_s for overflow in swap if overflow.pinned is is_pinned and overflow.block_size == largest]
        for is_pinned in (True, False)
    )
    beats = lower(pinned, pageable, rng)
    note = "" if pinned else "Memory can be pinned only where there is an accelerator."
    return (
        Finding(BLOCK_SIZE, "the cost of recompute is flat over block sizes", level),
        Finding(BLOCK_SIZE, "the cost of swap falls as blocks grow", falls),
        Finding(BLOCK_SIZE, f"pinned memory beats pageable at blocks of {largest}", beats, note),
    )


def _memory(material: Material, rng: np.random.Generator) -> tuple[Finding, ...]:
    runs = material.served(MEMORY)
    results = []
    for arm in arms_of(runs):
        arm_runs = [run for run in runs if run.arm == arm]
        small_runs = [run for run in arm_runs if run.level <= FALLS_UP_TO]
        effect = "s per 10 points of memory"
        falls = trend(
            [run.level / 10 for run in small_runs], [run.overhead_s for run in small_runs], False, effect, "runs"
        )
        claim = f"the overhead of {arm} falls as memory grows up to {FALLS_UP_TO}%"
        results.append(Finding(MEMORY, claim, falls, _unattributed(arm_runs)))
        levels: dict[int, list[float]] = defaultdict(list)
        for run in arm_runs:
            levels[run.level].append(run.overhead_s)
        lowest = lowest_at(levels, LOWEST_AT, rng)
        results.append(Finding(MEMORY, f"the overhead of {arm} is lowest at {LOWEST_AT[0]} or {LOWEST_AT[1]}%", lowest))
    return tuple(results)


def _unattributed(runs: Sequence[ServedRun]) -> str:
    count, total = sum(run.unattributed for run in runs), sum(sum(run.preemptions.values()) for run in runs)
    return f"{count} of {total} preemptions have no cost that could be attributed." if count else ""


def arms_of(runs: Sequence[ServedRun]) -> list[str]:
    """Arms of the runs: recompute and swap first, then the others by name."""
    arms = {run.arm for run in runs}
    return [*(kind for kind in KINDS if kind in arms), *sorted(arms - set(KINDS))]


def _timeline(material: Material, rng: np.random.Generator) -> tuple[Finding, ...]:
    runs = material.served(TIMELINE)
    results = []
    for arm in arms_of(runs):
        arm_runs = [run for run in runs if run.arm == arm]
        spikes = [spike for run in arm_runs for spike in spikes_of(run)]
        evidence = coincide(spikes, [step for run in arm_runs for step in run.returning])
        claim = f"under {arm}, steps spike where waiting and preempted requests come in"
        results.append(Finding(TIMELINE, claim, evidence, f"Spikes: steps of over {SLOW:g} times the median."))
        if any(any(run.host_bytes) for run in arm_runs):
            changes = [change for run in arm_runs for change in pool_changes(run)]
            effect = "MiB of host pool per point of device KV"
            evidence = trend([kv for kv, _ in changes], [pool for _, pool in changes], False, effect, "moments")
            results.append(
                Finding(TIMELINE, f"under {arm}, the host pool fills as the device's KV cache empties", evidence)
            )
    return tuple(results)


def spikes_of(run: ServedRun) -> list[bool]:
    """Whether each step is a spike."""
    limit_s = SLOW * median(run.duration_s)
    return [step_s > limit_s for step_s in run.duration_s]


def pool_changes(run: ServedRun) -> list[tuple[float, float]]:
    """Changes per interval: the device's KV use in percentage points, the host pool in MiB."""
    moments = np.linspace(0.0, run.end_s[-1], MOMENTS + 1)
    steps = np.minimum(np.searchsorted(run.end_s, moments), len(run.end_s) - 1)
    return [
        (100 * (run.used_share[b] - run.used_share[a]), (run.host_bytes[b] - run.host_bytes[a]) / 2**20)
        for a, b in pairwise(steps.tolist())
    ]
