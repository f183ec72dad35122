"""Derives a simulated link that takes from a swap what it wins over the native link. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from kvpolicy.errors import InputError
from kvpolicy.hardware.link import SimulatedLink

LATENCY_SHARE = 0.5
"""Share of latency in the time of a copy at the median length; the rest is transfer time of the bytes.

With latency alone, the choice would depend on nothing but length.
"""
NEAREST_SHARE = 0.4
"""Share of the states, those nearest to the median length, that the costs there are averaged over."""
MIN_STATES = 5


@dataclass(frozen=True, slots=True)
class Costs:
    """Mean costs of both options in one state."""

    computed_tokens: float
    recompute_s: float
    swap_s: float


def slow_link(states: Sequence[Costs], bytes_per_token: float) -> SimulatedLink | None:
    """The link on which one copy takes as long as what recompute costs more than swap, at the median measured length.

    At that length recompute costs ``extra`` seconds more than swap over the native link; ``latency_s + bytes /
    bytes_per_s`` is set equal to that, half of it latency. It is no break-even: a swap copies twice, and the engine
    computes other requests meanwhile. None where swap is not cheaper over the native link. Both numbers are rounded to
    two digits. Raises InputError for fewer than 5 states.
    """
    if len(states) < MIN_STATES:
        raise InputError(f"{len(states)} states: to derive a link takes at least {MIN_STATES}")
    tokens = median(state.computed_tokens for state in states)
    near = sorted(states, key=lambda state: abs(math.log(state.computed_tokens / tokens)))
    near = near[: max(MIN_STATES, round(NEAREST_SHARE * len(states)))]
    extra_s = fmean(state.recompute_s for state in near) - fmean(state.swap_s for state in near)
    if extra_s <= 0:
        return None
    latency_s = LATENCY_SHARE * extra_s
    bytes_per_s = tokens * bytes_per_token / (extra_s - latency_s)
    return SimulatedLink(_two_digits(bytes_per_s), _two_digits(latency_s))


def _two_digits(value: float) -> float:
    return float(f"{value:.1e}")
