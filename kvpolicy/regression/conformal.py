"""Predictions outside the trained range: distance from it, use of the residual there, growth of the margin.

A margin is half of an interval's width on the log scale, below or above the prediction. Its growth is estimated by
*inner extrapolation*: two models, fitted to data up to a quarter and up to half of the longest training length, are
tested on the rest. The excess of an error over the margin inside the range, divided by the distance, is a score. A
conformal quantile of the scores is the growth of the margin per unit of distance. (Cost models take the larger value
of the two fits, and at least the scatter of fits to parts of the states; see :mod:`kvpolicy.training.extrapolation`.)
The errors of one fit are correlated and there are only two fits, so the sign of the next fit's errors is unknown: the
same growth is added below and above. Inside the range the margins may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log

CONFIDENCE = 0.9
SHARES = (0.25, 0.5)
"""Shares of the longest training length up to which the models of inner extrapolation are fitted."""
MIN_EXTRAPOLATED = 9
"""Minimum number of states beyond an inner edge for a bound with 90% confidence."""

Room = tuple[float, float]
"""Margins below and above a prediction, on the log scale; both 0 or above."""

# ---- scalar functions, compiled by numba in kvpolicy.cost.compile ----


def distance_beyond(value: float, low: float, high: float, power: float) -> float:
    """Distance of ``value`` from [low, high]; 0 inside.

    Above, log((1 + value) / (1 + high)) / ``power``, for a feature that grows with that power of the length; the 1
    keeps the distance from 0 small. Below, (low - value) / low: costs do not decrease without bound.
    """
    if value > high:
        return log((1.0 + value) / (1.0 + high)) / power
    if value < low:
        return (low - value) / low
    return 0.0


def grown(margin: float, growth: float, distance: float) -> float:
    """Margin to one side at a distance from the range."""
    if distance > 0.0:
        return margin + growth * distance
    return margin


# ---- inner extrapolation ----


def carries(carried: Sequence[float], dropped: Sequence[float], states: int, default: bool) -> bool:
    """Whether a residual held at its value at the range's edge has smaller errors than none.

    ``carried``, ``dropped``: log(measured / predicted) with and without the residual, on ``states`` distinct states.
    ``default``: the answer if there are too few states, or both are equal.
    """
    if states < MIN_EXTRAPOLATED or list(carried) == list(dropped):
        return default
    return sum(map(abs, carried)) <= sum(map(abs, dropped))


def excess(miss: float, margin: Room, distance: float) -> float:
    """Excess of an error over the margin, divided by the distance; 0 if it is within."""
    return max(-miss - margin[0], miss - margin[1], 0.0) / distance


def growth_of(scores: Sequence[float], states: int, confidence: float) -> float:
    """Growth of the margin per unit of distance, from scores by :func:`excess`; ``inf`` for too few states."""
    if states < MIN_EXTRAPOLATED:
        return inf
    ordered = sorted(scores)
    # As in split conformal prediction; scores of the same state by two fits are not independent.
    rank = min(len(ordered), -int(-(confidence * (states + 1) / states * len(ordered)) // 1))
    return ordered[rank - 1]
