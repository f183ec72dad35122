"""Where the choice turns: the break-even length at a load, and the choice over lengths and loads."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import log
from typing import Any

from kvpolicy.cost import FittedModel
from kvpolicy.events import KINDS, Cost, Kind, Preemption
from kvpolicy.explanation.breakdown import options_of
from kvpolicy.explanation.question import as_long_as, beside
from kvpolicy.policy import Objective

BEYOND = 4
"""Lengths are looked at up to so many times the longest trained, or asked for."""
EVERY_UP_TO = 4096
"""Tokens up to which every length is looked at: swap's cost is a staircase by blocks, and so may the choice be."""
MAX_EDGES = 1024
"""Edges of blocks looked at above, at least as far apart as one block."""
LOADS = 13
COLUMNS = 49


@dataclass(frozen=True, slots=True)
class Turn:
    """From ``tokens`` on, another option is the cheaper one."""

    tokens: int
    to: Kind
    extrapolated: bool
    """Whether that is outside the trained range."""


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The choice along the victim's length, all else as asked."""

    first: Kind
    """For a victim of one token."""
    turns: tuple[Turn, ...]
    up_to_tokens: int
    every_up_to: int
    """Turns up to that length are all there are; above it, between lengths ``widest_gap`` apart, two may be missed."""
    widest_gap: int

    def to_dict(self) -> dict[str, Any]:
        turns = [{"tokens": one.tokens, "to": one.to, "extrapolated": one.extrapolated} for one in self.turns]
        looked = {name: getattr(self, name) for name in ("up_to_tokens", "every_up_to", "widest_gap")}
        return {"first": self.first, "turns": turns} | looked


@dataclass(frozen=True, slots=True)
class Grid:
    """Log of swap's over recompute's cost, by what is minimised. A row per load, a column per length."""

    tokens: tuple[int, ...]
    running: tuple[int, ...]
    log_ratio: tuple[tuple[float, ...], ...]
    sure: tuple[tuple[bool, ...], ...]
    """Whether the interval of the ratio of engine times leaves the choice no doubt."""
    extrapolated: tuple[tuple[bool, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        rows = {name: [list(row) for row in getattr(self, name)] for name in ("log_ratio", "sure", "extrapolated")}
        return {"tokens": list(self.tokens), "running": list(self.running)} | rows


def _turned(swaps: Callable[[int], bool], after: bool, tokens: int) -> int:
    return int(swaps(tokens) == after)


def longest(model: FittedModel, situation: Preemption) -> int:
    return BEYOND * max(situation.computed_tokens, round(model.ranges["recompute"]["computed_tokens"][1]))


def break_even(model: FittedModel, situation: Preemption, objective: Objective) -> BreakEven:
    """Lengths at which the choice turns, to the token: all of them up to :data:`EVERY_UP_TO`.

    Above, those that show between the edges of blocks, first and last tokens of a block both looked at.
    """

    def swaps(tokens: int) -> bool:
        return _log_ratio(_costs(model, as_long_as(situation, tokens)), objective) < 0

    return turning(model, situation, swaps)


def turning(model: FittedModel, situation: Preemption, swaps: Callable[[int], bool]) -> BreakEven:
    """The same of anything that chooses. ``swaps``: whether a victim of so many tokens is swapped."""
    up_to = longest(model, situation)
    lengths = _looked_at(up_to, situation.block_size)
    before = swaps(1)
    first: Kind = KINDS[before]
    turns = []
    for low, high in pairwise(lengths):
        after = swaps(high)
        if after != before:
            between = range(low + 1, high + 1)
            # Ascending in what it is looked up by: from what was chosen before to what is chosen after.
            at = between[bisect_left(between, 1, key=partial(_turned, swaps, after))]
            outside = any(cost.extrapolated for cost in _costs(model, as_long_as(situation, at)))
            turns.append(Turn(at, KINDS[after], outside))
        before = after
    gap = max((high - low for low, high in pairwise(lengths)), default=1)
    return BreakEven(first, tuple(turns), up_to, min(up_to, EVERY_UP_TO), gap)


def _looked_at(up_to: int, block_size: int) -> list[int]:
    """Ascending, from 1 to ``up_to``."""
    found = set(range(1, min(up_to, EVERY_UP_TO) + 1))
    if up_to > EVERY_UP_TO:
        first, last = EVERY_UP_TO // block_size, up_to // block_size
        blocks: Iterable[int] = range(first, last + 1)
        if last - first > MAX_EDGES:
            ratio = up_to / EVERY_UP_TO
            blocks = (round(EVERY_UP_TO * ratio ** (i / MAX_EDGES)) // block_size for i in range(MAX_EDGES + 1))
        edges = [block * block_size for block in blocks]
        found |= {at for edge in edges for at in (edge, edge + 1) if EVERY_UP_TO < at <= up_to} | {up_to}
    return sorted(found)


def grid(model: FittedModel, situation: Preemption, objective: Objective) -> Grid:
    """Lengths up to :func:`longest`, loads up to twice the highest trained, or asked for."""
    up_to = longest(model, situation)
    per_octave = COLUMNS / log(up_to / 16, 2) if up_to > 32 else COLUMNS
    tokens = _lengths(min(16, up_to), up_to, per_octave)
    most = max(2 * situation.running_requests, round(model.ranges["recompute"]["running_requests"][1]), LOADS - 1)
    running = tuple(sorted({round(most * i / (LOADS - 1)) for i in range(LOADS)}))
    rows = [[_costs(model, as_long_as(beside(situation, load), length)) for length in tokens] for load in running]
    return Grid(
        tokens,
        running,
        tuple(tuple(_log_ratio(costs, objective) for costs in row) for row in rows),
        tuple(tuple(not costs[1].log_ratio_low <= 0 <= costs[1].log_ratio_high for costs in row) for row in rows),
        tuple(tuple(costs[0].extrapolated or costs[1].extrapolated for costs in row) for row in rows),
    )


def _costs(model: FittedModel, situation: Preemption) -> tuple[Cost, ...]:
    return model.predict(situation, options_of(situation))


def _log_ratio(costs: tuple[Cost, ...], objective: Objective) -> float:
    again, swap = (objective.of(cost) for cost in costs)
    return log(swap / again) if again > 0 and swap > 0 else float((swap > again) - (swap < again))


def _lengths(low: int, high: int, per_octave: float) -> tuple[int, ...]:
    """Whole numbers from ``low`` to ``high``, evenly spaced on a log scale."""
    count = max(1, round(log(high / low, 2) * per_octave)) if high > low else 0
    return tuple(sorted({round(low * (high / low) ** (i / max(1, count))) for i in range(count + 1)}))
