"""Compares the tokens of two runs of the same requests. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpolicy.bench_warnings import FLOAT32, TIE_GAPS

TIE_GAP = TIE_GAPS[FLOAT32]
"""A first difference is a tie where the reference's two best log-probabilities are closer than this, in float32."""
TOKENS_PER_TIE = 50_000


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences of other runs from the reference."""

    tokens: int = 0
    ties: int = 0
    wrong: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether all differences are ties, and at most one in 50,000 tokens (one tie is always allowed)."""
        return not self.wrong and self.ties <= max(1, self.tokens // TOKENS_PER_TIE)

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(self.tokens + other.tokens, self.ties + other.ties, self.wrong + other.wrong)


def compare(
    reference: Sequence[Sequence[int]],
    gaps: Sequence[Sequence[float]],
    other: Sequence[Sequence[int]],
    name: str,
    tie_gap: float = TIE_GAP,
) -> Comparison:
    """Compare greedy tokens, request by request. Only the first difference counts: after it the texts may diverge.

    ``gaps``: the reference's best log-probability minus its second best, by request and token. ``name`` begins the
    messages. A gap below ``tie_gap`` is a tie. Raises ValueError where the numbers of requests differ.
    """
    ties, differences = 0, []
    for number, (expected, gap, actual) in enumerate(zip(reference, gaps, other, strict=True)):
        if len(expected) != len(actual):
            differences.append(f"{name}, request {number}: {len(expected)} tokens expected, {len(actual)} generated")
            continue
        position = next((i for i, (a, b) in enumerate(zip(expected, actual, strict=True)) if a != b), None)
        if position is None:
            continue
        if gap[position] < tie_gap:
            ties += 1
        else:
            differences.append(
                f"{name}, request {number}: token {position} is {actual[position]}, should be {expected[position]}"
            )
    return Comparison(sum(map(len, reference)), ties, tuple(differences))
