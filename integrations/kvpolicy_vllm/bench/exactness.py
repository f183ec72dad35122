"""Whether two runs of the same requests said the same. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TIE_GAP = 1e-4
"""A first difference where the reference's two best log-probabilities are closer than this is a tie: float32 sums
depend on the batch, and log-probabilities with them by up to 2e-5."""
TOKENS_PER_TIE = 50_000


@dataclass(frozen=True, slots=True)
class Comparison:
    """Where other runs differ from the reference."""

    tokens: int = 0
    ties: int = 0
    wrong: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """No difference but ties, and of these not more than one in 50,000 tokens (one is always allowed)."""
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
    """Greedy tokens by request. After a tie two texts rightly go apart, so only the first difference counts.

    ``gaps``: by request and token, the reference's best log-probability less its second best. ``name`` stands in the
    messages; closer than ``tie_gap`` is a tie. Raises ValueError where the requests are not as many.
    """
    ties, wrong = 0, []
    for number, (expected, gap, got) in enumerate(zip(reference, gaps, other, strict=True)):
        if len(expected) != len(got):
            wrong.append(f"{name}, request {number}: {len(expected)} tokens expected, {len(got)} came")
            continue
        at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b), None)
        if at is None:
            continue
        if gap[at] < tie_gap:
            ties += 1
        else:
            wrong.append(f"{name}, request {number}: token {at} is {got[at]}, should be {expected[at]}")
    return Comparison(sum(map(len, reference)), ties, tuple(wrong))
