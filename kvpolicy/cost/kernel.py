"""The arithmetic of predictions as functions of numbers.

The functions run in plain Python and compiled by :mod:`kvpolicy.cost.compile`. Both paths share this code, so they
cannot drift apart. A complete model is read from two arrays, integers ``n`` and floats ``c``, which :func:`pack`
writes. ``x`` is a row of features.
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

# Positions in n: of the whole model,
LENGTHS, LENGTHS_AT, LOADS_AT, BINS, MARGINS_AT, SCRATCH_AT, GROWTH_AT = range(7)
# and of one option, from OPTION + option * OPTION_SIZE on. Entries whose names end in _AT hold positions in c, except
# for CHECKED_AT, NODES_AT and TABLE_AT, which hold positions in n.
OPTION = 7
(
    LAW, LAW_AT, LAW_END, DELAY, DELAY_AT, DELAY_END, FLOOR_AT, SHARE_AT, CHECKED, CHECKED_AT, RANGES_AT, TREES,
    NODES_AT, THRESHOLDS_AT, LEAVES_AT, TABLE_AT, CARRIED,
) = range(17)  # fmt: skip
OPTION_SIZE = 17
RANGE = 3
"""Numbers per checked feature: minimum, maximum, power of length."""
END = OPTION + 2 * OPTION_SIZE

RECOMPUTE_ROOFLINE, SWAP_ROOFLINE, LINEAR = 0, 1, 2
NONE = -1
"""As DELAY: the model predicts no delay. As TABLE_AT: the forest has no table and is walked node by node."""

NODE = 3
"""Integers per node: feature, left child, right child."""
LEAVES = 32
"""Maximum leaves per tree of a forest with a table: the bits of a mask."""
MASK = 0xFFFFFFFF
HASH = 0x077CB531
"""De Bruijn sequence: multiplied by a power of two, its upper 5 of 32 bits are different for each power."""
HASH_SHIFT = 27
TABLE, TABLE_FEATURE = 4, 4
"""Integers in a table's header, and per feature after it."""

INSIDE, ABOVE, BELOW, FAR = range(4)

OptionCost = tuple[float, float, float, float, float, float, float, bool, float, float]
"""engine_s, save_s, load_s, recompute_s, stall_s, low_s, high_s, extrapolated, victim_delay_s; and the distance from
the trained range."""
NO_COST: OptionCost = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, False, 0.0, 0.0)

Pair = tuple[
    bool, float, float,
    float, float, float, float, float, float, float, bool, float,
    float, float, float, float, float, float, float, bool, float,
]  # fmt: skip
"""Whether all features are usable; the interval of the log ratio; the costs of a recompute and of a swap."""

Predictor = Callable[[Preemption, Sequence[Option]], tuple[Cost, ...] | None]
"""A model's compiled ``predict``; returns None for options or features that it does not handle."""


def law_parts(law: int, x: Sequence[float], c: Sequence[float]) -> Parts:
    """Seconds of (save, load, recompute) by the law of that number with coefficients ``c``."""
    if law == RECOMPUTE_ROOFLINE:
        return 0.0, 0.0, recompute_seconds(x, c)
    if law == SWAP_ROOFLINE:
        save, load = swap_seconds(x, c)
        return save, load, 0.0
    return linear_parts(x, c)


def price(
    n: Sequence[int], c: Sequence[float], option: int, x: Sequence[float], edge: MutableSequence[float]
) -> tuple[float, float, float, float, bool]:
    """engine_s, its three parts, and whether ``x`` is outside the trained range. ``edge`` is overwritten.

    Inside the range the prediction is the law's times exp(residual). Outside, it is the same if the residual is
    carried: all thresholds lie inside the range, so a forest predicts there what it predicts at the edge. If the
    residual is not carried, the law predicts alone outside. It is then kept above (below) the prediction at the edge
    of the range, provided only growing features are beyond it.
    """
    at = OPTION + option * OPTION_SIZE
    law = c[n[at + LAW_AT] : n[at + LAW_END]]
    floor_s = c[n[at + FLOOR_AT]]
    save, load, recompute = law_parts(n[at + LAW], x, law)
    law_s = save + load + recompute
    seconds = max(law_s, floor_s)
    side = clip_to_range(n, c, at, x, edge)
    if n[at + TREES] > 0:
        if side == INSIDE or n[at + CARRIED] != 0:
            seconds *= exp(forest_value(n, c, at, x))
        elif side != FAR:
            edge_save, edge_load, edge_recompute = law_parts(n[at + LAW], edge, law)
            at_edge = max(edge_save + edge_load + edge_recompute, floor_s) * exp(forest_value(n, c, at, edge))
            seconds = max(seconds, at_edge) if side == ABOVE else min(seconds, at_edge)
    if law_s > 0.0:
        scale = seconds / law_s
        return seconds, save * scale, load * scale, recompute * scale, side != INSIDE
    if option == RECOMPUTE:
        return seconds, 0.0, 0.0, seconds, side != INSIDE
    return seconds, 0.0, seconds, 0.0, side != INSIDE


def clip_to_range(
    n: Sequence[int], c: Sequence[float], at: int, x: Sequence[float], edge: MutableSequence[float]
) -> int:  # fmt: skip
    """Fill ``edge`` with ``x`` clipped to the trained range; returns on which side ``x`` is.

    FAR: beyond the range of a feature that does not grow with the victim's length, or above the range in one feature
    and below it in another.
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
        beyond = ABOVE if value > high else BELOW
        if n[checked + 2 * i + 1] == 0 or (side != INSIDE and side != beyond):
            return FAR
        side = beyond
        edge[feature] = high if beyond == ABOVE else low
    return side


def distance_outside(n: Sequence[int], c: Sequence[float], option: int, x: Sequence[float]) -> float:
    """Distance of ``x`` from the trained range, in the farthest feature; 0 inside."""
    at = OPTION + option * OPTION_SIZE
    checked, ranges = n[at + CHECKED_AT], n[at + RANGES_AT]
    farthest = 0.0
    for i in range(n[at + CHECKED]):
        span = ranges + RANGE * i
        farthest = max(farthest, distance_beyond(x[n[checked + 2 * i]], c[span], c[span + 1], c[span + 2]))
    return farthest


def forest_value(n: Sequence[int], c: Sequence[float], at: int, x: Sequence[float]) -> float:
    """The forest's raw value for one row: the residual."""
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
    """The forest's raw value without a branch per node, from masks (Lucchese et al., QuickScorer, SIGIR 2015).

    A feature's value falls between two of all thresholds on it. Each such interval has one mask per tree: the leaves,
    from left to right, that remain reachable. The lowest bit set in the masks of all features is the leaf.
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
        open_leaves = n[row : row + words]
        for j in range(words):
            masks[j] &= open_leaves[j]
    total = 0.0
    for i in range(words):
        left, right = masks[i] & MASK, (masks[i] >> 32) & MASK
        at = leaves + 2 * LEAVES * i
        total += c[at + ((((left & -left) * HASH) & MASK) >> HASH_SHIFT)]
        total += c[at + LEAVES + ((((right & -right) * HASH) & MASK) >> HASH_SHIFT)]
    return total


def bin_at(n: Sequence[int], c: Sequence[float], computed_tokens: float, running_requests: float) -> int:
    """The interval bin of a situation, as :func:`kvpolicy.cost.intervals.bin_number`."""
    length = 0
    while length < n[LENGTHS] and c[n[LENGTHS_AT] + length] <= computed_tokens:
        length += 1
    at = n[LOADS_AT] + 3 * length
    load = 0
    while load < n[at] and c[n[at + 1] + load] <= running_requests:
        load += 1
    return n[at + 2] + load


def margin_at(n: Sequence[int], quantity: int, outside: bool, bin_index: int) -> int:
    """Position in ``c`` of the margins below and above the prediction of an option or of the RATIO."""
    return n[MARGINS_AT] + 2 * ((2 * quantity + (1 if outside else 0)) * n[BINS] + bin_index)


def times_exp(seconds: float, exponent: float) -> float:
    if exponent > MAX_EXPONENT:
        return inf
    return 0.0 if exponent < -MAX_EXPONENT else seconds * exp(exponent)


def option_cost(
    n: Sequence[int],
    c: Sequence[float],
    option: int,
    bin_index: int,
    running_requests: float,
    x: Sequence[float],
    edge: MutableSequence[float],
) -> OptionCost:
    """Values of an option's cost in a situation of bin ``bin_index``; victim_delay_s is 0 if not predicted."""
    seconds, save, load, recompute, outside = price(n, c, option, x, edge)
    at = OPTION + option * OPTION_SIZE
    margin = margin_at(n, option, outside, bin_index)
    distance = distance_outside(n, c, option, x) if outside else 0.0
    growth = c[n[GROWTH_AT] + option]
    delay_s = 0.0
    if n[at + DELAY] != NONE:
        delay_save, delay_load, delay_recompute = law_parts(n[at + DELAY], x, c[n[at + DELAY_AT] : n[at + DELAY_END]])
        delay_s = delay_save + delay_load + delay_recompute
    return (
        seconds, save, load, recompute, seconds * running_requests * c[n[at + SHARE_AT]],
        times_exp(seconds, -grown(c[margin], growth, distance)),
        times_exp(seconds, grown(c[margin + 1], growth, distance)), outside, delay_s, distance,
    )  # fmt: skip


def pair(
    n: Sequence[int],
    c: MutableSequence[float],
    computed_tokens: float,
    cached_tokens: float,
    shared_blocks: float,
    hit_blocks: float,
    save_blocks: float,
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
    """Costs of both options. ``c`` ends with two scratch rows of features."""
    row = c[n[SCRATCH_AT] : n[SCRATCH_AT] + COUNT]
    edge = c[n[SCRATCH_AT] + COUNT : n[SCRATCH_AT] + 2 * COUNT]
    bin_index = bin_at(n, c, computed_tokens, running_requests)
    fill_row(
        row,
        recompute_row(
            computed_tokens, cached_tokens, shared_blocks, block_size, running_requests, batch_tokens, free_blocks,
            waiting_requests,
        ),
    )  # fmt: skip
    valid = usable(row)
    recompute = option_cost(n, c, RECOMPUTE, bin_index, running_requests, row, edge) if valid else NO_COST
    fill_row(
        row,
        swap_row(
            computed_tokens, shared_blocks, hit_blocks, save_blocks, held_blocks, block_bytes, segment_bytes,
            queued_save_bytes, queued_load_bytes, running_requests, batch_tokens, free_blocks, waiting_requests,
        ),
    )  # fmt: skip
    valid = valid and usable(row)
    swap = option_cost(n, c, SWAP, bin_index, running_requests, row, edge) if valid else NO_COST
    if not valid:
        return False, 0.0, 0.0, *recompute[:9], *swap[:9]
    ratio = log(swap[0]) - log(recompute[0])
    margin = margin_at(n, RATIO, recompute[7] or swap[7], bin_index)
    growth, distance = c[n[GROWTH_AT] + RATIO], max(recompute[9], swap[9])
    low, high = ratio - grown(c[margin], growth, distance), ratio + grown(c[margin + 1], growth, distance)
    return True, low, high, *recompute[:9], *swap[:9]


def fill_row(row: MutableSequence[float], values: Row) -> None:
    """Copy ``values`` into ``row``, written out so that the compiler knows every position."""
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
"""Position, minimum and maximum of a feature that a prediction depends on, and the power of length it grows with."""


@dataclass(frozen=True, slots=True)
class Packed:
    """``n`` and ``c`` of this module; ``c`` without its scratch rows."""

    n: tuple[int, ...]
    c: tuple[float, ...]


class ArrayBuilder:
    """Builder of the arrays ``n`` and ``c``."""

    def __init__(self) -> None:
        self.n: list[int] = [0] * END
        self.c: list[float] = []

    def add_ints(self, values: Sequence[int]) -> int:
        """Append to ``n``; returns the position of the first value."""
        self.n += values
        return len(self.n) - len(values)

    def add_floats(self, values: Sequence[float]) -> int:
        """Append to ``c``; returns the position of the first value."""
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
    """Pack the fields of a :class:`~kvpolicy.cost.model.FittedModel`, given by their names there."""
    arrays = ArrayBuilder()
    _add_intervals(arrays, intervals)
    for option, kind in enumerate(KINDS):
        at = OPTION + option * OPTION_SIZE
        arrays.n[at + LAW : at + LAW + 3] = _law(arrays, laws[kind])
        arrays.n[at + DELAY : at + DELAY + 3] = _law(arrays, delays.get(kind))
        arrays.n[at + FLOOR_AT] = arrays.add_floats([floor_s[kind]])
        arrays.n[at + SHARE_AT] = arrays.add_floats([others_share[kind]])
        arrays.n[at + CHECKED] = len(checks[kind])
        growing = [(check[0], int(FEATURES[check[0]] in GROWING)) for check in checks[kind]]
        arrays.n[at + CHECKED_AT] = arrays.add_ints([value for entry in growing for value in entry])
        arrays.n[at + RANGES_AT] = arrays.add_floats([edge for _, *edges in checks[kind] for edge in edges])
        arrays.n[at + CARRIED] = int(carried[kind])
        arrays.n[at + TABLE_AT] = NONE
        if kind in residuals:
            _add_nodes(arrays, at, residuals[kind].nodes)
    return Packed(tuple(arrays.n), tuple(arrays.c))


def _law(arrays: ArrayBuilder, law: Law | None) -> list[int]:
    if law is None:
        return [NONE, 0, 0]
    number = next(number for law_type, number in LAWS if isinstance(law, law_type))
    start = arrays.add_floats(law.coefficients)
    return [number, start, start + len(law.coefficients)]


def _add_intervals(arrays: ArrayBuilder, intervals: Intervals) -> None:
    arrays.n[LENGTHS] = len(intervals.length_edges)
    arrays.n[LENGTHS_AT] = arrays.add_floats(intervals.length_edges)
    before = accumulate((len(edges) + 1 for edges in intervals.load_edges), initial=0)
    loads = [
        (len(edges), arrays.add_floats(edges), count)
        for edges, count in zip(intervals.load_edges, before, strict=False)
    ]
    arrays.n[LOADS_AT] = arrays.add_ints([value for entry in loads for value in entry])
    arrays.n[BINS] = len(intervals.states)
    margins = [
        margin
        for quantity in PREDICTED
        for margins_by_quantity in (intervals.inside, intervals.outside)
        for margin in margins_by_quantity[quantity]
    ]
    arrays.n[MARGINS_AT] = arrays.add_floats([side for margin in margins for side in margin])
    arrays.n[GROWTH_AT] = arrays.add_floats([intervals.growth[quantity] for quantity in PREDICTED])


def _add_nodes(arrays: ArrayBuilder, at: int, nodes: Nodes) -> None:
    children = zip(nodes.feature, nodes.left, nodes.right, strict=True)
    arrays.n[at + TREES] = len(nodes.roots)
    arrays.n[at + NODES_AT] = arrays.add_ints([*nodes.roots, *(value for node in children for value in node)])
    arrays.n[at + THRESHOLDS_AT] = arrays.add_floats(nodes.threshold)
    arrays.n[at + LEAVES_AT] = arrays.add_floats(nodes.leaf)
