"""Split-conformal intervals: how far predictions missed states they had not seen, by bin of length and load.

A score is log(measured / predicted) of one state's median over its repeats; states are exchangeable, their rows are
not. The interval reaches from the a-th to the b-th smallest of a bin's n scores, with b - a the least number for which
(b - a) / (n + 1) is the confidence (Vovk, Gammerman, Shafer 2005), and the rest shared between both tails: costs that
are often underestimated get more room above than below. With too few scores for two tails the interval is symmetric,
the ceil(0.9 (n + 1))-th smallest miss to either side; with too few for that it is infinite, because nothing finite
could be promised. It covers the typical cost of a situation, not every single preemption.

Outside the trained range room is added per unit of distance, as much as inner extrapolation tells
(:mod:`kvpolicy.regression.conformal`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy.events import KINDS, Kind
from kvpolicy.regression.conformal import CONFIDENCE, Room, grown

MIN_PER_BIN = 30

PREDICTED = ("recompute", "swap", "ratio")

Edges = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Misses:
    """One state not seen in fitting: its length and load, and log(measured / predicted) by what was predicted."""

    computed_tokens: float
    running_requests: float
    model: Mapping[str, float]
    """Keys ``recompute``, ``swap`` and ``ratio`` (of swap over recompute)."""
    law: Mapping[str, float]
    """The same for the formula alone, without a learned residual."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """Room around predictions, by bin. Bins are numbered length by length, within a length load by load.

    Length i goes from ``length_edges[i - 1]`` tokens to below ``length_edges[i]``, its load j from
    ``load_edges[i][j - 1]`` running requests to below ``load_edges[i][j]``.
    """

    length_edges: Edges
    load_edges: tuple[Edges, ...]
    """One entry per length."""
    inside: Mapping[str, tuple[Room, ...]]
    """Within the trained range, one entry per bin."""
    outside: Mapping[str, tuple[Room, ...]]
    """At its edge, seen from outside: never narrower."""
    growth: Mapping[str, float]
    """Room added to either side per unit of distance from the range; ``inf`` where too few states tell."""
    states: tuple[int, ...]
    """Calibration states per bin."""

    def bin_of(self, computed_tokens: float, running_requests: float) -> int:
        return bin_number(self.length_edges, self.load_edges, computed_tokens, running_requests)

    def room(self, of: str, number: int, extrapolated: bool, distance: float = 0.0) -> Room:
        """Of ``recompute``, ``swap`` or ``ratio`` in bin ``number``; ``inf`` where too few states could bound it.

        ``distance``: how far outside the trained range, see :func:`kvpolicy.regression.conformal.distance_beyond`.
        """
        if not extrapolated:
            return self.inside[of][number]
        below, above = self.outside[of][number]
        return grown(below, self.growth[of], distance), grown(above, self.growth[of], distance)

    def span(self, number: int) -> dict[str, float | None]:
        """What bin ``number`` holds; None where there is no limit."""
        spans = [
            (*_sides(self.length_edges, i), *_sides(loads, j))
            for i, loads in enumerate(self.load_edges)
            for j in range(len(loads) + 1)
        ]
        names = ("tokens_from", "tokens_below", "running_from", "running_below")
        return dict(zip(names, spans[number], strict=True))

    def to_dict(self) -> dict[str, Any]:
        """For JSON: infinite room is null."""
        return {
            "confidence": CONFIDENCE,
            "length_edges": list(self.length_edges),
            "load_edges": [list(edges) for edges in self.load_edges],
            "states": list(self.states),
            "inside": {of: [list(map(_finite_or_none, room)) for room in rooms] for of, rooms in self.inside.items()},
            "outside": {of: [list(map(_finite_or_none, room)) for room in rooms] for of, rooms in self.outside.items()},
            "growth": {of: _finite_or_none(self.growth[of]) for of in PREDICTED},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Intervals:
        """Raises KeyError for a field that is missing, ValueError or TypeError for one that is wrong."""
        if values["confidence"] != CONFIDENCE:
            raise InputError(f"confidence is {values['confidence']!r}, should be {CONFIDENCE}")
        lengths = _ascending(values["length_edges"], "length_edges")
        loads = tuple(_ascending(edges, "load_edges") for edges in values["load_edges"])
        states = tuple(map(int, values["states"]))
        if len(loads) != len(lengths) + 1:
            raise InputError(f"load_edges holds {len(loads)} lists, should hold {len(lengths) + 1}")
        bins = sum(len(edges) + 1 for edges in loads)
        if len(states) != bins:
            raise InputError(f"states holds {len(states)} numbers, should hold {bins}")
        inside, outside = (_rooms(values, name, bins) for name in ("inside", "outside"))
        for of in PREDICTED:
            if any(max(map(float.__sub__, *both)) > 0 for both in zip(inside[of], outside[of], strict=True)):
                raise InputError(f"outside.{of} is narrower than inside.{of}")
        return cls(lengths, loads, inside, outside, {of: _growth(values["growth"][of], of) for of in PREDICTED}, states)


def bin_number(
    length_edges: Edges, load_edges: tuple[Edges, ...], computed_tokens: float, running_requests: float
) -> int:
    """Position of a situation's bin, numbered as in :class:`Intervals`."""
    length = bisect_right(length_edges, computed_tokens)
    before = sum([len(load_edges[i]) + 1 for i in range(length)])
    return before + bisect_right(load_edges[length], running_requests)


def unbounded() -> Intervals:
    """Of a model that was never compared with measurements: nothing is promised."""
    nothing = dict.fromkeys(PREDICTED, ((inf, inf),))
    return Intervals((), ((),), nothing, nothing, dict.fromkeys(PREDICTED, inf), (0,))


def _sides(edges: Edges, number: int) -> tuple[float | None, float | None]:
    padded = (None, *edges, None)
    return padded[number], padded[number + 1]


def _ascending(values: Any, name: str) -> Edges:
    edges = tuple(map(float, values))
    if not all(0 <= edge < inf for edge in edges):
        raise InputError(f"{name} are {list(edges)}, should be finite numbers, 0 or above")
    if list(edges) != sorted(set(edges)):
        raise InputError(f"{name} are not in ascending order")
    return edges


def _rooms(values: Mapping[str, Any], name: str, bins: int) -> dict[str, tuple[Room, ...]]:
    found = {}
    for of in PREDICTED:
        rooms = [tuple(inf if side is None else float(side) for side in room) for room in values[name][of]]
        if len(rooms) != bins or not all(len(room) == 2 and all(side >= 0 for side in room) for room in rooms):
            raise InputError(f"{name}.{of} should hold {bins} pairs of numbers, 0 or above")
        found[of] = tuple((room[0], room[1]) for room in rooms)
    return found


def _growth(value: Any, of: str) -> float:
    if value is not None and (type(value) not in (int, float) or not 0 <= value < inf):
        raise InputError(f"growth.{of} is {value!r}, should be a number, 0 or above, or null")
    return inf if value is None else float(value)


def _finite_or_none(width: float) -> float | None:
    return None if width == inf else width


# ---- calibration ----


def conformal_room(scores: Sequence[float], confidence: float = CONFIDENCE) -> Room:
    """Room below and above a prediction that holds the next score with that probability, or more."""
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


def kept_of(carried: Mapping[Kind, bool]) -> tuple[str, ...]:
    """Of what predictions are the model's outside the range too; of the ratio where both options' are."""
    kept = tuple(kind for kind in KINDS if carried[kind])
    return (*kept, "ratio") if len(kept) == len(KINDS) else kept


def calibrate(misses: Sequence[Misses], carried: Collection[str] = ()) -> Intervals:
    """Intervals from states that the predictions had not seen; what they grow by outside is still to be told.

    ``carried``: of what the residual is kept outside the range. Elsewhere the formula is alone there, and its own
    misses count too.
    """
    lengths = _bins(misses, _tokens, _octave_of_length)
    by_load = [_bins(some, _running, _octave_of_load) for some in lengths]
    bins = [some for loads in by_load for some in loads]
    inside: dict[str, tuple[Room, ...]] = {}
    outside: dict[str, tuple[Room, ...]] = {}
    for of in PREDICTED:
        inside[of] = tuple(conformal_room([state.model[of] for state in some]) for some in bins)
        law = [conformal_room([state.law[of] for state in some]) for some in bins]
        outside[of] = inside[of] if of in carried else tuple(map(_wider, inside[of], law))
    return Intervals(
        tuple(_tokens(some[0]) for some in lengths[1:]),
        tuple(tuple(_running(some[0]) for some in loads[1:]) for loads in by_load),
        inside,
        outside,
        dict.fromkeys(PREDICTED, inf),
        tuple(map(len, bins)),
    )


def _wider(one: Room, other: Room) -> Room:
    return max(one[0], other[0]), max(one[1], other[1])


def _bins(
    misses: Sequence[Misses], size: Callable[[Misses], float], octave: Callable[[Misses], int]
) -> list[list[Misses]]:
    """By powers of two; a bin of fewer than 30 states takes in its neighbour. Ascending; at least one."""
    bins: list[list[Misses]] = [[]]
    for state in sorted(misses, key=size):
        if len(bins[-1]) >= MIN_PER_BIN and octave(state) > octave(bins[-1][-1]):
            bins.append([])
        bins[-1].append(state)
    if len(bins) > 1 and len(bins[-1]) < MIN_PER_BIN:
        last = bins.pop()
        bins[-1] += last
    return bins


def _tokens(state: Misses) -> float:
    return state.computed_tokens


def _running(state: Misses) -> float:
    return state.running_requests


def _octave_of_length(state: Misses) -> int:
    return int(state.computed_tokens).bit_length()


def _octave_of_load(state: Misses) -> int:
    return int(state.running_requests).bit_length()
