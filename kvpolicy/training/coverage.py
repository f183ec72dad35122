"""How often intervals hold on states that were not seen, by bin, and how far so few states can tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpolicy.cost.intervals import Intervals
from kvpolicy.stats import proportion_interval


def coverage(intervals: Intervals, numbers: Sequence[int], held: Sequence[bool]) -> dict[str, Any]:
    """Share of states held in all and by bin, each with its number of states and 95% interval.

    ``numbers``: the bin of each state; ``held``: whether its interval holds what was measured.
    """
    by_bin = []
    for number in range(len(intervals.states)):
        mine = [one for at, one in zip(numbers, held, strict=True) if at == number]
        by_bin.append(intervals.span(number) | share_held(mine))
    return share_held(held) | {"bins": by_bin}


def share_held(held: Sequence[bool]) -> dict[str, Any]:
    """Share of states held, their number, and its 95% interval."""
    low, high = proportion_interval(sum(held), len(held))
    return {"states": len(held), "holds": sum(held) / len(held) if held else None, "low": low, "high": high}
