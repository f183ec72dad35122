"""Coverage of intervals on held-out states, by bin, each share with its 95% interval. Called by the final scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpolicy.cost.intervals import Intervals
from kvpolicy.stats import proportion_interval


def coverage(intervals: Intervals, numbers: Sequence[int], held: Sequence[bool]) -> dict[str, Any]:
    """Share of states held, over all bins and by bin, each with its number of states and 95% interval.

    ``numbers``: bin number of each state; ``held``: whether its interval holds the measured value.
    """
    by_bin = []
    for number in range(len(intervals.states)):
        bin_held = [hit for bin_number, hit in zip(numbers, held, strict=True) if bin_number == number]
        by_bin.append(intervals.span(number) | share_held(bin_held))
    return share_held(held) | {"bins": by_bin}


def share_held(held: Sequence[bool]) -> dict[str, Any]:
    """Share of states held, their number, and its 95% interval."""
    low, high = proportion_interval(sum(held), len(held))
    return {"states": len(held), "holds": sum(held) / len(held) if held else None, "low": low, "high": high}
