"""Output lengths seen so far, and what they say of a request that has got some tokens already."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, log2

STEP = 1.25
"""Ratio of neighbouring levels of length."""
LEVELS = 64
"""The last one holds all lengths from 1.25^63, over a million tokens, on."""
BOUNDS: tuple[float, ...] = (*(STEP**level for level in range(LEVELS)), inf)
MIDDLES: tuple[float, ...] = tuple(bound * STEP**0.5 for bound in BOUNDS[:LEVELS])
PRIOR = 4.0 / LEVELS
"""Weight of each level before any length was seen: as of four requests with lengths spread evenly over the levels."""
MIN_WEIGHT = 1e-12
"""So that no length is impossible."""
DECAY = 0.999
"""Weight of a length over that of the next one: about the last thousand count."""
MAX_TABLES = 256
"""Numbers of tokens for which what is ahead is remembered, until another length is seen."""


def level_of(tokens: float) -> int:
    """Number of the level that a length of 1 or more is in."""
    return min(LEVELS - 1, int(log2(max(1.0, tokens)) / log2(STEP) + 1e-9))


Weights = tuple[float, ...]
Ahead = tuple[tuple[float, ...], Weights, Weights]
"""Lengths still possible, in rising order, their weights, and the same weights, none below :data:`MIN_WEIGHT`."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A histogram of output lengths. Frozen: an order's state."""

    weights: tuple[float, ...] = (PRIOR,) * LEVELS
    _tables: dict[int, Ahead] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By tokens got, what is ahead of a request without a limit: it follows from the weights, and is made when it is
    asked for."""

    def seen(self, tokens: int) -> Lengths:
        level = level_of(tokens)
        weights = [DECAY * weight for weight in self.weights]
        weights[level] += 1.0
        return Lengths(tuple(weights))

    def remaining(self, tokens: int, max_tokens: int) -> float:
        """Mean of the tokens still to come of a request that has got ``tokens`` of at most ``max_tokens``."""
        ends, rest = self._ahead(tokens, max_tokens)
        return max(1.0, sum(weight * (end - tokens) for weight, end in zip(rest, ends, strict=True)) / sum(rest))

    def index(self, prompt_tokens: int, tokens: int, max_tokens: int) -> float:
        """Gittins index per unit of KV memory: the best ratio, over horizons, of the probability to end within the
        horizon to the expected token-steps of memory until then."""
        ends, rest = self._ahead(tokens, max_tokens)
        left = total = sum(rest)
        spent = best = done = 0.0
        for weight, end in zip(rest, ends, strict=True):
            held = (end - tokens) * (prompt_tokens + (end + tokens) / 2)
            done += weight
            left -= weight
            spent += weight * held
            best = max(best, done / (spent + max(left, 0.0) * held))
        return best if total else 0.0

    def _ahead(self, tokens: int, max_tokens: int) -> tuple[Sequence[float], Sequence[float]]:
        """Lengths still possible for a request that has got ``tokens``, in rising order, and their weights. What lies
        beyond ``max_tokens`` ends there."""
        table = self._tables.get(tokens)
        if table is None:
            if len(self._tables) >= MAX_TABLES:
                self._tables.clear()
            table = self._tables[tokens] = _without_limit(self.weights, tokens)
        ends, shares, rest = table
        last = max(max_tokens, tokens + 1)
        cut = bisect_left(ends, last)
        if cut == len(ends):
            return ends, rest
        beyond = sum(self.weights[level_of(tokens) + cut + 1 :])
        return (*ends[:cut], last), (*rest[:cut], max(shares[cut] + beyond, MIN_WEIGHT))


def _without_limit(weights: Weights, tokens: int) -> Ahead:
    """A level counts by the share of it that lies beyond ``tokens``."""
    ends: list[float] = []
    shares: list[float] = []
    for level in range(level_of(tokens), LEVELS):
        low, high, end, weight = BOUNDS[level], BOUNDS[level + 1], MIDDLES[level], weights[level]
        if low < tokens and high < inf:
            weight *= (high - tokens) / (high - low)
            end = (tokens + high) / 2
        ends.append(max(end, tokens + 1.0))
        shares.append(weight)
    return tuple(ends), tuple(shares), tuple(max(share, MIN_WEIGHT) for share in shares)
