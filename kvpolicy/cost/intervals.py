"""Split-conformal intervals from errors on held-out states, by bin of length and load.

A score is log(measured / predicted) of one state's median over its repeats. States are exchangeable; their rows are
not. A *margin* is half of an interval's width on the log scale, below and above the prediction.

The interval reaches from the a-th to the b-th smallest of a bin's n scores, where b - a is the smallest number for
which (b - a) / (n + 1) is the confidence (Vovk, Gammerman, Shafer 2005). The remaining scores are split between both
tails, so costs that are often underestimated get a larger margin above than below. With too few scores for two tails
the interval is symmetric, with the ceil(0.9 (n + 1))-th smallest absolute score as margin. With too few for that it is
infinite. It covers the typical cost of a situation, not every single preemption.

Outside the trained range the margin grows with the distance, at a rate found by inner extrapolation
(:mod:`kvpolicy.regression.conformal`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any, TypeVar

from kvpolicy.errors import InputError
from kvpolicy.events import KINDS, Kind
from kvpolicy.regression.conformal import CONFIDENCE, Margin, grown
from kvpolicy.stored_values import is_number, list_at, value_at

MIN_PER_BIN = 30

PREDICTED = ("recompute", "swap", "ratio")

Edges = tuple[float, ...]
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Misses:
    """Errors on one held-out state: its length and load, and log(measured / predicted) by quantity."""

    computed_tokens: float
    running_requests: float
    model: Mapping[str, float]
    """Keys ``recompute``, ``swap`` and ``ratio`` (of swap over recompute)."""
    law: Mapping[str, float]
    """The same for the law alone, without a learned residual."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """Margins around predictions, by bin. Bins are numbered by length, and within a length by load.

    Length bin i spans ``length_edges[i - 1]`` tokens to below ``length_edges[i]``. Its load bin j spans
    ``load_edges[i][j - 1]`` running requests to below ``load_edges[i][j]``.
    """

    length_edges: Edges
    load_edges: tuple[Edges, ...]
    """One entry per length."""
    inside: Mapping[str, tuple[Margin, ...]]
    """Margins within the trained range, one per bin."""
    outside: Mapping[str, tuple[Margin, ...]]
    """Margins just outside the trained range, one per bin; never narrower than ``inside``."""
    growth: Mapping[str, float]
    """Margin added on either side per unit of distance from the range; ``inf`` if too few states determine it."""
    states: tuple[int, ...]
    """Calibration states per bin."""

    def bin_of(self, computed_tokens: float, running_requests: float) -> int:
        return bin_number(self.length_edges, self.load_edges, computed_tokens, running_requests)

    def room(self, quantity: str, bin_index: int, extrapolated: bool, distance: float = 0.0) -> Margin:
        """Margins of ``recompute``, ``swap`` or ``ratio`` in a bin; ``inf`` if too few states could bound them.

        ``distance``: from the trained range, see :func:`kvpolicy.regression.conformal.distance_beyond`.
        """
        if not extrapolated:
            return self.inside[quantity][bin_index]
        below, above = self.outside[quantity][bin_index]
        return grown(below, self.growth[quantity], distance), grown(above, self.growth[quantity], distance)

    def span(self, bin_index: int) -> dict[str, float | None]:
        """Limits of a bin; None where there is no limit."""
        spans = [
            (*_sides(self.length_edges, i), *_sides(loads, j))
            for i, loads in enumerate(self.load_edges)
            for j in range(len(loads) + 1)
        ]
        names = ("tokens_from", "tokens_below", "running_from", "running_below")
        return dict(zip(names, spans[bin_index], strict=True))

    def to_dict(self) -> dict[str, Any]:
        """For JSON: an infinite margin is null."""
        return {
            "confidence": CONFIDENCE,
            "length_edges": list(self.length_edges),
            "load_edges": [list(edges) for edges in self.load_edges],
            "states": list(self.states),
            "inside": {
                quantity: [list(map(_finite_or_none, margin)) for margin in margins]
                for quantity, margins in self.inside.items()
            },
            "outside": {
                quantity: [list(map(_finite_or_none, margin)) for margin in margins]
                for quantity, margins in self.outside.items()
            },
            "growth": {quantity: _finite_or_none(self.growth[quantity]) for quantity in PREDICTED},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Intervals:
        """Raises InputError naming a field that is missing or invalid."""
        if value_at(values, "confidence") != CONFIDENCE:
            raise InputError(f"confidence is {values['confidence']!r}, should be {CONFIDENCE}")
        lengths = _ascending(value_at(values, "length_edges"), "length_edges")
        loads = tuple(_ascending(edges, "load_edges") for edges in list_at(values, "load_edges"))
        states = tuple(list_at(values, "states"))
        if len(loads) != len(lengths) + 1:
            raise InputError(f"load_edges holds {len(loads)} lists, should hold {len(lengths) + 1}")
        bins = sum(len(edges) + 1 for edges in loads)
        if len(states) != bins:
            raise InputError(f"states holds {len(states)} numbers, should hold {bins}")
        if not all(type(count) is int for count in states):
            raise InputError(f"states is {list(states)}, should hold whole numbers")
        inside, outside = (_margins(values, name, bins) for name in ("inside", "outside"))
        for quantity in PREDICTED:
            if any(
                max(map(float.__sub__, *pair)) > 0 for pair in zip(inside[quantity], outside[quantity], strict=True)
            ):
                raise InputError(f"outside.{quantity} is narrower than inside.{quantity}")
        return cls(
            lengths,
            loads,
            inside,
            outside,
            {quantity: _growth(value_at(values, "growth", quantity), quantity) for quantity in PREDICTED},
            states,
        )


def bin_number(
    length_edges: Edges, load_edges: tuple[Edges, ...], computed_tokens: float, running_requests: float
) -> int:
    """Number of a situation's bin, as in :class:`Intervals`."""
    length = bisect_right(length_edges, computed_tokens)
    first = sum([len(load_edges[i]) + 1 for i in range(length)])
    return first + bisect_right(load_edges[length], running_requests)


def unbounded() -> Intervals:
    """Infinite intervals, for a model that was never compared with measurements."""
    nothing = dict.fromkeys(PREDICTED, ((inf, inf),))
    return Intervals((), ((),), nothing, nothing, dict.fromkeys(PREDICTED, inf), (0,))


def _sides(edges: Edges, index: int) -> tuple[float | None, float | None]:
    padded = (None, *edges, None)
    return padded[index], padded[index + 1]


def _ascending(values: Any, name: str) -> Edges:
    if not isinstance(values, list | tuple) or not all(is_number(edge) and edge >= 0 for edge in values):
        raise InputError(f"{name} are {values!r}, should be finite numbers, 0 or above")
    edges = tuple(map(float, values))
    if list(edges) != sorted(set(edges)):
        raise InputError(f"{name} are not in ascending order")
    return edges


def _margins(values: Mapping[str, Any], name: str, bins: int) -> dict[str, tuple[Margin, ...]]:
    margins = {}
    for quantity in PREDICTED:
        pairs = list_at(values, name, quantity)
        if len(pairs) != bins or not all(map(_is_margin, pairs)):
            raise InputError(f"{name}.{quantity} should hold {bins} pairs of numbers, 0 or above, or null")
        margins[quantity] = tuple((_width(below), _width(above)) for below, above in pairs)
    return margins


def _is_margin(pair: Any) -> bool:
    sides = pair if isinstance(pair, list | tuple) else ()
    return len(sides) == 2 and all(side is None or (is_number(side) and side >= 0) for side in sides)


def _width(stored: float | None) -> float:
    return inf if stored is None else float(stored)


def _growth(value: Any, quantity: str) -> float:
    if value is not None and not (is_number(value) and value >= 0):
        raise InputError(f"growth.{quantity} is {value!r}, should be a number, 0 or above, or null")
    return _width(value)


def _finite_or_none(width: float) -> float | None:
    return None if width == inf else width


# ---- calibration ----


def conformal_margin(scores: Sequence[float], confidence: float = CONFIDENCE) -> Margin:
    """Margins below and above a prediction that contain the next score with at least this probability."""
    ordered, count = sorted(scores), len(scores)
    inner = ceil(confidence * (count + 1) - 1e-9)
    tails = count + 1 - inner
    if tails >= 2:
        low = tails // 2
        return max(0.0, -ordered[low - 1]), max(0.0, ordered[low + inner - 1])
    if inner > count:
        return inf, inf
    width = sorted(map(abs, scores))[inner - 1]
    return width, width


def carried_quantities(carried: Mapping[Kind, bool]) -> tuple[str, ...]:
    """Quantities whose residual is carried outside the trained range; the ratio is one if both options are."""
    kinds = tuple(kind for kind in KINDS if carried[kind])
    return (*kinds, "ratio") if len(kinds) == len(KINDS) else kinds


def calibrate(misses: Sequence[Misses], carried: Collection[str] = ()) -> Intervals:
    """Intervals from held-out states. Their growth outside the range is infinite until it is set.

    ``carried``: quantities whose residual is applied outside the range. For the others the law predicts alone there, so
    its errors count too.
    """
    lengths = octave_bins(misses, _tokens)
    by_load = [octave_bins(bin_states, _running) for bin_states in lengths]
    bins = [bin_states for loads in by_load for bin_states in loads]
    inside: dict[str, tuple[Margin, ...]] = {}
    outside: dict[str, tuple[Margin, ...]] = {}
    for quantity in PREDICTED:
        inside[quantity] = tuple(
            conformal_margin([state.model[quantity] for state in bin_states]) for bin_states in bins
        )
        law_margins = [conformal_margin([state.law[quantity] for state in bin_states]) for bin_states in bins]
        outside[quantity] = (
            inside[quantity] if quantity in carried else tuple(map(_wider, inside[quantity], law_margins))
        )
    return Intervals(
        tuple(_tokens(bin_states[0]) for bin_states in lengths[1:]),
        tuple(tuple(_running(bin_states[0]) for bin_states in loads[1:]) for loads in by_load),
        inside,
        outside,
        dict.fromkeys(PREDICTED, inf),
        tuple(map(len, bins)),
    )


def _wider(first: Margin, second: Margin) -> Margin:
    return max(first[0], second[0]), max(first[1], second[1])


def _enough(states: Sequence[object]) -> bool:
    return len(states) >= MIN_PER_BIN


def octave_bins(
    items: Iterable[Item], size: Callable[[Item], float], enough: Callable[[Sequence[Item]], bool] = _enough
) -> list[list[Item]]:
    """Bins by powers of two of the size, ascending; at least one. A bin without enough items is merged with its
    neighbour."""
    bins: list[list[Item]] = [[]]
    for item in sorted(items, key=size):
        if bins[-1] and _octave(size(item)) > _octave(size(bins[-1][-1])) and enough(bins[-1]):
            bins.append([])
        bins[-1].append(item)
    if len(bins) > 1 and not enough(bins[-1]):
        last = bins.pop()
        bins[-1] += last
    return bins


def _octave(value: float) -> int:
    return int(value).bit_length()


def _tokens(state: Misses) -> float:
    return state.computed_tokens


def _running(state: Misses) -> float:
    return state.running_requests
