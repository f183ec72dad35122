"""Does the attributed cost agree with what twins say?

A pair is one window in which the victim was taken, by force and with memory to spare, and its twin, in which it was
only kept out of the batch for as many steps. Their difference in time is the cost; so must be ``engine_s``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy import stats

from kvpolicy.trace import Trace
from kvpolicy_vllm.bench.states import CHECK_PREFIX

Verdict = Literal["agrees", "disagrees", "cannot tell"]

MIN_PAIRS = 10
WIDEST = 0.5
"""Of the effect: an interval wider than that cannot tell."""
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Attributed cost against twins, for one option and block size."""

    arm: str
    block_size: int
    pairs: int
    attributed_s: float
    """Mean ``engine_s``."""
    low_s: float | None
    high_s: float | None
    """95% interval of the mean of (measured difference - ``engine_s``); None with too few pairs."""
    verdict: Verdict

    def line(self) -> str:
        """For a person."""
        what = f"{self.arm}, blocks of {self.block_size}: {self.verdict} ({self.pairs} pairs"
        if self.low_s is None or self.high_s is None:
            return f"{what}; at least {MIN_PAIRS} are needed)"
        beside = f"{1e3 * self.low_s:+.2f} to {1e3 * self.high_s:+.2f} ms"
        return f"{what}; attributed {1e3 * self.attributed_s:.2f} ms, twins {beside} beside it)"


def judge(arm: str, block_size: int, measured_s: Sequence[float], attributed_s: Sequence[float]) -> SelfCheck:
    """``measured_s``: disturbed minus undisturbed, per pair."""
    pairs = len(measured_s)
    effect_s = float(np.mean(attributed_s)) if pairs else 0.0
    if pairs < MIN_PAIRS:
        return SelfCheck(arm, block_size, pairs, effect_s, None, None, "cannot tell")
    beside = np.asarray(measured_s) - np.asarray(attributed_s)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, pairs - 1) * beside.std(ddof=1) / np.sqrt(pairs))
    low_s, high_s = float(beside.mean()) - half, float(beside.mean()) + half
    verdict: Verdict = "agrees" if low_s <= 0 <= high_s else "disagrees"
    if high_s - low_s > WIDEST * abs(effect_s):
        verdict = "cannot tell"
    return SelfCheck(arm, block_size, pairs, effect_s, low_s, high_s, verdict)


def self_checks(trace: Trace) -> list[SelfCheck]:
    """Of a profile with costs attributed, by option and block size."""
    durations_s = _durations(trace)
    costs = {row["preemption_id"]: row["engine_s"] for row in trace.rows("outcomes")}
    windows: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = defaultdict(dict)
    for window in trace.rows("windows"):
        if not window["discarded"] and window["state_id"].startswith(CHECK_PREFIX):
            windows[window["core"], window["state_id"], window["repeat"]][window["arm"]] = window
    measured: dict[tuple[str, int], list[float]] = defaultdict(list)
    attributed: dict[tuple[str, int], list[float]] = defaultdict(list)
    for (core, _, _), arms in windows.items():
        block_size = trace.headers[core].block_size
        twin = arms.pop("none", None)
        for arm, window in arms.items():
            cost = costs.get(window["preemption_id"])
            if twin is None or cost is None:
                continue
            measured[arm, block_size].append(_difference(durations_s[core], window, twin))
            attributed[arm, block_size].append(cost)
    return [judge(*key, measured[key], attributed[key]) for key in sorted(measured)]


def _durations(trace: Trace) -> dict[str, dict[int, tuple[float, int]]]:
    """Duration and scheduled tokens by core and step."""
    steps = trace.table("steps").select(["core", "step", "duration_s", "scheduled_tokens"]).to_pydict()
    found: dict[str, dict[int, tuple[float, int]]] = defaultdict(dict)
    for core, step, duration_s, tokens in zip(*steps.values(), strict=True):
        found[core][step] = (duration_s, tokens)
    return found


def _difference(steps: Mapping[int, tuple[float, int]], window: Mapping[str, Any], twin: Mapping[str, Any]) -> float:
    """Seconds by which the window took longer, over as many working steps as both have: a longer tail is no cost."""
    both = [
        [steps[number] for number in range(one["first_step"], one["last_step"] + 1) if number in steps]
        for one in (window, twin)
    ]
    working = min(sum(tokens > 0 for _, tokens in one) for one in both)
    return _first(both[0], working) - _first(both[1], working)


def _first(steps: Sequence[tuple[float, int]], working: int) -> float:
    """Seconds of the steps up to the given number of working ones, idle ones in between included."""
    total_s = 0.0
    for duration_s, tokens in steps:
        if working == 0:
            break
        total_s += duration_s
        working -= tokens > 0
    return total_s
