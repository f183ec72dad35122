"""Where the choice turns: the break-even lengths at one load, and the choice over a grid of lengths and loads."""

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
from kvpolicy.explanation.question import with_length, with_running
from kvpolicy.policy import Objective

BEYOND = 4
"""The longest length evaluated, as a multiple of the longest trained, or of the victim's if that is more."""
EVERY_UP_TO = 4096
"""Tokens up to which every length is evaluated: swap's cost rises in steps of whole blocks, so the choice may turn
at any of them."""
MAX_EDGES = 1024
"""Number of block edges evaluated above :data:`EVERY_UP_TO`, at least one block apart."""
LOADS = 13
COLUMNS = 49


@dataclass(frozen=True, slots=True)
class Turn:
    """A length from which on another option is chosen."""

    tokens: int
    to: Kind
    extrapolated: bool
    """Whether ``tokens`` lies outside the trained range."""


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The choice along the victim's length, all else equal."""

    first: Kind
    """The choice for a victim of one token."""
    turns: tuple[Turn, ...]
    up_to_tokens: int
    every_up_to: int
    """Tokens up to which ``turns`` is complete. Above, two turns between evaluated lengths may be missed."""
    widest_gap: int
    """Largest distance between neighbouring evaluated lengths, tokens."""

    def to_dict(self) -> dict[str, Any]:
        turns = [{"tokens": turn.tokens, "to": turn.to, "extrapolated": turn.extrapolated} for turn in self.turns]
        resolution = {name: getattr(self, name) for name in ("up_to_tokens", "every_up_to", "widest_gap")}
        return {"first": self.first, "turns": turns} | resolution


@dataclass(frozen=True, slots=True)
class Grid:
    """Logarithm of swap's cost over recompute's, in terms of the objective. A row per load, a column per length."""

    tokens: tuple[int, ...]
    running: tuple[int, ...]
    log_ratio: tuple[tuple[float, ...], ...]
    sure: tuple[tuple[bool, ...], ...]
    """Whether the interval of the ratio of engine times excludes 1."""
    extrapolated: tuple[tuple[bool, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        rows = {name: [list(row) for row in getattr(self, name)] for name in ("log_ratio", "sure", "extrapolated")}
        return {"tokens": list(self.tokens), "running": list(self.running)} | rows


def _matches(swaps: Callable[[int], bool], after: bool, tokens: int) -> int:
    return int(swaps(tokens) == after)


def longest(model: FittedModel, situation: Preemption) -> int:
    """The longest length that is evaluated, tokens."""
    return BEYOND * max(situation.computed_tokens, round(model.ranges["recompute"]["computed_tokens"][1]))


def break_even(model: FittedModel, situation: Preemption, objective: Objective) -> BreakEven:
    """Find the lengths at which the cheaper option changes, exact to the token.

    Complete up to :data:`EVERY_UP_TO`. Above, only the first and last tokens of blocks are evaluated.
    """

    def swaps(tokens: int) -> bool:
        return _log_ratio(_costs(model, with_length(situation, tokens, model.provenance)), objective) < 0

    return choice_turns(model, situation, swaps)


def choice_turns(model: FittedModel, situation: Preemption, swaps: Callable[[int], bool]) -> BreakEven:
    """Find the lengths at which any rule's choice changes. ``swaps``: whether a victim of that many tokens is swapped.

    The model gives the trained range; resolution as for :func:`break_even`.
    """
    up_to = longest(model, situation)
    lengths = _evaluated_lengths(up_to, situation.block_size)
    swapped_below = swaps(1)
    first: Kind = KINDS[swapped_below]
    turns = []
    for low, high in pairwise(lengths):
        swapped_above = swaps(high)
        if swapped_above != swapped_below:
            range_above = range(low + 1, high + 1)
            # Within the range the choice changes once, so that bisection finds the first length with the new choice.
            tokens = range_above[bisect_left(range_above, 1, key=partial(_matches, swaps, swapped_above))]
            outside = any(cost.extrapolated for cost in _costs(model, with_length(situation, tokens, model.provenance)))
            turns.append(Turn(tokens, KINDS[swapped_above], outside))
        swapped_below = swapped_above
    gap = max((high - low for low, high in pairwise(lengths)), default=1)
    return BreakEven(first, tuple(turns), up_to, min(up_to, EVERY_UP_TO), gap)


def _evaluated_lengths(up_to: int, block_size: int) -> list[int]:
    """Lengths to evaluate, ascending from 1 to ``up_to``."""
    lengths = set(range(1, min(up_to, EVERY_UP_TO) + 1))
    if up_to > EVERY_UP_TO:
        first, last = EVERY_UP_TO // block_size, up_to // block_size
        blocks: Iterable[int] = range(first, last + 1)
        if last - first > MAX_EDGES:
            ratio = up_to / EVERY_UP_TO
            blocks = (round(EVERY_UP_TO * ratio ** (i / MAX_EDGES)) // block_size for i in range(MAX_EDGES + 1))
        edges = [block * block_size for block in blocks]
        lengths |= {tokens for edge in edges for tokens in (edge, edge + 1) if EVERY_UP_TO < tokens <= up_to} | {up_to}
    return sorted(lengths)


def grid(model: FittedModel, situation: Preemption, objective: Objective) -> Grid:
    """Evaluate lengths up to :func:`longest`, and loads up to the highest trained or twice the situation's."""
    up_to = longest(model, situation)
    per_octave = COLUMNS / log(up_to / 16, 2) if up_to > 32 else COLUMNS
    tokens = _lengths(min(16, up_to), up_to, per_octave)
    max_running = max(
        2 * situation.running_requests, round(model.ranges["recompute"]["running_requests"][1]), LOADS - 1
    )
    running = tuple(sorted({round(max_running * i / (LOADS - 1)) for i in range(LOADS)}))
    rows = [
        [_costs(model, with_length(with_running(situation, load), length, model.provenance)) for length in tokens]
        for load in running
    ]
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
    recompute, swap = (objective.of(cost) for cost in costs)
    return log(swap / recompute) if recompute > 0 and swap > 0 else float((swap > recompute) - (swap < recompute))


def _lengths(low: int, high: int, per_octave: float) -> tuple[int, ...]:
    """Whole numbers from ``low`` to ``high``, evenly spaced on a log scale."""
    count = max(1, round(log(high / low, 2) * per_octave)) if high > low else 0
    return tuple(sorted({round(low * (high / low) ** (i / max(1, count))) for i in range(count + 1)}))
