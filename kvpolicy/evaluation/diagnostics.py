"""Checks that refuse an estimate which the log does not support, rather than print a wrong one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.stats import chi2

from kvpolicy.arrays import Flags, Floats, Ints
from kvpolicy.evaluation.bounds import Resamples, Terms, bootstrap
from kvpolicy.events import KINDS

MIN_EFFECTIVE = 0.2
"""Minimum effective sample size, as a share of the records."""
WEIGHT_LIMITS = (0.9, 1.1)
"""Limits of the mean weight's 95% interval; its expectation is 1 if the logged probabilities are right."""
MAX_UNSUPPORTED = 0.01
"""Maximum share of the target policy's probability on actions without support."""
MIN_SUPPORT = 0.01
"""Minimum probability of an action under the logging policy. Rarer actions are in the log too few times: a few
situations in which they are expensive may all be missing, and neither weights nor intervals would show it."""
MAX_UNKNOWN = 0.1
"""Maximum share of records with an unknown cost."""
MIN_CLUSTERS = 20
BINS = 10
MIN_VARIANCE = 5.0
"""Minimum variance of the number of swaps in a bin, for the normal approximation."""
MIN_CHANCE = 1e-3
"""Significance level of the calibration test: below it the logged probabilities are taken to be wrong."""


@dataclass(frozen=True, slots=True)
class Bin:
    """Decisions left to chance, by the logged probability of a swap."""

    low: float
    high: float
    decisions: int
    expected_share: float
    """Mean logged probability."""
    chosen_share: float
    """Share of decisions in which swap was chosen."""
    misses: float
    """(chosen - expected) over its standard deviation."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Test of the logged probabilities against the frequencies of the actions."""

    bins: tuple[Bin, ...]
    chance: float | None
    """p-value (chi squared, one degree of freedom per bin); None with too few randomised decisions."""


@dataclass(frozen=True, slots=True)
class Support:
    """How much of a log supports an estimate for one policy."""

    effective: float
    """(sum of weights)^2 / sum of squared weights."""
    effective_share: float
    """Effective sample size, as a share of the records."""
    mean_weight: float
    mean_weight_low: float
    mean_weight_high: float
    """95%."""
    unsupported_share: float
    """Share of the policy's probability on actions without support."""
    refused: tuple[str, ...]
    """Reasons why no estimate is printed; empty if one is."""


def calibration(probability: Floats, action: Ints) -> Calibration:
    """Test in bins of equal numbers of decisions, small ones joined with a neighbour.

    ``probability``: (n, K) as logged.
    """
    swap = KINDS.index("swap")
    randomised = (probability[:, swap] > 0) & (probability[:, swap] < 1)
    share, swapped = probability[randomised, swap], (action[randomised] == swap).astype(np.float64)
    order = np.argsort(share, kind="stable")
    bins: list[Ints] = []
    pending: Ints = np.empty(0, np.int64)
    for rows_of_part in _cut(order, share[order]):
        pending = np.concatenate([pending, rows_of_part])
        if float((share[pending] * (1 - share[pending])).sum()) >= MIN_VARIANCE:
            bins.append(pending)
            pending = np.empty(0, np.int64)
    if len(pending) and bins:
        bins[-1] = np.concatenate([bins[-1], pending])
    checked_bins = tuple(_bin(share[rows], swapped[rows]) for rows in bins)
    return Calibration(
        checked_bins,
        float(chi2.sf(sum(checked.misses**2 for checked in checked_bins), len(checked_bins))) if checked_bins else None,
    )


def _cut(order: Ints, share: Floats) -> list[Ints]:
    """Cut into about :data:`BINS` parts, never between equal shares."""
    if not len(order):
        return []
    edges = np.unique(np.searchsorted(share, np.quantile(share, np.linspace(0, 1, BINS + 1)[1:-1]), side="left"))
    return [part for part in np.split(order, edges[(edges > 0) & (edges < len(order))]) if len(part)]


def _bin(share: Floats, swapped: Floats) -> Bin:
    spread = float(np.sqrt((share * (1 - share)).sum()))
    return Bin(
        low=float(share.min()),
        high=float(share.max()),
        decisions=len(share),
        expected_share=float(share.mean()),
        chosen_share=float(swapped.mean()),
        misses=float((swapped - share).sum()) / spread,
    )


def log_refusals(calibrated: Calibration, clusters: int, known: Flags) -> tuple[str, ...]:
    """Reasons why the log supports no estimate at all."""
    reasons = []
    if clusters < MIN_CLUSTERS:
        reasons.append(f"{clusters} clusters of decisions, at least {MIN_CLUSTERS} are needed for an interval")
    unknown_share = 1.0 - float(known.mean())
    if unknown_share > MAX_UNKNOWN:
        reasons.append(f"the cost of {unknown_share:.1%} of the records is not known, over {MAX_UNKNOWN:.0%}")
    if calibrated.chance is not None and calibrated.chance < MIN_CHANCE:
        worst = max(calibrated.bins, key=lambda row: abs(row.misses))
        reasons.append(
            f"logged probabilities differ from how often actions were chosen (p {calibrated.chance:.1e}): where they "
            f"are {worst.low:.3g} to {worst.high:.3g}, {worst.expected_share:.1%} swaps were expected, and "
            f"{worst.chosen_share:.1%} of {worst.decisions} decisions were swaps"
        )
    return tuple(reasons)


def support(
    target: Floats, probability: Floats, weight: Floats, known_share: Floats, resamples: Resamples
) -> Support:  # fmt: skip
    """Support of a policy by the log.

    ``target``, ``probability``: (n, K); ``weight``: (n,); ``known_share``: (K,), NaN for actions never taken.
    """
    n = len(weight)
    total, squares = float(weight.sum()), float((weight**2).sum())
    effective = total**2 / squares if squares > 0 else 0.0
    low, high = bootstrap(Terms(weight), resamples) if resamples.groups > 1 else (0.0, float("inf"))
    known = np.nan_to_num(known_share) > 0
    unsupported = float(np.where((probability >= MIN_SUPPORT) & known, 0.0, target).sum()) / n
    measured = Support(effective, effective / n, total / n, low, high, unsupported, ())
    return Support(effective, effective / n, total / n, low, high, unsupported, _refusals(measured, n))


def _refusals(measured: Support, n: int) -> tuple[str, ...]:
    reasons = []
    if measured.unsupported_share > MAX_UNSUPPORTED:
        reasons.append(
            f"{measured.unsupported_share:.1%} of its choices have no support, over {MAX_UNSUPPORTED:.0%}: the logging "
            f"policy made them with a probability under {MIN_SUPPORT:.0%}, or never; a log supports estimates of other "
            "policies only where its own policy chose at random"
        )
    if measured.effective_share < MIN_EFFECTIVE:
        reasons.append(
            f"effective sample {measured.effective:.0f} of {n} records, {measured.effective_share:.1%}, "
            f"under {MIN_EFFECTIVE:.0%}"
        )
    if not (WEIGHT_LIMITS[0] <= measured.mean_weight_low and measured.mean_weight_high <= WEIGHT_LIMITS[1]):
        reasons.append(
            f"mean weight {measured.mean_weight:.3f} "
            f"[{measured.mean_weight_low:.3f}, {measured.mean_weight_high:.3f}] "
            f"is not within {WEIGHT_LIMITS[0]} to {WEIGHT_LIMITS[1]}: too few records, or wrong probabilities"
        )
    return tuple(reasons)


def known_by_action(action: Ints, known: Flags) -> Mapping[str, tuple[int, int]]:
    """By action, the number of records, and of those with a known cost."""
    return {
        kind: (int((action == i).sum()), int((known & (action == i)).sum())) for i, kind in enumerate(KINDS)
    }  # fmt: skip
