"""What a log can and cannot say of a policy: checks that refuse an estimate rather than print a wrong one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.stats import chi2

from kvpolicy.arrays import Flags, Floats, Ints
from kvpolicy.evaluation.bounds import Resampled, Terms, bootstrap
from kvpolicy.events import KINDS

MIN_EFFECTIVE = 0.2
"""Of the records."""
WEIGHT_LIMITS = (0.9, 1.1)
"""The 95% interval of the mean weight should lie within: its mean is 1 where logged probabilities are right."""
MAX_UNSUPPORTED = 0.01
"""Of the target policy's probability, on actions without support."""
MIN_SUPPORT = 0.01
"""Chance that the logging policy must have given an action. What it hardly ever did it did too few times to be told:
a few dear situations may all be missing from the log, and neither weights nor intervals would show it."""
MAX_UNKNOWN = 0.1
"""Of the records, those whose cost is not known."""
MIN_CLUSTERS = 20
BINS = 10
MIN_VARIANCE = 5.0
"""Of the number of swaps a bin should see: with less, the normal distribution is no good for it."""
MIN_CHANCE = 1e-3
"""Of a miss this large, if logged probabilities were right: below, they are taken to be wrong."""


@dataclass(frozen=True, slots=True)
class Bin:
    """Decisions left to chance, by the logged probability of a swap."""

    low: float
    high: float
    decisions: int
    expected_share: float
    """Mean logged probability."""
    chosen_share: float
    """How often swap was chosen."""
    misses: float
    """(chosen - expected) over its standard deviation."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Whether logged probabilities are how often their actions were chosen."""

    bins: tuple[Bin, ...]
    chance: float | None
    """Of a miss this large or larger (chi squared, a degree of freedom per bin); None with too few decisions by
    chance to tell."""


@dataclass(frozen=True, slots=True)
class Support:
    """How much of a log speaks of one policy."""

    effective: float
    """(sum of weights)^2 / sum of squared weights."""
    effective_share: float
    """Of the records."""
    mean_weight: float
    mean_weight_low: float
    mean_weight_high: float
    """95%."""
    unsupported_share: float
    """Of the policy's probability."""
    refused: tuple[str, ...]
    """Why no estimate is printed; empty where one is."""


def calibration(probability: Floats, action: Ints) -> Calibration:
    """Bins of equal numbers of decisions, thin ones joined with a neighbour. ``probability``: (n, K) as logged."""
    swap = KINDS.index("swap")
    open_ones = (probability[:, swap] > 0) & (probability[:, swap] < 1)
    share, took = probability[open_ones, swap], (action[open_ones] == swap).astype(np.float64)
    order = np.argsort(share, kind="stable")
    bins: list[Ints] = []
    waiting: Ints = np.empty(0, np.int64)
    for part in _cut(order, share[order]):
        waiting = np.concatenate([waiting, part])
        if float((share[waiting] * (1 - share[waiting])).sum()) >= MIN_VARIANCE:
            bins.append(waiting)
            waiting = np.empty(0, np.int64)
    if len(waiting) and bins:
        bins[-1] = np.concatenate([bins[-1], waiting])
    told = tuple(_bin(share[one], took[one]) for one in bins)
    return Calibration(told, float(chi2.sf(sum(one.misses**2 for one in told), len(told))) if told else None)


def _cut(order: Ints, share: Floats) -> list[Ints]:
    """About :data:`BINS` parts, never between equal shares."""
    if not len(order):
        return []
    edges = np.unique(np.searchsorted(share, np.quantile(share, np.linspace(0, 1, BINS + 1)[1:-1]), side="left"))
    return [part for part in np.split(order, edges[(edges > 0) & (edges < len(order))]) if len(part)]


def _bin(share: Floats, took: Floats) -> Bin:
    spread = float(np.sqrt((share * (1 - share)).sum()))
    return Bin(
        low=float(share.min()),
        high=float(share.max()),
        decisions=len(share),
        expected_share=float(share.mean()),
        chosen_share=float(took.mean()),
        misses=float((took - share).sum()) / spread,
    )


def log_refusals(calibrated: Calibration, clusters: int, known: Flags) -> tuple[str, ...]:
    """What of the log itself forbids every estimate."""
    refused = []
    if clusters < MIN_CLUSTERS:
        refused.append(f"{clusters} clusters of decisions, at least {MIN_CLUSTERS} are needed for an interval")
    unknown = 1.0 - float(known.mean())
    if unknown > MAX_UNKNOWN:
        refused.append(f"the cost of {unknown:.1%} of the records is not known, over {MAX_UNKNOWN:.0%}")
    if calibrated.chance is not None and calibrated.chance < MIN_CHANCE:
        worst = max(calibrated.bins, key=lambda one: abs(one.misses))
        refused.append(
            f"logged probabilities are not how often actions were chosen (chance {calibrated.chance:.1e}): at "
            f"{worst.low:.3g} to {worst.high:.3g}, expected {worst.expected_share:.1%} swaps, found "
            f"{worst.chosen_share:.1%} of {worst.decisions}"
        )
    return tuple(refused)


def support(
    target: Floats, probability: Floats, weight: Floats, known_share: Floats, drawn: Resampled
) -> Support:  # fmt: skip
    """``target``, ``probability``: (n, K); ``weight``: (n,); ``known_share``: (K,), NaN for actions never taken."""
    n = len(weight)
    total, squares = float(weight.sum()), float((weight**2).sum())
    effective = total**2 / squares if squares > 0 else 0.0
    low, high = bootstrap(Terms(weight), drawn) if drawn.groups > 1 else (0.0, float("inf"))
    known = np.nan_to_num(known_share) > 0
    unsupported = float(np.where((probability >= MIN_SUPPORT) & known, 0.0, target).sum()) / n
    told = Support(effective, effective / n, total / n, low, high, unsupported, ())
    return Support(effective, effective / n, total / n, low, high, unsupported, _refusals(told, n))


def _refusals(one: Support, n: int) -> tuple[str, ...]:
    refused = []
    if one.unsupported_share > MAX_UNSUPPORTED:
        refused.append(
            f"{one.unsupported_share:.1%} of what it would do has no support, over {MAX_UNSUPPORTED:.0%}: the log's "
            f"policy does that there with a chance under {MIN_SUPPORT:.0%}, if at all; outside what it leaves to "
            "chance it says nothing of other policies"
        )
    if one.effective_share < MIN_EFFECTIVE:
        refused.append(
            f"effective sample {one.effective:.0f} of {n} records, {one.effective_share:.1%}, under {MIN_EFFECTIVE:.0%}"
        )
    if not (WEIGHT_LIMITS[0] <= one.mean_weight_low and one.mean_weight_high <= WEIGHT_LIMITS[1]):
        refused.append(
            f"mean weight {one.mean_weight:.3f} [{one.mean_weight_low:.3f}, {one.mean_weight_high:.3f}] leaves "
            f"{WEIGHT_LIMITS[0]} to {WEIGHT_LIMITS[1]}: too few records, or wrong probabilities"
        )
    return tuple(refused)


def told_by_action(action: Ints, known: Flags) -> Mapping[str, tuple[int, int]]:
    """By action, records and those with a known cost."""
    return {
        kind: (int((action == i).sum()), int((known & (action == i)).sum())) for i, kind in enumerate(KINDS)
    }  # fmt: skip
