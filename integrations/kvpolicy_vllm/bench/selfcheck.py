"""The self-check of a profile: compares attributed costs with measured differences.

A pair is a window in which the victim was preempted by force, with memory to spare, and its control window (twin), in
which it was only paused for as many steps. The difference of their durations is the cost, which the attributed
``engine_s`` should equal.
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
MAX_RELATIVE_WIDTH = 0.5
"""As a share of the effect: with a wider interval the verdict is "cannot tell"."""
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Attributed costs compared with control windows, for one option and block size."""

    arm: str
    block_size: int
    pairs: int
    attributed_s: float
    """Mean ``engine_s``."""
    low_s: float | None
    high_s: float | None
    """95% interval of the mean of (measured difference - ``engine_s``), low_s to high_s; None with too few pairs."""
    verdict: Verdict

    def line(self) -> str:
        """The result in words."""
        verdict = "undecided" if self.verdict == "cannot tell" else self.verdict
        head = f"{self.arm}, blocks of {self.block_size}: {verdict} ({self.pairs} pairs"
        if self.low_s is None or self.high_s is None:
            return f"{head}; at least {MIN_PAIRS} are needed)"
        interval = f"{1e3 * self.low_s:+.2f} to {1e3 * self.high_s:+.2f} ms"
        return f"{head}; attributed {1e3 * self.attributed_s:.2f} ms, measured minus attributed {interval})"


def judge(arm: str, block_size: int, measured_s: Sequence[float], attributed_s: Sequence[float]) -> SelfCheck:
    """Compare the costs of pairs. ``measured_s``: duration with minus without the preemption, per pair."""
    pairs = len(measured_s)
    effect_s = float(np.mean(attributed_s)) if pairs else 0.0
    if pairs < MIN_PAIRS:
        return SelfCheck(arm, block_size, pairs, effect_s, None, None, "cannot tell")
    difference_s = np.asarray(measured_s) - np.asarray(attributed_s)
    half_width_s = float(stats.t.ppf((1 + CONFIDENCE) / 2, pairs - 1) * difference_s.std(ddof=1) / np.sqrt(pairs))
    low_s, high_s = float(difference_s.mean()) - half_width_s, float(difference_s.mean()) + half_width_s
    verdict: Verdict = "agrees" if low_s <= 0 <= high_s else "disagrees"
    if high_s - low_s > MAX_RELATIVE_WIDTH * abs(effect_s):
        verdict = "cannot tell"
    return SelfCheck(arm, block_size, pairs, effect_s, low_s, high_s, verdict)


def self_checks(trace: Trace) -> list[SelfCheck]:
    """The self-checks of a profile whose costs are attributed, by option and block size."""
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
    durations: dict[str, dict[int, tuple[float, int]]] = defaultdict(dict)
    for core, step, duration_s, tokens in zip(*steps.values(), strict=True):
        durations[core][step] = (duration_s, tokens)
    return durations


def _difference(steps: Mapping[int, tuple[float, int]], window: Mapping[str, Any], twin: Mapping[str, Any]) -> float:
    """Seconds by which the window took longer, over the number of working steps that both have.

    Extra steps at the end of either window are ignored.
    """
    step_lists = [
        [
            steps[number]
            for number in range(steps_of_one["first_step"], steps_of_one["last_step"] + 1)
            if number in steps
        ]
        for steps_of_one in (window, twin)
    ]
    working = min(sum(tokens > 0 for _, tokens in steps_of_one) for steps_of_one in step_lists)
    return _first(step_lists[0], working) - _first(step_lists[1], working)


def _first(steps: Sequence[tuple[float, int]], working: int) -> float:
    """Seconds of the first steps, up to the given number of working ones, with the idle ones in between."""
    total_s = 0.0
    for duration_s, tokens in steps:
        if working == 0:
            break
        total_s += duration_s
        working -= tokens > 0
    return total_s
