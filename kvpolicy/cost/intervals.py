"""Split-conformal intervals: how far predictions missed states they had not seen, by bin of length.

A score is |log(measured / predicted)| of one state's median over its repeats; states are exchangeable, their rows are
not. With n scores in a bin, the interval of confidence 90% is the ceil(0.9 (n + 1))-th smallest to either side
(Vovk, Gammerman, Shafer 2005); where there is no such score it is infinite, because nothing finite could be promised.
It covers the typical cost of a situation, not every single preemption.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any

CONFIDENCE = 0.9
FEWEST_PER_BIN = 30
WIDENING = 2.0
"""Outside the trained range nothing is promised: the wider of formula and model, times this convention."""


@dataclass(frozen=True, slots=True)
class Misses:
    """One held-out state: its length, and |log(measured / predicted)| by what was predicted."""

    computed_tokens: float
    model: Mapping[str, float]
    """Keys ``recompute``, ``swap`` and ``ratio`` (of swap over recompute)."""
    law: Mapping[str, float]
    """The same for the formula alone, without a learned residual."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """Half-widths on the log scale. Bin i holds lengths from ``edges[i - 1]`` to below ``edges[i]``."""

    edges: tuple[float, ...]
    inside: Mapping[str, tuple[float, ...]]
    outside: Mapping[str, tuple[float, ...]]
    states: tuple[int, ...]
    """Calibration states per bin."""

    def half_width(self, of: str, computed_tokens: float, extrapolated: bool) -> float:
        """Of ``recompute``, ``swap`` or ``ratio``; ``inf`` where too few states were measured to bound it."""
        widths = self.outside if extrapolated else self.inside
        return widths[of][bisect_right(self.edges, computed_tokens)]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: an infinite half-width is null."""
        return {
            "confidence": CONFIDENCE,
            "edges": list(self.edges),
            "states": list(self.states),
            "inside": {of: list(map(_finite_or_none, widths)) for of, widths in self.inside.items()},
            "outside": {of: list(map(_finite_or_none, widths)) for of, widths in self.outside.items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Intervals:
        """Raises KeyError for a field that is missing, ValueError for one that is wrong."""
        edges = tuple(map(float, values["edges"]))
        states = tuple(map(int, values["states"]))
        bins = len(edges) + 1
        if list(edges) != sorted(set(edges)):
            raise ValueError("edges are not in ascending order")
        if len(states) != bins:
            raise ValueError(f"states holds {len(states)} numbers, should hold {bins}")
        return cls(edges, _widths(values, "inside", bins), _widths(values, "outside", bins), states)


PREDICTED = ("recompute", "swap", "ratio")


def unbounded() -> Intervals:
    """Of a model that was never compared with measurements: nothing is promised."""
    nothing = dict.fromkeys(PREDICTED, (inf,))
    return Intervals((), nothing, nothing, (0,))


def _widths(values: Mapping[str, Any], name: str, bins: int) -> dict[str, tuple[float, ...]]:
    found = {}
    for of in PREDICTED:
        widths = tuple(inf if width is None else float(width) for width in values[name][of])
        if len(widths) != bins or not all(width >= 0 for width in widths):
            raise ValueError(f"{name}.{of} should hold {bins} numbers, 0 or above")
        found[of] = widths
    return found


def _finite_or_none(width: float) -> float | None:
    return None if width == inf else width


def conformal_quantile(scores: Sequence[float], confidence: float = CONFIDENCE) -> float:
    """The ceil(confidence (n + 1))-th smallest score; ``inf`` where n is too small for it."""
    rank = ceil(confidence * (len(scores) + 1) - 1e-9)
    return sorted(scores)[rank - 1] if rank <= len(scores) else inf


def calibrate(misses: Sequence[Misses]) -> Intervals:
    """Intervals from states that the predictions had not seen."""
    bins = _bins(sorted(misses, key=lambda state: state.computed_tokens))
    inside: dict[str, tuple[float, ...]] = {}
    outside: dict[str, tuple[float, ...]] = {}
    for of in PREDICTED:
        inside[of] = tuple(conformal_quantile([state.model[of] for state in some]) for some in bins)
        law = (conformal_quantile([state.law[of] for state in some]) for some in bins)
        outside[of] = tuple(WIDENING * max(pair) for pair in zip(inside[of], law, strict=True))
    edges = tuple(some[0].computed_tokens for some in bins[1:])
    return Intervals(edges, inside, outside, tuple(map(len, bins)))


def _bins(misses: Sequence[Misses]) -> list[list[Misses]]:
    """By powers of two of the length; a bin of fewer than 30 states takes in its neighbour. Never empty."""
    bins: list[list[Misses]] = [[]]
    for state in misses:
        full = len(bins[-1]) >= FEWEST_PER_BIN
        if full and _octave(state.computed_tokens) > _octave(bins[-1][-1].computed_tokens):
            bins.append([])
        bins[-1].append(state)
    if len(bins) > 1 and len(bins[-1]) < FEWEST_PER_BIN:
        last = bins.pop()
        bins[-1] += last
    return bins


def _octave(tokens: float) -> int:
    return int(tokens).bit_length()
