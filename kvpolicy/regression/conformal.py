"""Predictions outside the trained range: distance from it, use of the residual there, growth of the margin.

A margin is half of an interval's width on the log scale, below or above the prediction. Its growth is estimated by
*inner extrapolation*: two models, fitted to data up to a quarter and up to half of the longest training length, are
tested on the rest. The excess of an error over the margin inside the range, divided by the distance, is a score. A
conformal quantile of the scores is the growth of the margin per unit of distance. (Cost models take the larger value
of the two fits, and at least the scatter of fits to parts of the states; see :mod:`kvpolicy.training.extrapolation`.)
The errors of one fit are correlated and there are only two fits, so the sign of the next fit's errors is unknown: the
same growth is added below and above. Inside the range the margins may differ.

A kernel that leaves a cache level bends soon beyond the range and goes straight on after that. Pooled scores hide it,
because most of the rows of the other fit are flat. Operators (:class:`Widening`) therefore take the largest quantile
over the nearer and the farther half of each fit's rows, and widen by a step at the edge of the range.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, log

CONFIDENCE = 0.9
SHARES = (0.25, 0.5)
"""Shares of the longest training length up to which the models of inner extrapolation are fitted."""
MIN_EXTRAPOLATED = 9
"""Minimum number of states beyond an inner edge for a bound with 90% confidence."""

Margin = tuple[float, float]
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


def excess(miss: float, margin: Margin, distance: float) -> float:
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


@dataclass(frozen=True, slots=True)
class Widening:
    """What the margins of an operator gain beyond the trained range, on the log scale, to either side."""

    step: float
    """As soon as the range is left."""
    growth: float
    """Per unit of distance, where that is more."""

    def at(self, distance: float) -> float:
        """0 inside; ``inf`` where inner extrapolation reached too few states."""
        return max(self.step, self.growth * distance) if distance > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class Half:
    """The nearer or the farther half of the rows that one fit of inner extrapolation was tested on."""

    near: bool
    misses: Sequence[float]
    """log(measured / predicted), a number per row."""
    distances: Sequence[float]
    states: int


def widening_of(halves: Iterable[Half], margin: Margin, confidence: float) -> Widening:
    """The largest conformal quantile over all halves: of scores by :func:`excess` for the growth, and, of the nearer
    halves, of the excess itself for the step.

    A half of fewer states than ``MIN_EXTRAPOLATED`` counts with its largest score: others bound the interval.
    """
    step = growth = 0.0
    for half in halves:
        states = max(half.states, MIN_EXTRAPOLATED)
        rows = list(zip(half.misses, half.distances, strict=True))
        growth = max(growth, growth_of([excess(miss, margin, far) for miss, far in rows], states, confidence))
        if half.near:
            step = max(step, growth_of([excess(miss, margin, 1.0) for miss, _ in rows], states, confidence))
    return Widening(step, growth)
