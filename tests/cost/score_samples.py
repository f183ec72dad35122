"""States whose predictions missed by known scores."""

from __future__ import annotations

from kvpolicy.cost.intervals import (
    PREDICTED,
    Misses,
)


def misses(tokens: float, score: float, running: float = 0, law: float | None = None) -> Misses:
    scores, of_law = dict.fromkeys(PREDICTED, score), dict.fromkeys(PREDICTED, score if law is None else law)
    return Misses(tokens, running, scores, of_law)


def spread(tokens: float, size: float, count: int = 30, running: float = 0) -> list[Misses]:
    """States missed by ``size`` either way, in turns."""
    return [misses(tokens, size * (1 if i % 2 else -1), running) for i in range(count)]
