"""A simulated link that puts break-even inside the measured lengths, from what the native link cost. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from kvpolicy.hardware.link import GivenLink

LATENCY_SHARE = 0.5
"""Of the link's time at break-even; the rest is for the bytes. A latency alone would make length all that matters."""
NEAREST = 0.4
"""Share of the states, those nearest to the median length, that the costs at break-even are averaged over."""
FEWEST = 5


@dataclass(frozen=True, slots=True)
class Costs:
    """One state's mean cost under either option."""

    computed_tokens: float
    recompute_s: float
    swap_s: float


def break_even_link(states: Sequence[Costs], bytes_per_token: float) -> GivenLink | None:
    """The link on which swap costs as much as recompute at the median measured length.

    There recompute costs ``extra`` seconds more than swap over the native link. A save over a simulated link stalls
    the engine for ``latency_s + bytes / bytes_per_s``, which is made equal to ``extra``: half of it latency. (A load
    goes on beside the engine's steps.) None where swap is not the cheaper at that length as it is: then there is
    nothing to add. Figures are rounded to two digits. Raises ValueError for fewer than 5 states.
    """
    if len(states) < FEWEST:
        raise ValueError(f"{len(states)} states: a break-even needs at least {FEWEST}")
    tokens = median(state.computed_tokens for state in states)
    near = sorted(states, key=lambda state: abs(math.log(state.computed_tokens / tokens)))
    near = near[: max(FEWEST, round(NEAREST * len(states)))]
    extra_s = fmean(state.recompute_s for state in near) - fmean(state.swap_s for state in near)
    if extra_s <= 0:
        return None
    latency_s = LATENCY_SHARE * extra_s
    bytes_per_s = tokens * bytes_per_token / (extra_s - latency_s)
    return GivenLink(_two_digits(bytes_per_s), _two_digits(latency_s))


def _two_digits(value: float) -> float:
    return float(f"{value:.1e}")


def flag(link: GivenLink) -> str:
    """As ``--link`` takes it."""
    return f"{link.bytes_per_s:g},{link.latency_s:g}"
