"""A whole cost model as two flat rows of numbers, in the order :mod:`kvpolicy.cost.kernel` reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvpolicy.cost import kernel
from kvpolicy.cost.forest import Forest, Nodes
from kvpolicy.cost.intervals import PREDICTED, Intervals
from kvpolicy.cost.kernel import END, NONE, OPTION, OPTION_SIZE
from kvpolicy.cost.laws import Law, LinearLaw, RecomputeRoofline, SwapRoofline
from kvpolicy.events import KINDS, Kind
from kvpolicy.features import FEATURES, GROWING

LAWS: tuple[tuple[type, int], ...] = (
    (RecomputeRoofline, kernel.RECOMPUTE_ROOFLINE),
    (SwapRoofline, kernel.SWAP_ROOFLINE),
    (LinearLaw, kernel.LINEAR),
)

Check = tuple[int, float, float, float]
"""Position, lowest and highest of a feature that a prediction depends on, and the power of length it grows with."""


@dataclass(frozen=True, slots=True)
class Packed:
    """``n`` and ``c`` of :mod:`kvpolicy.cost.kernel`; ``c`` without the rows it ends with to be written to."""

    n: tuple[int, ...]
    c: tuple[float, ...]


class Flat:
    """Two growing rows of numbers."""

    def __init__(self) -> None:
        self.n: list[int] = [0] * END
        self.c: list[float] = []

    def whole(self, values: Sequence[int]) -> int:
        """Appends to ``n``; where they begin."""
        self.n += values
        return len(self.n) - len(values)

    def real(self, values: Sequence[float]) -> int:
        """Appends to ``c``; where they begin."""
        self.c += values
        return len(self.c) - len(values)


def pack(
    laws: Mapping[Kind, Law],
    delays: Mapping[Kind, Law],
    residuals: Mapping[Kind, Forest],
    checks: Mapping[Kind, tuple[Check, ...]],
    floor_s: Mapping[Kind, float],
    others_share: Mapping[Kind, float],
    intervals: Intervals,
    carried: Mapping[Kind, bool],
) -> Packed:
    """The fields of a :class:`~kvpolicy.cost.model.FittedModel` by their names there."""
    flat = Flat()
    _add_intervals(flat, intervals)
    for option, kind in enumerate(KINDS):
        at = OPTION + option * OPTION_SIZE
        flat.n[at + kernel.LAW : at + kernel.LAW + 3] = _law(flat, laws[kind])
        flat.n[at + kernel.DELAY : at + kernel.DELAY + 3] = _law(flat, delays.get(kind))
        flat.n[at + kernel.FLOOR_AT] = flat.real([floor_s[kind]])
        flat.n[at + kernel.SHARE_AT] = flat.real([others_share[kind]])
        flat.n[at + kernel.CHECKED] = len(checks[kind])
        growing = [(check[0], int(FEATURES[check[0]] in GROWING)) for check in checks[kind]]
        flat.n[at + kernel.CHECKED_AT] = flat.whole([value for both in growing for value in both])
        flat.n[at + kernel.RANGES_AT] = flat.real([edge for _, *edges in checks[kind] for edge in edges])
        flat.n[at + kernel.CARRIED] = int(carried[kind])
        flat.n[at + kernel.TABLE_AT] = NONE
        if kind in residuals:
            _add_nodes(flat, at, residuals[kind].nodes)
    return Packed(tuple(flat.n), tuple(flat.c))


def _law(flat: Flat, law: Law | None) -> list[int]:
    if law is None:
        return [NONE, 0, 0]
    number = next(number for one, number in LAWS if isinstance(law, one))
    start = flat.real(law.coefficients)
    return [number, start, start + len(law.coefficients)]


def _add_intervals(flat: Flat, intervals: Intervals) -> None:
    flat.n[kernel.LENGTHS] = len(intervals.length_edges)
    flat.n[kernel.LENGTHS_AT] = flat.real(intervals.length_edges)
    before = accumulate((len(edges) + 1 for edges in intervals.load_edges), initial=0)
    loads = [(len(edges), flat.real(edges), count) for edges, count in zip(intervals.load_edges, before, strict=False)]
    flat.n[kernel.LOADS_AT] = flat.whole([value for one in loads for value in one])
    flat.n[kernel.BINS] = len(intervals.states)
    rooms = [room for of in PREDICTED for where in (intervals.inside, intervals.outside) for room in where[of]]
    flat.n[kernel.ROOMS_AT] = flat.real([side for room in rooms for side in room])
    flat.n[kernel.GROWTH_AT] = flat.real([intervals.growth[of] for of in PREDICTED])


def _add_nodes(flat: Flat, at: int, nodes: Nodes) -> None:
    children = zip(nodes.feature, nodes.left, nodes.right, strict=True)
    flat.n[at + kernel.TREES] = len(nodes.roots)
    flat.n[at + kernel.NODES_AT] = flat.whole([*nodes.roots, *(value for node in children for value in node)])
    flat.n[at + kernel.THRESHOLDS_AT] = flat.real(nodes.threshold)
    flat.n[at + kernel.LEAVES_AT] = flat.real(nodes.leaf)
