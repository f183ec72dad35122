"""Statistical tests, each of one statement: what it found, how large the effect is, and whether that settles it.

Pure functions of numbers. An answer is ``yes`` or ``no`` where the test settles it at :data:`LEVEL`, otherwise
``cannot tell``, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy import stats

from kvpolicy.arrays import Floats, Ints

Answer = Literal["yes", "no", "cannot tell"]

LEVEL = 0.05
MIN_POINTS_FOR_TREND = 5
"""With four points in perfect order Kendall's test still has p = 0.083."""
MIN_PAIRS = 6
"""With five pairs that all agree the signed-rank test still has p = 0.0625."""
MIN_OF_EACH = 4
"""With three against three that do not overlap the rank-sum test still has p = 0.1."""
MIN_RUNS = 3
FLAT_MARGIN = 0.25
RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a test found. ``value`` is the size of the effect, ``low`` to ``high`` its interval; None where untested."""

    answer: Answer
    test: str
    effect: str
    """What ``value`` is, with its unit: reads on after the number."""
    count: int
    """Units the test had; see ``of``."""
    of: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    confidence: float = 0.95
    why: str = ""
    """Why it cannot be told; empty otherwise."""

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def trend(x: Sequence[float], y: Sequence[float], rises: bool, effect: str, of: str = "windows") -> Evidence:
    """Whether ``y`` goes up with ``x`` (or down): Kendall's rank correlation, two-sided.

    The effect is Theil and Sen's slope, the median of the slopes between all pairs of points, with Sen's interval.
    """
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    test = "Kendall's rank correlation; Theil-Sen slope"
    if len(xs) < MIN_POINTS_FOR_TREND or len(np.unique(xs)) < 3:
        why = f"{len(xs)} {of} at {len(np.unique(xs))} levels; at least {MIN_POINTS_FOR_TREND} at 3 are needed"
        return Evidence("cannot tell", test, effect, len(xs), of, why=why)
    if len(np.unique(ys)) < 2:
        return Evidence("cannot tell", test, effect, len(xs), of, 0.0, 0.0, 0.0, 1.0, why="all costs are alike")
    found = stats.kendalltau(xs, ys)
    slope, _, low, high = map(float, stats.theilslopes(ys, xs, 0.95))
    p = float(found.pvalue)
    ranked = p < LEVEL
    settled = ranked and slope * found.statistic > 0
    answer: Answer = ("yes" if (found.statistic > 0) == rises else "no") if settled else "cannot tell"
    why = "the median slope is 0, though ranks go together" if ranked else "the points are compatible with no trend"
    return Evidence(answer, test, effect, len(xs), of, slope, low, high, p, why="" if settled else why)


def cheaper(one: Sequence[float], other: Sequence[float], rng: np.random.Generator, of: str = "pairs") -> Evidence:
    """Whether ``one`` costs less than ``other``, pair by pair: Wilcoxon's signed-rank test, two-sided.

    The effect is the ratio of the totals, with a bootstrap interval over pairs.
    """
    a, b = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    test, effect = "Wilcoxon's signed-rank test; bootstrap over pairs", "times the other's cost, totals"
    if len(a) < MIN_PAIRS:
        why = f"{len(a)} {of}; at least {MIN_PAIRS} are needed"
        return Evidence("cannot tell", test, effect, len(a), of, why=why)
    if not np.any(a != b):
        return Evidence("cannot tell", test, effect, len(a), of, 1.0, 1.0, 1.0, 1.0, why="all pairs are alike")
    p = float(stats.wilcoxon(a, b).pvalue)
    ratio, low, high = _ratio_of_totals(a, b, rng.integers(0, len(a), (RESAMPLES, len(a))))
    less = float(np.median(a - b)) < 0
    settled = p < LEVEL
    answer: Answer = ("yes" if less else "no") if settled else "cannot tell"
    why = "" if settled else "the difference is within the noise"
    return Evidence(answer, test, effect, len(a), of, ratio, low, high, p, why=why)


def lower(one: Sequence[float], other: Sequence[float], rng: np.random.Generator, of: str = "windows") -> Evidence:
    """Whether ``one`` is lower than ``other``, which are not paired: Mann and Whitney's rank-sum test, two-sided.

    The effect is the ratio of the means, with a bootstrap interval.
    """
    a, b = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    test, effect = "Mann-Whitney rank-sum test; bootstrap", "times the other's cost, means"
    if min(len(a), len(b)) < MIN_OF_EACH:
        why = f"{len(a)} and {len(b)} {of}; at least {MIN_OF_EACH} of each are needed"
        return Evidence("cannot tell", test, effect, len(a) + len(b), of, why=why)
    found = stats.mannwhitneyu(a, b, alternative="two-sided")
    means = [np.mean(rng.choice(some, (RESAMPLES, len(some))), axis=1) for some in (a, b)]
    ratio, low, high = _with_interval(a.mean() / b.mean() if b.mean() > 0 else None, means[0], means[1])
    settled = float(found.pvalue) < LEVEL
    answer: Answer = ("yes" if found.statistic < len(a) * len(b) / 2 else "no") if settled else "cannot tell"
    why = "" if settled else "the difference is within the noise"
    return Evidence(answer, test, effect, len(a) + len(b), of, ratio, low, high, float(found.pvalue), why=why)


def flat(x: Sequence[float], y: Sequence[float], of: str = "windows", margin: float = FLAT_MARGIN) -> Evidence:
    """Whether ``y`` stays within ``margin`` of its mean over the range of ``x``: two one-sided t tests.

    The effect is the straight line's change from the lowest to the highest ``x``, as a share of the mean, with the 90%
    interval that belongs to the two tests at 5%.
    """
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    test = f"two one-sided t tests of the slope, margin {margin:.0%}"
    effect = "of the mean is the change from the lowest to the highest level"
    levels = len(np.unique(xs))
    if len(xs) < MIN_POINTS_FOR_TREND or levels < 2 or ys.mean() <= 0:
        why = "costs drown in the noise" if len(xs) and ys.mean() <= 0 else f"{len(xs)} {of} at {levels} levels"
        return Evidence("cannot tell", test, effect, len(xs), of, confidence=0.9, why=why)
    line = stats.linregress(xs, ys)
    scale = float(xs.max() - xs.min()) / float(ys.mean())
    change, error = float(line.slope) * scale, float(line.stderr) * scale
    freedom = len(xs) - 2
    half = float(stats.t.ppf(0.95, freedom)) * error
    low, high = change - half, change + half
    p = max(_one_sided(margin - change, error, freedom), _one_sided(change + margin, error, freedom))
    inside, outside = -margin < low and high < margin, low > margin or high < -margin
    answer: Answer = "yes" if inside else "no" if outside else "cannot tell"
    why = "" if answer != "cannot tell" else "the interval is neither inside nor outside the margin"
    return Evidence(answer, test, effect, len(xs), of, change, low, high, p, 0.9, why)


def lowest_at(runs: Mapping[int, Sequence[float]], wanted: Sequence[int], rng: np.random.Generator) -> Evidence:
    """Whether the level with the lowest mean is one of ``wanted``: the share of draws of the means that say so.

    Each level's mean is drawn from Student's t about the mean of its runs. Resampled runs would not do: with
    three of each, they decide between two levels that are truly alike in over a quarter of cases.
    """
    test = "means drawn from the t distribution of each level's runs"
    effect = f"of the draws have the lowest mean at {' or '.join(map(str, wanted))}"
    count = sum(map(len, runs.values()))
    short = [level for level, some in runs.items() if len(some) < MIN_RUNS]
    if not set(wanted) & runs.keys() or not runs.keys() - set(wanted) or short:
        why = f"fewer than {MIN_RUNS} runs at {short[0]}" if short else "levels to compare are missing"
        return Evidence("cannot tell", test, effect, count, "runs", why=why)
    levels = sorted(runs)
    drawn = [_means(np.asarray(runs[level], dtype=np.float64), rng) for level in levels]
    at = np.asarray(levels)[np.argmin(np.vstack(drawn), axis=0)]
    share = float(np.isin(at, wanted).mean())
    answer: Answer = "yes" if share >= 1 - LEVEL else "no" if share <= LEVEL else "cannot tell"
    why = "" if answer != "cannot tell" else "draws disagree on the lowest level"
    error = 1.96 * float(np.sqrt(share * (1 - share) / RESAMPLES))
    return Evidence(answer, test, effect, count, "runs", share, share - error, share + error, why=why)


def _means(values: Floats, rng: np.random.Generator) -> Floats:
    """What the mean behind a few values may be."""
    error = float(values.std(ddof=1)) / np.sqrt(len(values))
    return np.asarray(values.mean() + error * rng.standard_t(len(values) - 1, RESAMPLES), dtype=np.float64)


def coincide(marked: Sequence[bool], events: Sequence[bool], of: str = "steps") -> Evidence:
    """Whether what is marked falls on events more often than elsewhere: Fisher's exact test, two-sided.

    The effect is the odds ratio with Woolf's interval. Neighbouring steps count as if they knew nothing of each other.
    """
    a, b = np.asarray(marked, dtype=np.bool_), np.asarray(events, dtype=np.bool_)
    test, effect = "Fisher's exact test", "times the odds elsewhere"
    table = [[int((a & b).sum()), int((a & ~b).sum())], [int((~a & b).sum()), int((~a & ~b).sum())]]
    if not a.any() or not b.any() or b.all() or a.all():
        return Evidence("cannot tell", test, effect, len(a), of, why="there is nothing to compare")
    p = float(stats.fisher_exact(table).pvalue)
    # Half a step more in each cell keeps the ratio finite where one is empty (Haldane and Anscombe).
    cells = np.asarray(table, dtype=np.float64) + 0.5
    log_odds = float(np.log(cells[0, 0] * cells[1, 1] / cells[0, 1] / cells[1, 0]))
    half = 1.96 * float(np.sqrt((1 / cells).sum()))
    settled = p < LEVEL
    answer: Answer = ("yes" if log_odds > 0 else "no") if settled else "cannot tell"
    why = "" if settled else "they fall on each other as often as by chance"
    odds, low, high = (float(np.exp(log_odds + shift)) for shift in (0.0, -half, half))
    return Evidence(answer, test, effect, len(a), of, odds, low, high, p, why=why)


def _one_sided(distance: float, error: float, freedom: int) -> float:
    if error == 0:
        return 0.0 if distance > 0 else 1.0
    return float(stats.t.sf(distance / error, freedom))


def _ratio_of_totals(a: Floats, b: Floats, drawn: Ints) -> tuple[float | None, float | None, float | None]:
    return _with_interval(a.sum() / b.sum() if b.sum() > 0 else None, a[drawn].sum(axis=1), b[drawn].sum(axis=1))


def _with_interval(
    ratio: float | None, above: Floats, below: Floats
) -> tuple[float | None, float | None, float | None]:
    """None for a ratio, or its bounds, whose denominator noise can bring to 0."""
    if ratio is None or (below <= 0).any():
        return (None if ratio is None else float(ratio)), None, None
    low, high = np.quantile(above / below, (0.025, 0.975))
    return float(ratio), float(low), float(high)
