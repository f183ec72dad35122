"""Statistical tests of the study's statements: the answer, the size of the effect, and its interval.

Pure functions of numbers. The answer is ``yes`` or ``no`` where the test is significant at :data:`LEVEL`, otherwise
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
    """Result of a test. ``value`` is the size of the effect, ``low`` to ``high`` its interval; None where untested."""

    answer: Answer
    test: str
    effect: str
    """What ``value`` is, with its unit; worded to follow the number."""
    count: int
    """Sample size, in units of ``of``."""
    of: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    confidence: float = 0.95
    why: str = ""
    """Why the answer is ``cannot tell``; empty otherwise."""

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def trend(x: Sequence[float], y: Sequence[float], rises: bool, effect: str, units: str = "windows") -> Evidence:
    """Test whether ``y`` rises with ``x`` (or falls, without ``rises``): Kendall's rank correlation, two-sided.

    The effect is the Theil-Sen slope, the median of the slopes between all pairs of points, with Sen's interval.
    """
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    test = "Kendall's rank correlation; Theil-Sen slope"
    if len(xs) < MIN_POINTS_FOR_TREND or len(np.unique(xs)) < 3:
        why = f"{len(xs)} {units} at {len(np.unique(xs))} levels; at least {MIN_POINTS_FOR_TREND} at 3 are needed"
        return Evidence("cannot tell", test, effect, len(xs), units, why=why)
    if len(np.unique(ys)) < 2:
        return Evidence("cannot tell", test, effect, len(xs), units, 0.0, 0.0, 0.0, 1.0, why="all costs are equal")
    correlation = stats.kendalltau(xs, ys)
    slope, _, low, high = map(float, stats.theilslopes(ys, xs, 0.95))
    p = float(correlation.pvalue)
    correlated = p < LEVEL
    significant = correlated and slope * correlation.statistic > 0
    answer: Answer = ("yes" if (correlation.statistic > 0) == rises else "no") if significant else "cannot tell"
    why = "the median slope is 0, although the ranks are correlated" if correlated else "no trend is significant"
    return Evidence(answer, test, effect, len(xs), units, slope, low, high, p, why="" if significant else why)


def cheaper(
    first: Sequence[float], second: Sequence[float], rng: np.random.Generator, units: str = "pairs"
) -> Evidence:
    """Test whether ``first`` costs less than ``second``, pair by pair: Wilcoxon's signed-rank test, two-sided.

    The effect is the ratio of the totals, with a bootstrap interval over pairs.
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    test, effect = "Wilcoxon's signed-rank test; bootstrap over pairs", "times the other's cost, totals"
    if len(a) < MIN_PAIRS:
        why = f"{len(a)} {units}; at least {MIN_PAIRS} are needed"
        return Evidence("cannot tell", test, effect, len(a), units, why=why)
    if not np.any(a != b):
        return Evidence("cannot tell", test, effect, len(a), units, 1.0, 1.0, 1.0, 1.0, why="all pairs are equal")
    p = float(stats.wilcoxon(a, b).pvalue)
    ratio, low, high = _ratio_of_totals(a, b, rng.integers(0, len(a), (RESAMPLES, len(a))))
    less = float(np.median(a - b)) < 0
    significant = p < LEVEL
    answer: Answer = ("yes" if less else "no") if significant else "cannot tell"
    why = "" if significant else "the difference is within the noise"
    return Evidence(answer, test, effect, len(a), units, ratio, low, high, p, why=why)


def lower(
    first: Sequence[float], second: Sequence[float], rng: np.random.Generator, units: str = "windows"
) -> Evidence:
    """Test whether ``first`` is lower than ``second``, unpaired: Mann and Whitney's rank-sum test, two-sided.

    The effect is the ratio of the means, with a bootstrap interval.
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    test, effect = "Mann-Whitney rank-sum test; bootstrap", "times the other's cost, means"
    if min(len(a), len(b)) < MIN_OF_EACH:
        why = f"{len(a)} and {len(b)} {units}; at least {MIN_OF_EACH} of each are needed"
        return Evidence("cannot tell", test, effect, len(a) + len(b), units, why=why)
    result = stats.mannwhitneyu(a, b, alternative="two-sided")
    means = [np.mean(rng.choice(sample, (RESAMPLES, len(sample))), axis=1) for sample in (a, b)]
    ratio, low, high = _with_interval(a.mean() / b.mean() if b.mean() > 0 else None, means[0], means[1])
    significant = float(result.pvalue) < LEVEL
    answer: Answer = ("yes" if result.statistic < len(a) * len(b) / 2 else "no") if significant else "cannot tell"
    why = "" if significant else "the difference is within the noise"
    return Evidence(answer, test, effect, len(a) + len(b), units, ratio, low, high, float(result.pvalue), why=why)


def flat(x: Sequence[float], y: Sequence[float], units: str = "windows", margin: float = FLAT_MARGIN) -> Evidence:
    """Test whether ``y`` stays within ``margin`` of its mean over the range of ``x``: two one-sided t tests.

    The effect is the straight line's change from the lowest to the highest ``x``, as a share of the mean, with the 90%
    interval that belongs to the two tests at 5%.
    """
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    test = f"two one-sided t tests of the slope, margin {margin:.0%}"
    effect = "of the mean is the change from the lowest to the highest level"
    levels = len(np.unique(xs))
    if len(xs) < MIN_POINTS_FOR_TREND or levels < 2 or ys.mean() <= 0:
        why = (
            "the noise is larger than the costs"
            if len(xs) and ys.mean() <= 0
            else f"{len(xs)} {units} at {levels} levels"
        )
        return Evidence("cannot tell", test, effect, len(xs), units, confidence=0.9, why=why)
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
    return Evidence(answer, test, effect, len(xs), units, change, low, high, p, 0.9, why)


def lowest_at(runs: Mapping[int, Sequence[float]], expected: Sequence[int], rng: np.random.Generator) -> Evidence:
    """Test whether the level with the lowest mean is one of ``expected``, by the share of draws in which it is.

    Each level's mean is drawn from Student's t about the mean of its runs. Resampling the runs would not do: with
    three runs per level, it calls one of two equal levels lower in over a quarter of cases.
    """
    test = "means drawn from the t distribution of each level's runs"
    effect = f"of the draws have the lowest mean at {' or '.join(map(str, expected))}"
    count = sum(map(len, runs.values()))
    short = [level for level, overheads in runs.items() if len(overheads) < MIN_RUNS]
    if not set(expected) & runs.keys() or not runs.keys() - set(expected) or short:
        why = f"fewer than {MIN_RUNS} runs at {short[0]}" if short else "levels to compare are missing"
        return Evidence("cannot tell", test, effect, count, "runs", why=why)
    levels = sorted(runs)
    mean_draws = [_means(np.asarray(runs[level], dtype=np.float64), rng) for level in levels]
    lowest_levels = np.asarray(levels)[np.argmin(np.vstack(mean_draws), axis=0)]
    share = float(np.isin(lowest_levels, expected).mean())
    answer: Answer = "yes" if share >= 1 - LEVEL else "no" if share <= LEVEL else "cannot tell"
    why = "" if answer != "cannot tell" else "the draws do not agree on the lowest level"
    error = 1.96 * float(np.sqrt(share * (1 - share) / RESAMPLES))
    return Evidence(answer, test, effect, count, "runs", share, share - error, share + error, why=why)


def _means(values: Floats, rng: np.random.Generator) -> Floats:
    """Draws of the true mean behind a few values."""
    error = float(values.std(ddof=1)) / np.sqrt(len(values))
    return np.asarray(values.mean() + error * rng.standard_t(len(values) - 1, RESAMPLES), dtype=np.float64)


def coincide(marked: Sequence[bool], events: Sequence[bool], units: str = "steps") -> Evidence:
    """Test whether marked units are events more often than unmarked ones: Fisher's exact test, two-sided.

    The effect is the odds ratio with Woolf's interval. Neighbouring steps are treated as independent.
    """
    a, b = np.asarray(marked, dtype=np.bool_), np.asarray(events, dtype=np.bool_)
    test, effect = "Fisher's exact test", "times the odds elsewhere"
    table = [[int((a & b).sum()), int((a & ~b).sum())], [int((~a & b).sum()), int((~a & ~b).sum())]]
    if not a.any() or not b.any() or b.all() or a.all():
        return Evidence("cannot tell", test, effect, len(a), units, why="there is nothing to compare")
    p = float(stats.fisher_exact(table).pvalue)
    # Adding half a unit to each cell keeps the ratio finite where a cell is empty (Haldane and Anscombe).
    cells = np.asarray(table, dtype=np.float64) + 0.5
    log_odds = float(np.log(cells[0, 0] * cells[1, 1] / cells[0, 1] / cells[1, 0]))
    half = 1.96 * float(np.sqrt((1 / cells).sum()))
    significant = p < LEVEL
    answer: Answer = ("yes" if log_odds > 0 else "no") if significant else "cannot tell"
    why = "" if significant else "they coincide as often as by chance"
    odds, low, high = (float(np.exp(log_odds + shift)) for shift in (0.0, -half, half))
    return Evidence(answer, test, effect, len(a), units, odds, low, high, p, why=why)


def _one_sided(distance: float, error: float, freedom: int) -> float:
    if error == 0:
        return 0.0 if distance > 0 else 1.0
    return float(stats.t.sf(distance / error, freedom))


def _ratio_of_totals(a: Floats, b: Floats, resampled: Ints) -> tuple[float | None, float | None, float | None]:
    return _with_interval(
        a.sum() / b.sum() if b.sum() > 0 else None, a[resampled].sum(axis=1), b[resampled].sum(axis=1)
    )


def _with_interval(
    ratio: float | None, numerators: Floats, denominators: Floats
) -> tuple[float | None, float | None, float | None]:
    """A ratio and its 95% bootstrap interval. None for a value whose denominator is not always above 0."""
    if ratio is None or (denominators <= 0).any():
        return (None if ratio is None else float(ratio)), None, None
    low, high = np.quantile(numerators / denominators, (0.025, 0.975))
    return float(ratio), float(low), float(high)
