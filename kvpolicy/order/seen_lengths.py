"""Output lengths seen so far, and what they say of a request that has got some tokens already."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
PROMPT_STEP = 2.0


def level_of(tokens: float) -> int:
    """Number of the level that a length of 1 or more is in."""
    return min(LEVELS - 1, int(log2(max(1.0, tokens)) / log2(STEP) + 1e-9))


@dataclass(frozen=True, slots=True)
class Lengths:
    """A histogram of output lengths. Frozen: an order's state."""

    weights: tuple[float, ...] = (PRIOR,) * LEVELS

    def seen(self, tokens: int) -> Lengths:
        level = level_of(tokens)
        weights = [DECAY * weight for weight in self.weights]
        weights[level] += 1.0
        return replace(self, weights=tuple(weights))

    def remaining(self, tokens: int, max_tokens: int) -> float:
        """Mean of the tokens still to come of a request that has got ``tokens`` of at most ``max_tokens``."""
        ends, rest = _ahead(self.weights, tokens, max_tokens)
        return max(1.0, sum(weight * (end - tokens) for weight, end in zip(rest, ends, strict=True)) / sum(rest))

    def index(self, prompt_tokens: int, tokens: int, max_tokens: int) -> float:
        """Gittins index per unit of KV memory: the best ratio, over horizons, of the probability to end within the
        horizon to the expected token-steps of memory until then."""
        ends, rest = _ahead(self.weights, tokens, max_tokens)
        left = total = sum(rest)
        spent = best = done = 0.0
        for weight, end in zip(rest, ends, strict=True):
            held = (end - tokens) * (prompt_tokens + (end + tokens) / 2)
            done += weight
            left -= weight
            spent += weight * held
            best = max(best, done / (spent + max(left, 0.0) * held))
        return best if total else 0.0


def _ahead(weights: tuple[float, ...], tokens: int, max_tokens: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Lengths still possible for a request that has got ``tokens``, in rising order, and their weights. A level counts
    by the share of it that lies beyond; what lies beyond ``max_tokens`` ends there."""
    last = max(max_tokens, tokens + 1)
    ends: list[float] = []
    rest: list[float] = []
    for level in range(level_of(tokens), LEVELS):
        low, high, end, weight = BOUNDS[level], BOUNDS[level + 1], MIDDLES[level], weights[level]
        if low < tokens and high < inf:
            weight *= (high - tokens) / (high - low)
            end = (tokens + high) / 2
        end = min(max(end, tokens + 1.0), last)
        if end >= last:
            weight += sum(weights[level + 1 :])
        ends.append(end)
        rest.append(max(weight, MIN_WEIGHT))
        if end >= last:
            break
    return tuple(ends), tuple(rest)
