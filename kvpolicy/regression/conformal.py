"""Predictions beyond the trained range: how far out a situation is, what of a residual is kept, how room grows.

All of it is told by *inner extrapolation*: a fit on what is up to a quarter, and one on what is up to half, of the
longest length in training is judged on the rest. A miss out there is held against the room inside the range; what
sticks out, over the distance, is a score, and a conformal quantile of the scores is how much room is added per unit of
distance (cost models take the larger of the two fits', and no less than what fits to parts of the states disagree by,
see :mod:`kvpolicy.training.extrapolation`). Misses of one fit lean to the same side together and there are two fits,
so that which side the next one leans to is not told: the room that is added is the same below and above, the room
inside stays lopsided.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log

CONFIDENCE = 0.9
SHARES = (0.25, 0.5)
"""Of the longest length in training: up to there the fits of inner extrapolation learn."""
MIN_EXTRAPOLATED = 9
"""States beyond an inner edge: fewer bound nothing with 90%."""

Room = tuple[float, float]
"""How far below and how far above a prediction, on the log scale; both 0 or above."""

# ---- arithmetic that can be compiled: numbers in, numbers out ----


def distance_beyond(value: float, low: float, high: float, power: float) -> float:
    """How far ``value`` is outside [low, high]; 0 inside.

    Above, the log of how many times the edge, per ``power`` of length that it grows with; one more of anything is no
    great way from none. Below, the share of the edge that is missing: costs do not shrink without bound.
    """
    if value > high:
        return log((1.0 + value) / (1.0 + high)) / power
    if value < low:
        return (low - value) / low
    return 0.0


def grown(room: float, growth: float, distance: float) -> float:
    """Room to one side at a distance from the range."""
    if distance > 0.0:
        return room + growth * distance
    return room


# ---- what inner extrapolation tells ----


def carries(carried: Sequence[float], dropped: Sequence[float], states: int, otherwise: bool) -> bool:
    """Whether a residual kept at the range's edge misses less than one left out; ``otherwise`` where nothing tells.

    The misses of both, log(measured / predicted), of ``states`` different states or points.
    """
    if states < MIN_EXTRAPOLATED or list(carried) == list(dropped):
        return otherwise
    return sum(map(abs, carried)) <= sum(map(abs, dropped))


def excess(miss: float, room: Room, distance: float) -> float:
    """By how much a miss sticks out of the room, over the distance; 0 where it does not."""
    return max(-miss - room[0], miss - room[1], 0.0) / distance


def growth_of(scores: Sequence[float], states: int, confidence: float) -> float:
    """Room to add to either side per unit of distance, from scores of :func:`excess`; ``inf`` of too few states."""
    if states < MIN_EXTRAPOLATED:
        return inf
    ordered = sorted(scores)
    # As in split conformal prediction; the two fits' scores of one state are no two states.
    rank = min(len(ordered), -int(-(confidence * (states + 1) / states * len(ordered)) // 1))
    return ordered[rank - 1]
