"""What a prediction is made of, as functions of numbers: run as they are, and compiled (:mod:`kvpolicy.cost.compile`).

They read a whole model out of two rows of numbers, whole ones ``n`` and real ones ``c``, which :func:`pack` writes.
One home for each rule: the plain and the compiled path cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, inf, log

from kvpolicy.cost.forest import Forest, Nodes
from kvpolicy.cost.intervals import PREDICTED, Intervals
from kvpolicy.cost.laws import (
    Law,
    LinearLaw,
    Parts,
    RecomputeRoofline,
    SwapRoofline,
    linear_parts,
    recompute_seconds,
    swap_seconds,
)
from kvpolicy.events import KINDS, Cost, Kind, Option, Preemption
from kvpolicy.features import FEATURES, GROWING, Row, recompute_row, swap_row, usable
from kvpolicy.regression.conformal import distance_beyond, grown

COUNT = len(FEATURES)
RECOMPUTE, SWAP, RATIO = 0, 1, 2
MAX_EXPONENT = 600.0

# Where in n: of the whole model,
LENGTHS, LENGTHS_AT, LOADS_AT, BINS, ROOMS_AT, SCRATCH_AT, GROWTH_AT = range(7)
# and of one option, from OPTION + option * OPTION_SIZE on. What ends in _AT is a position in c, but for CHECKED_AT,
# NODES_AT and TABLE_AT, which are in n.
OPTION = 7
(
    LAW, LAW_AT, LAW_END, DELAY, DELAY_AT, DELAY_END, FLOOR_AT, SHARE_AT, CHECKED, CHECKED_AT, RANGES_AT, TREES,
    NODES_AT, THRESHOLDS_AT, LEAVES_AT, TABLE_AT, CARRIED,
) = range(17)  # fmt: skip
OPTION_SIZE = 17
RANGE = 3
"""Numbers per checked feature: lowest, highest, power of length."""
END = OPTION + 2 * OPTION_SIZE

RECOMPUTE_ROOFLINE, SWAP_ROOFLINE, LINEAR = 0, 1, 2
NONE = -1
"""For DELAY: the model predicts none. For TABLE_AT: the forest is walked node by node."""

NODE = 3
"""Whole numbers per node: feature, left child, right child."""
LEAVES = 32
"""Leaves per tree of a forest that is kept as a table: as many as a mask has bits."""
MASK = 0xFFFFFFFF
HASH = 0x077CB531
"""De Bruijn's sequence: times a power of two, its upper 5 of 32 bits are another number for each."""
HASH_SHIFT = 27
TABLE, TABLE_FEATURE = 4, 4
"""Whole numbers before a table's features, and of each of them."""

INSIDE, ABOVE, BELOW, FAR = range(4)

OptionCost = tuple[float, float, float, float, float, float, float, bool, float, float]
"""engine_s, save_s, load_s, recompute_s, stall_s, low_s, high_s, extrapolated, victim_delay_s; and how far outside."""
NO_COST: OptionCost = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, False, 0.0, 0.0)

Pair = tuple[
    bool, float, float,
    float, float, float, float, float, float, float, bool, float,
    float, float, float, float, float, float, float, bool, float,
]  # fmt: skip
"""Whether all features are usable; the interval of the log ratio; the costs of recompute and of swap."""

Predictor = Callable[[Preemption, Sequence[Option]], tuple[Cost, ...] | None]
"""A model's ``predict``, compiled; None for options, or features, that are not for it."""


def law_parts(law: int, x: Sequence[float], c: Sequence[float]) -> Parts:
    """Of the law of that number with its coefficients."""
    if law == RECOMPUTE_ROOFLINE:
        return 0.0, 0.0, recompute_seconds(x, c)
    if law == SWAP_ROOFLINE:
        save, load = swap_seconds(x, c)
        return save, load, 0.0
    return linear_parts(x, c)


def price(
    n: Sequence[int], c: Sequence[float], option: int, x: Sequence[float], edge: MutableSequence[float]
) -> tuple[float, float, float, float, bool]:
    """engine_s, its parts, and whether ``x`` is outside the trained range. ``edge`` is overwritten.

    Inside the range the law's prediction times exp(residual), and outside where the residual is carried: thresholds
    lie inside, so beyond it a forest says what it says at the edge. Else outside the law's alone, held above (below)
    the prediction at the range's edge where only growing features are beyond what was seen.
    """
    at = OPTION + option * OPTION_SIZE
    law = c[n[at + LAW_AT] : n[at + LAW_END]]
    floor_s = c[n[at + FLOOR_AT]]
    save, load, again = law_parts(n[at + LAW], x, law)
    whole = save + load + again
    seconds = max(whole, floor_s)
    side = to_edge(n, c, at, x, edge)
    if n[at + TREES] > 0:
        if side == INSIDE or n[at + CARRIED] != 0:
            seconds *= exp(forest_value(n, c, at, x))
        elif side != FAR:
            one, two, three = law_parts(n[at + LAW], edge, law)
            at_edge = max(one + two + three, floor_s) * exp(forest_value(n, c, at, edge))
            seconds = max(seconds, at_edge) if side == ABOVE else min(seconds, at_edge)
    if whole > 0.0:
        by = seconds / whole
        return seconds, save * by, load * by, again * by, side != INSIDE
    if option == RECOMPUTE:
        return seconds, 0.0, 0.0, seconds, side != INSIDE
    return seconds, 0.0, seconds, 0.0, side != INSIDE


def to_edge(
    n: Sequence[int], c: Sequence[float], at: int, x: Sequence[float], edge: MutableSequence[float]
) -> int:  # fmt: skip
    """Fills ``edge`` with ``x`` brought back into the trained range, where that makes sense, and tells from where.

    FAR: from beyond the range of a feature that does not grow with the victim's length, or from both sides.
    """
    for i in range(COUNT):
        edge[i] = x[i]
    side = INSIDE
    checked, ranges = n[at + CHECKED_AT], n[at + RANGES_AT]
    for i in range(n[at + CHECKED]):
        feature = n[checked + 2 * i]
        value, low, high = x[feature], c[ranges + RANGE * i], c[ranges + RANGE * i + 1]
        if low <= value <= high:
            continue
        now = ABOVE if value > high else BELOW
        if n[checked + 2 * i + 1] == 0 or (side != INSIDE and side != now):
            return FAR
        side = now
        edge[feature] = high if now == ABOVE else low
    return side


def how_far(n: Sequence[int], c: Sequence[float], option: int, x: Sequence[float]) -> float:
    """How far outside the trained range ``x`` is, in the feature that is farthest; 0 inside."""
    at = OPTION + option * OPTION_SIZE
    checked, ranges = n[at + CHECKED_AT], n[at + RANGES_AT]
    farthest = 0.0
    for i in range(n[at + CHECKED]):
        span = ranges + RANGE * i
        farthest = max(farthest, distance_beyond(x[n[checked + 2 * i]], c[span], c[span + 1], c[span + 2]))
    return farthest


def forest_value(n: Sequence[int], c: Sequence[float], at: int, x: Sequence[float]) -> float:
    """The residual's raw value."""
    if n[at + TABLE_AT] != NONE:
        return table_value(n, c, n[at + TABLE_AT], x)  # type: ignore[arg-type]  # with a table, n can be written to
    nodes, thresholds, leaves = n[at + NODES_AT], n[at + THRESHOLDS_AT], n[at + LEAVES_AT]
    trees = n[at + TREES]
    total = 0.0
    for tree in range(trees):
        node = n[nodes + tree]
        while node >= 0:
            i = nodes + trees + NODE * node
            node = n[i + 1] if x[n[i]] <= c[thresholds + node] else n[i + 2]
        total += c[leaves - node - 1]
    return total


def table_value(n: MutableSequence[int], c: Sequence[float], table: int, x: Sequence[float]) -> float:
    """The same without a branch per node, from masks (Lucchese et al., QuickScorer, SIGIR 2015).

    A feature's value falls between two of all thresholds on it. To each such place belongs one mask per tree: its
    leaves, from left to right, that are still open there. The lowest bit left over all features is the leaf.
    """
    features, words, open_at, leaves = n[table], n[table + 1], n[table + 2], n[table + 3]
    masks = n[open_at : open_at + words]
    for i in range(words):
        masks[i] = -1
    for number in range(features):
        i = table + TABLE + TABLE_FEATURE * number
        value, first = x[n[i]], n[i + 1]
        low, high = 0, n[i + 2]
        while low < high:
            middle = (low + high) // 2
            if c[first + middle] < value:
                low = middle + 1
            else:
                high = middle
        row = n[i + 3] + low * words
        more = n[row : row + words]
        for j in range(words):
            masks[j] &= more[j]
    total = 0.0
    for i in range(words):
        left, right = masks[i] & MASK, (masks[i] >> 32) & MASK
        at = leaves + 2 * LEAVES * i
        total += c[at + ((((left & -left) * HASH) & MASK) >> HASH_SHIFT)]
        total += c[at + LEAVES + ((((right & -right) * HASH) & MASK) >> HASH_SHIFT)]
    return total


def bin_at(n: Sequence[int], c: Sequence[float], computed_tokens: float, running_requests: float) -> int:
    """The bin of intervals that a situation falls in, as :func:`kvpolicy.cost.intervals.bin_number`."""
    length = 0
    while length < n[LENGTHS] and c[n[LENGTHS_AT] + length] <= computed_tokens:
        length += 1
    i = n[LOADS_AT] + 3 * length
    load = 0
    while load < n[i] and c[n[i + 1] + load] <= running_requests:
        load += 1
    return n[i + 2] + load


def room_at(n: Sequence[int], of: int, outside: bool, number: int) -> int:
    """Where in ``c`` the room is, below and then above, around an option's prediction or the RATIO's."""
    return n[ROOMS_AT] + 2 * ((2 * of + (1 if outside else 0)) * n[BINS] + number)


def times_exp(seconds: float, exponent: float) -> float:
    if exponent > MAX_EXPONENT:
        return inf
    return 0.0 if exponent < -MAX_EXPONENT else seconds * exp(exponent)


def option_cost(
    n: Sequence[int],
    c: Sequence[float],
    option: int,
    number: int,
    running_requests: float,
    x: Sequence[float],
    edge: MutableSequence[float],
) -> OptionCost:
    """What an option's cost holds, in a situation of bin ``number``; victim_delay_s is 0 where none is predicted."""
    seconds, save, load, again, outside = price(n, c, option, x, edge)
    at = OPTION + option * OPTION_SIZE
    room = room_at(n, option, outside, number)
    distance = how_far(n, c, option, x) if outside else 0.0
    growth = c[n[GROWTH_AT] + option]
    delay_s = 0.0
    if n[at + DELAY] != NONE:
        one, two, three = law_parts(n[at + DELAY], x, c[n[at + DELAY_AT] : n[at + DELAY_END]])
        delay_s = one + two + three
    return (
        seconds, save, load, again, seconds * running_requests * c[n[at + SHARE_AT]],
        times_exp(seconds, -grown(c[room], growth, distance)), times_exp(seconds, grown(c[room + 1], growth, distance)),
        outside, delay_s, distance,
    )  # fmt: skip


def pair(
    n: Sequence[int],
    c: MutableSequence[float],
    computed_tokens: float,
    shared_blocks: float,
    held_blocks: float,
    block_size: float,
    block_bytes: float,
    segment_bytes: float,
    queued_save_bytes: float,
    queued_load_bytes: float,
    running_requests: float,
    batch_tokens: float,
    free_blocks: float,
    waiting_requests: float,
) -> Pair:
    """Both options' costs at once. ``c`` ends with room for two rows of features."""
    row = c[n[SCRATCH_AT] : n[SCRATCH_AT] + COUNT]
    edge = c[n[SCRATCH_AT] + COUNT : n[SCRATCH_AT] + 2 * COUNT]
    number = bin_at(n, c, computed_tokens, running_requests)
    fill(
        row,
        recompute_row(
            computed_tokens, shared_blocks, block_size, running_requests, batch_tokens, free_blocks, waiting_requests
        ),
    )
    right = usable(row)
    one = option_cost(n, c, RECOMPUTE, number, running_requests, row, edge) if right else NO_COST
    fill(
        row,
        swap_row(
            computed_tokens, shared_blocks, held_blocks, block_bytes, segment_bytes, queued_save_bytes,
            queued_load_bytes, running_requests, batch_tokens, free_blocks, waiting_requests,
        ),
    )  # fmt: skip
    right = right and usable(row)
    other = option_cost(n, c, SWAP, number, running_requests, row, edge) if right else NO_COST
    if not right:
        return False, 0.0, 0.0, *one[:9], *other[:9]
    ratio = log(other[0]) - log(one[0])
    room = room_at(n, RATIO, one[7] or other[7], number)
    growth, distance = c[n[GROWTH_AT] + RATIO], max(one[9], other[9])
    low, high = ratio - grown(c[room], growth, distance), ratio + grown(c[room + 1], growth, distance)
    return True, low, high, *one[:9], *other[:9]


def fill(row: MutableSequence[float], values: Row) -> None:
    """Written out: the compiler then knows every position."""
    (
        row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8], row[9], row[10], row[11], row[12],
        row[13],
    ) = values  # fmt: skip


LAWS: tuple[tuple[type, int], ...] = (
    (RecomputeRoofline, RECOMPUTE_ROOFLINE),
    (SwapRoofline, SWAP_ROOFLINE),
    (LinearLaw, LINEAR),
)

Check = tuple[int, float, float, float]
"""Position, lowest and highest of a feature that a prediction depends on, and the power of length it grows with."""


@dataclass(frozen=True, slots=True)
class Packed:
    """``n`` and ``c`` of this module; ``c`` without the rows it ends with to be written to."""

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
        flat.n[at + LAW : at + LAW + 3] = _law(flat, laws[kind])
        flat.n[at + DELAY : at + DELAY + 3] = _law(flat, delays.get(kind))
        flat.n[at + FLOOR_AT] = flat.real([floor_s[kind]])
        flat.n[at + SHARE_AT] = flat.real([others_share[kind]])
        flat.n[at + CHECKED] = len(checks[kind])
        growing = [(check[0], int(FEATURES[check[0]] in GROWING)) for check in checks[kind]]
        flat.n[at + CHECKED_AT] = flat.whole([value for both in growing for value in both])
        flat.n[at + RANGES_AT] = flat.real([edge for _, *edges in checks[kind] for edge in edges])
        flat.n[at + CARRIED] = int(carried[kind])
        flat.n[at + TABLE_AT] = NONE
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
    flat.n[LENGTHS] = len(intervals.length_edges)
    flat.n[LENGTHS_AT] = flat.real(intervals.length_edges)
    before = accumulate((len(edges) + 1 for edges in intervals.load_edges), initial=0)
    loads = [(len(edges), flat.real(edges), count) for edges, count in zip(intervals.load_edges, before, strict=False)]
    flat.n[LOADS_AT] = flat.whole([value for one in loads for value in one])
    flat.n[BINS] = len(intervals.states)
    rooms = [room for of in PREDICTED for where in (intervals.inside, intervals.outside) for room in where[of]]
    flat.n[ROOMS_AT] = flat.real([side for room in rooms for side in room])
    flat.n[GROWTH_AT] = flat.real([intervals.growth[of] for of in PREDICTED])


def _add_nodes(flat: Flat, at: int, nodes: Nodes) -> None:
    children = zip(nodes.feature, nodes.left, nodes.right, strict=True)
    flat.n[at + TREES] = len(nodes.roots)
    flat.n[at + NODES_AT] = flat.whole([*nodes.roots, *(value for node in children for value in node)])
    flat.n[at + THRESHOLDS_AT] = flat.real(nodes.threshold)
    flat.n[at + LEAVES_AT] = flat.real(nodes.leaf)
