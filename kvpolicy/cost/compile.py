"""The arithmetic of predictions compiled by numba. Apart, so that nothing else needs numba.

A packed model becomes arrays, its forests tables of masks where their trees are small; :func:`predictor` calls the
compiled arithmetic on them.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numba
import numpy as np
from numba.extending import register_jitable
from numpy.typing import NDArray

from kvpolicy import features
from kvpolicy.arrays import Floats, Ints
from kvpolicy.cost import kernel, laws
from kvpolicy.cost.forest import Nodes
from kvpolicy.cost.kernel import (
    COUNT,
    HASH,
    HASH_SHIFT,
    LEAVES,
    MASK,
    OPTION,
    OPTION_SIZE,
    TABLE,
    TABLE_FEATURE,
    Packed,
    Pair,
    Predictor,
)
from kvpolicy.events import Cost, Option, Preemption, draft_of
from kvpolicy.regression import conformal

PARTS: tuple[Callable[..., Any], ...] = (
    features.recompute_row, features.swap_row, features.usable, laws.recompute_seconds, laws.swap_seconds,
    laws.linear_seconds, laws.linear_parts, conformal.distance_beyond, conformal.grown,
    kernel.law_parts, kernel.to_edge, kernel.how_far, kernel.table_value,
    kernel.forest_value, kernel.price, kernel.bin_at, kernel.room_at, kernel.times_exp, kernel.option_cost,
    kernel.fill,
)  # fmt: skip
"""All that :func:`~kvpolicy.cost.kernel.pair` calls, callees first."""

_OPTION = (*["float64"] * 7, "boolean", "float64")
_PAIR = ("boolean", "float64", "float64", *_OPTION, *_OPTION)
SIGNATURE = f"Tuple(({', '.join(_PAIR)}))(int64[::1], float64[::1], {', '.join(['float64'] * 12)})"

UNREADABLE = (
    OSError, RuntimeError, EOFError, ValueError, AttributeError, ImportError, IndexError, pickle.UnpicklingError,
)  # fmt: skip
"""What numba raises where there is no place for its cache, or what is there is damaged."""


@cache
def compiled_pair() -> Callable[..., Pair]:
    """:func:`~kvpolicy.cost.kernel.pair`, compiled: some seconds, much less from numba's cache on disk."""
    for part in PARTS:
        register_jitable(part)
    try:
        return _compile(True)
    except UNREADABLE:
        return _compile(False)


def _compile(kept: bool) -> Callable[..., Pair]:
    # numba's cache knows this file's age and the numbers below, but not the functions that are called: their digest
    # among those numbers keeps it from serving arithmetic that has changed since.
    stamp = _stamp()
    whole = register_jitable(kernel.pair)

    def both(n, c, computed, shared, held, size, block, segment, saves, loads, running, batch, free, waiting):  # type: ignore[no-untyped-def]
        assert stamp
        return whole(n, c, computed, shared, held, size, block, segment, saves, loads, running, batch, free, waiting)

    compiled: Callable[..., Pair] = numba.njit(SIGNATURE, cache=kept)(both)
    return compiled


def _stamp() -> int:
    """A number that another version of any function here has another of; never 0."""
    told = hashlib.sha256()
    for part in (*PARTS, kernel.pair):
        code = part.__code__
        named = {name: part.__globals__.get(name) for name in code.co_names}
        numbers = {name: value for name, value in named.items() if isinstance(value, int | float | tuple)}
        told.update(repr((code.co_code, code.co_names, code.co_varnames, code.co_consts, numbers)).encode())
    return int.from_bytes(told.digest()[:7], "big") + 1


Masks = NDArray[np.uint32]

MAX_MASK_WORDS = 4_000_000
"""Whole numbers of a table (32 MB); a forest that needs more is walked node by node."""
ALL = np.uint32(MASK)


@dataclass(frozen=True, slots=True)
class Tree:
    """The inner nodes of a tree, and its leaves from left to right."""

    feature: Sequence[int]
    threshold: Sequence[float]
    closed: Sequence[int]
    """Per node, the leaves left of it: out of reach where its test fails."""
    leaf: Sequence[float]


def arrays(packed: Packed, forests: Sequence[Nodes | None]) -> tuple[Ints, Floats]:
    """``n`` and ``c`` with tables, and with what :func:`~kvpolicy.cost.kernel.pair` writes to. ``forests`` by kind."""
    n, c = list(packed.n), list(packed.c)
    parts, size = [], len(n)
    for option, nodes in enumerate(forests):
        table = None if nodes is None else _table(nodes, size, len(c))
        if table is not None:
            n[OPTION + option * OPTION_SIZE + kernel.TABLE_AT] = size
            parts.append(table[0])
            size += len(table[0])
            c += table[1]
    n[kernel.SCRATCH_AT] = len(c)
    return np.concatenate([np.array(n, np.int64), *parts]), np.array(c + [0.0] * (2 * COUNT), np.float64)


def _table(nodes: Nodes, n_at: int, c_at: int) -> tuple[Ints, list[float]] | None:
    """What is appended to ``n``, from ``n_at`` on, and to ``c``; None for a forest that is not for a table."""
    trees = [_tree(nodes, root) for root in nodes.roots]
    used = sorted(set(nodes.feature))
    words = (len(trees) + 1) // 2
    places = {feature: sorted({t for tree in trees for t in _on(tree, feature)}) for feature in used}
    if max(len(tree.leaf) for tree in trees) > LEAVES or words * sum(map(len, places.values())) > MAX_MASK_WORDS:
        return None
    reals: list[float] = []
    for feature in used:
        reals += places[feature]
    header = [len(used), words, n_at + TABLE + TABLE_FEATURE * len(used), c_at + len(reals)]
    row, first = header[2] + words, c_at
    rows = []
    for feature in used:
        header += [feature, first, len(places[feature]), row]
        rows.append(_masks(trees, feature, places[feature], words))
        row, first = row + len(rows[-1]), first + len(places[feature])
    for tree in [*trees, *[Tree((), (), (), (0.0,))] * (len(trees) % 2)]:
        reals += _hashed(tree.leaf)
    return np.concatenate([np.array(header, np.int64), np.zeros(words, np.int64), *rows]), reals


def _on(tree: Tree, feature: int) -> list[float]:
    return [t for t, of in zip(tree.threshold, tree.feature, strict=True) if of == feature]


def _masks(trees: Sequence[Tree], feature: int, places: Sequence[float], words: int) -> Ints:
    """A row of masks per place between thresholds: two trees to a number, the earlier one in its lower half."""
    rank = {threshold: number + 1 for number, threshold in enumerate(places)}
    masks: Masks = np.full((len(places) + 1, 2 * words), ALL, np.uint32)
    for number, tree in enumerate(trees):
        for i, of in enumerate(tree.feature):
            if of == feature:
                masks[rank[tree.threshold[i]], number] &= ALL ^ np.uint32(tree.closed[i])
    np.bitwise_and.accumulate(masks, axis=0, out=masks)
    wide = masks.astype(np.uint64)
    return (wide[:, ::2] | (wide[:, 1::2] << np.uint64(32))).reshape(-1).view(np.int64)


def _hashed(leaf: Sequence[float]) -> list[float]:
    """The leaves where the hash of their bit finds them."""
    found = [0.0] * LEAVES
    for number, value in enumerate(leaf):
        found[((1 << number) * HASH & MASK) >> HASH_SHIFT] = value
    return found


def _tree(nodes: Nodes, root: int) -> Tree:
    feature: list[int] = []
    threshold: list[float] = []
    closed: list[int] = []
    leaf: list[float] = []

    def leaves_below(at: int) -> int:
        """As a mask."""
        if at < 0:
            leaf.append(nodes.leaf[~at])
            return 1 << (len(leaf) - 1)
        left = leaves_below(nodes.left[at])
        feature.append(nodes.feature[at])
        threshold.append(nodes.threshold[at])
        closed.append(left)
        return left | leaves_below(nodes.right[at])

    leaves_below(root)
    return Tree(feature, threshold, closed, leaf)


_cost = draft_of(Cost)


def predictor(packed: Packed, forests: Sequence[Nodes | None], with_delay: bool) -> Predictor:
    """``predict`` of a packed model: for recompute, for swap, or for both in that order. ``forests`` by kind."""
    pair = compiled_pair()
    n, c = arrays(packed, forests)

    def predict(situation: Preemption, options: Sequence[Option]) -> tuple[Cost, ...] | None:
        count = len(options)
        if not 1 <= count <= 2:
            return None
        swap_alone = options[0].kind == "swap"
        if count == 2 and (swap_alone or options[1].kind != "swap"):
            return None
        # Unpacked at once and passed on one by one: slices of a tuple would take as long as the forest.
        (
            usable, ratio_low, ratio_high, again_s, again_1, again_2, again_3, again_stall, again_low, again_high,
            again_out, again_delay, swap_s, swap_1, swap_2, swap_3, swap_stall, swap_low, swap_high, swap_out,
            swap_delay,
        ) = pair(
            n, c, situation.computed_tokens, situation.shared_blocks, situation.held_blocks, situation.block_size,
            situation.block_bytes, situation.segment_bytes, situation.queued_save_bytes, situation.queued_load_bytes,
            situation.running_requests, situation.batch_tokens, situation.free_blocks, situation.waiting_requests,
        )  # fmt: skip
        if not usable:
            return None
        if not swap_alone:
            recompute = _cost(
                again_s, again_1, again_2, again_3, again_stall, again_low, again_high, 0.0, 0.0, again_out,
                again_delay if with_delay else None,
            )  # fmt: skip
            if count == 1:
                return (recompute,)
        else:
            ratio_low = ratio_high = 0.0
        swap = _cost(
            swap_s, swap_1, swap_2, swap_3, swap_stall, swap_low, swap_high, ratio_low, ratio_high, swap_out,
            swap_delay if with_delay else None,
        )  # fmt: skip
        return (swap,) if swap_alone else (recompute, swap)

    return predict
