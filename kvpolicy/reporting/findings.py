"""What the first study found, figure by figure, and whether it holds in the material at hand."""

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
"""A step that takes over twice its run's median is a spike."""
MOMENTS = 60
"""Equal parts a run is cut into."""
MANY_LEVELS = 8
"""From so many lengths on, a state's repeats are one point: they share what is particular to the state."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement of the paper, and what this material says of it."""

    figure: str
    claim: str
    evidence: Evidence
    note: str = ""

    def sentence(self) -> str:
        """For a person."""
        head = {"yes": "holds here", "no": "does not hold here", "cannot tell": "cannot be told here"}
        return f"{head[self.evidence.answer]}: {self.claim}. {self.details()}".strip()

    def details(self) -> str:
        """By how much, by what test, and what stands in the way."""
        one = self.evidence
        parts = [f"{one.why[0].upper()}{one.why[1:]}."] if one.why else []
        if one.value is not None:
            parts.append(f"{_sized(one)}. {one.test}{_p(one)}, {one.count} {one.of}.")
        return " ".join([*parts, *([self.note] if self.note else [])])

    def to_dict(self) -> dict[str, Any]:
        return {"figure": self.figure, "claim": self.claim, "note": self.note, **self.evidence.to_dict()}


def _sized(one: Evidence) -> str:
    assert one.value is not None
    if one.low is None or one.high is None:
        return f"{_figures(one.value)} {one.effect}"
    low, high = _figures(one.low), _figures(one.high)
    return f"{_figures(one.value)} {one.effect} ({one.confidence:.0%} interval {low} to {high})"


def _figures(value: float) -> str:
    """Three significant ones, written out where a person would."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def _p(one: Evidence) -> str:
    return "" if one.p is None else f", p {'below 0.0001' if one.p < 1e-4 else f'{one.p:.2g}'}"


def findings(material: Material, figure: str, rng: np.random.Generator) -> tuple[Finding, ...]:
    """Every statement of the paper about one figure, tested. Empty where :func:`missing` says why there is none."""
    if missing(material, figure):
        return ()
    about: dict[str, Callable[[Material, np.random.Generator], tuple[Finding, ...]]] = {
        BLOCK_SIZE: _block_size,
        EVICTED_TOKENS: _evicted_tokens,
        SEQUENCE_LENGTH: _sequence_length,
        MEMORY: _memory,
        TIMELINE: _timeline,
    }
    return about[figure](material, rng)


def missing(material: Material, figure: str) -> str:
    """Why these traces cannot fill a figure; empty where they can."""
    if figure not in FIGURES:
        raise ValueError(f"figure {figure}: should be one of {', '.join(FIGURES)}")
    measure = f"`kvpolicy characterize --figure {figure}` measures it"
    if figure == SEQUENCE_LENGTH:
        return "" if lengths(material) else f"no state was measured under both options; {measure}"
    if figure in (BLOCK_SIZE, EVICTED_TOKENS):
        if material.of(figure):
            return ""
        what = (
            "the same state with blocks of several sizes" if figure == BLOCK_SIZE else "overflows of several requests"
        )
        return f"these traces hold no windows of {what}; {measure}"
    if material.served(figure):
        return ""
    return f"these traces hold no requests served to their end; {measure}"


def lengths(material: Material) -> tuple[Overflow, ...]:
    """What figure sequence-length shows: windows measured for it, else all of a profile's."""
    return material.of(SEQUENCE_LENGTH) or tuple(one for one in material.of("") if one.victims == 1)


def by_arm(overflows: Sequence[Overflow]) -> dict[Kind, list[Overflow]]:
    return {kind: [one for one in overflows if one.arm == kind] for kind in KINDS}


def _sequence_length(material: Material, rng: np.random.Generator) -> tuple[Finding, ...]:
    return _growing(SEQUENCE_LENGTH, lengths(material), lambda one: one.victim_tokens, "long sequences", rng)


def _evicted_tokens(material: Material, rng: np.random.Generator) -> tuple[Finding, ...]:
    found = material.of(EVICTED_TOKENS)
    return _growing(EVICTED_TOKENS, found, lambda one: float(one.evicted_tokens), "many evicted tokens", rng)


def _growing(
    figure: str, overflows: Sequence[Overflow], x: Callable[[Overflow], float], where: str, rng: np.random.Generator
) -> tuple[Finding, ...]:
    found = []
    points = {kind: _points(some, x) for kind, some in by_arm(overflows).items()}
    for kind, some in points.items():
        of = "states" if _many(overflows) else "windows"
        told = trend([a for a, _ in some], [1e6 * b for _, b in some], True, "ms per 1000 tokens", of)
        found.append(Finding(figure, f"the cost of {kind} grows with the number of tokens", told))
    pairs = _pairs(overflows, x)
    long = pairs[len(pairs) - -(-len(pairs) // 3) :] if pairs else []
    told = cheaper([swap for _, _, swap in long], [again for _, again, _ in long], rng)
    note = "" if not long else f"The longest third: from {min(at for at, _, _ in long):.0f} tokens on."
    found.append(Finding(figure, f"swap costs less than recompute for {where}", told, note))
    gain = trend([at for at, _, _ in pairs], [1e6 * (a - b) for _, a, b in pairs], True, "ms per 1000 tokens", "pairs")
    found.append(Finding(figure, "swap's advantage grows with the number of tokens", gain))
    return tuple(found)


def _many(overflows: Sequence[Overflow]) -> bool:
    return len({one.state_id for one in overflows}) >= MANY_LEVELS


def _points(some: Sequence[Overflow], x: Callable[[Overflow], float]) -> list[tuple[float, float]]:
    """(tokens, seconds): windows, or means of states where there are many of them."""
    if not _many(some):
        return [(x(one), one.engine_s) for one in some]
    groups: dict[str, list[Overflow]] = defaultdict(list)
    for one in some:
        groups[one.state_id].append(one)
    return [(fmean(map(x, group)), fmean(one.engine_s for one in group)) for group in groups.values()]


def _pairs(overflows: Sequence[Overflow], x: Callable[[Overflow], float]) -> list[tuple[float, float, float]]:
    """(tokens, recompute's seconds, swap's seconds), ascending: by repeat, or by state where there are many."""
    many = _many(overflows)
    groups: dict[tuple[str, int], dict[Kind, list[Overflow]]] = {}
    for one in overflows:
        key = one.state_id, 0 if many else one.repeat
        groups.setdefault(key, {}).setdefault(one.arm, []).append(one)
    both = [[group[kind] for kind in KINDS] for group in groups.values() if len(group) == len(KINDS)]
    found = [
        (fmean(map(x, again + swap)), fmean(one.engine_s for one in again), fmean(one.engine_s for one in swap))
        for again, swap in both
    ]
    return sorted(found)


def _block_size(material: Material, rng: np.random.Generator) -> tuple[Finding, ...]:
    found = material.of(BLOCK_SIZE)
    again, swap = (by_arm(found)[kind] for kind in KINDS)
    doublings = [[log2(one.block_size) for one in some] for some in (again, swap)]
    level = flat(doublings[0], [one.engine_s for one in again])
    falls = trend(doublings[1], [1e3 * one.engine_s for one in swap], False, "ms per doubling of the block size")
    largest = max(one.block_size for one in found)
    pinned, pageable = (
        [one.engine_s for one in swap if one.pinned is is_pinned and one.block_size == largest]
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
    found = []
    for arm in arms_of(runs):
        mine = [run for run in runs if run.arm == arm]
        low = [run for run in mine if run.level <= FALLS_UP_TO]
        effect = "s per 10 points of memory"
        falls = trend([run.level / 10 for run in low], [run.overhead_s for run in low], False, effect, "runs")
        claim = f"the overhead of {arm} falls as memory grows up to {FALLS_UP_TO}%"
        found.append(Finding(MEMORY, claim, falls, _unattributed(mine)))
        levels: dict[int, list[float]] = defaultdict(list)
        for run in mine:
            levels[run.level].append(run.overhead_s)
        lowest = lowest_at(levels, LOWEST_AT, rng)
        found.append(Finding(MEMORY, f"the overhead of {arm} is lowest at {LOWEST_AT[0]} or {LOWEST_AT[1]}%", lowest))
    return tuple(found)


def _unattributed(runs: Sequence[ServedRun]) -> str:
    count, of = sum(run.unattributed for run in runs), sum(sum(run.preemptions.values()) for run in runs)
    return f"{count} of {of} preemptions have no cost that could be attributed." if count else ""


def arms_of(runs: Sequence[ServedRun]) -> list[str]:
    """Recompute and swap first, then what else there is."""
    arms = {run.arm for run in runs}
    return [*(kind for kind in KINDS if kind in arms), *sorted(arms - set(KINDS))]


def _timeline(material: Material, rng: np.random.Generator) -> tuple[Finding, ...]:
    runs = material.served(TIMELINE)
    found = []
    for arm in arms_of(runs):
        mine = [run for run in runs if run.arm == arm]
        slow = [spike for run in mine for spike in spikes_of(run)]
        told = coincide(slow, [one for run in mine for one in run.returning])
        claim = f"under {arm}, steps spike where waiting and preempted requests come in"
        found.append(Finding(TIMELINE, claim, told, f"Spikes: steps of over {SLOW:g} times the median."))
        if any(any(run.host_bytes) for run in mine):
            changes = [change for run in mine for change in pool_changes(run)]
            effect = "MiB of host pool per point of device KV"
            told = trend([kv for kv, _ in changes], [pool for _, pool in changes], False, effect, "moments")
            found.append(Finding(TIMELINE, f"under {arm}, the host pool fills as the device's KV cache empties", told))
    return tuple(found)


def spikes_of(run: ServedRun) -> list[bool]:
    """Of each step, whether it is a spike."""
    limit_s = SLOW * median(run.duration_s)
    return [step_s > limit_s for step_s in run.duration_s]


def pool_changes(run: ServedRun) -> list[tuple[float, float]]:
    """From moment to moment: change of the device's KV use in points, change of the host pool in MiB."""
    moments = np.linspace(0.0, run.end_s[-1], MOMENTS + 1)
    at = np.minimum(np.searchsorted(run.end_s, moments), len(run.end_s) - 1)
    return [
        (100 * (run.used_share[b] - run.used_share[a]), (run.host_bytes[b] - run.host_bytes[a]) / 2**20)
        for a, b in pairwise(at.tolist())
    ]
