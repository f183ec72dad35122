"""The arithmetic of predictions, compiled by numba. A separate module, so that no other module needs numba.

:func:`arrays` turns a packed model into arrays, and forests of small trees into tables of masks. :func:`predictor`
calls the compiled arithmetic on them.
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
from kvpolicy.events import Cost, Option, Preemption, fast_constructor
from kvpolicy.regression import conformal

PARTS: tuple[Callable[..., Any], ...] = (
    features.surviving, features.recompute_row, features.swap_row, features.usable, laws.recompute_seconds,
    laws.swap_seconds, laws.linear_seconds, laws.linear_parts, conformal.distance_beyond, conformal.grown,
    kernel.law_parts, kernel.clip_to_range, kernel.distance_outside, kernel.table_value,
    kernel.forest_value, kernel.price, kernel.bin_at, kernel.margin_at, kernel.times_exp, kernel.option_cost,
    kernel.fill_row,
)  # fmt: skip
"""All functions that :func:`~kvpolicy.cost.kernel.pair` calls, callees first."""

_OPTION = (*["float64"] * 7, "boolean", "float64")
_PAIR = ("boolean", "float64", "float64", *_OPTION, *_OPTION)
SIGNATURE = f"Tuple(({', '.join(_PAIR)}))(int64[::1], float64[::1], {', '.join(['float64'] * 15)})"

UNREADABLE = (
    OSError, RuntimeError, EOFError, ValueError, AttributeError, ImportError, IndexError, pickle.UnpicklingError,
)  # fmt: skip
"""What numba raises if it cannot write its cache, or if a cached file is damaged."""


@cache
def compiled_pair() -> Callable[..., Pair]:
    """:func:`~kvpolicy.cost.kernel.pair`, compiled. Takes some seconds, much less from numba's cache on disk."""
    for part in PARTS:
        register_jitable(part)
    try:
        return _compile_pair(True)
    except UNREADABLE:
        return _compile_pair(False)


def _compile_pair(cached: bool) -> Callable[..., Pair]:
    # numba's cache is keyed by this file's age and by the closure's numbers, not by the functions that are called. The
    # stamp, a digest of these functions, keeps numba from reusing code compiled before one of them changed.
    stamp = _stamp()
    plain_pair = register_jitable(kernel.pair)

    def pair(  # type: ignore[no-untyped-def]
        n,
        c,
        computed,
        cached_tokens,
        shared,
        hit,
        saved,
        held,
        size,
        block,
        segment,
        saves,
        loads,
        running,
        batch,
        free,
        waiting,
    ):
        assert stamp
        return plain_pair(
            n,
            c,
            computed,
            cached_tokens,
            shared,
            hit,
            saved,
            held,
            size,
            block,
            segment,
            saves,
            loads,
            running,
            batch,
            free,
            waiting,
        )

    compiled: Callable[..., Pair] = numba.njit(SIGNATURE, cache=cached)(pair)
    return compiled


def _stamp() -> int:
    """A number that changes whenever one of the compiled functions changes; never 0."""
    digest = hashlib.sha256()
    for part in (*PARTS, kernel.pair):
        code = part.__code__
        globals_used = {name: part.__globals__.get(name) for name in code.co_names}
        numbers = {name: value for name, value in globals_used.items() if isinstance(value, int | float | tuple)}
        digest.update(repr((code.co_code, code.co_names, code.co_varnames, code.co_consts, numbers)).encode())
    return int.from_bytes(digest.digest()[:7], "big") + 1


Masks = NDArray[np.uint32]

MAX_MASK_WORDS = 4_000_000
"""Integers in a table (32 MB). A forest that needs more is walked node by node."""
ALL = np.uint32(MASK)


@dataclass(frozen=True, slots=True)
class Tree:
    """Inner nodes of a tree, and its leaves from left to right."""

    feature: Sequence[int]
    threshold: Sequence[float]
    closed: Sequence[int]
    """Per node, the mask of the leaves in its left subtree, which are unreachable if its test fails."""
    leaf: Sequence[float]


def arrays(packed: Packed, forests: Sequence[Nodes | None]) -> tuple[Ints, Floats]:
    """``n`` and ``c`` with tables, and with the scratch rows of :func:`~kvpolicy.cost.kernel.pair`.

    ``forests``: one per kind, None for a kind without residual.
    """
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
    """Table of a forest: what is appended to ``n`` at ``n_at`` and to ``c`` at ``c_at``; None if it does not fit."""
    trees = [_tree(nodes, root) for root in nodes.roots]
    used = sorted(set(nodes.feature))
    words = (len(trees) + 1) // 2
    thresholds = {feature: sorted({t for tree in trees for t in _thresholds_on(tree, feature)}) for feature in used}
    if max(len(tree.leaf) for tree in trees) > LEAVES or words * sum(map(len, thresholds.values())) > MAX_MASK_WORDS:
        return None
    reals: list[float] = []
    for feature in used:
        reals += thresholds[feature]
    header = [len(used), words, n_at + TABLE + TABLE_FEATURE * len(used), c_at + len(reals)]
    row, first = header[2] + words, c_at
    rows = []
    for feature in used:
        header += [feature, first, len(thresholds[feature]), row]
        rows.append(_masks(trees, feature, thresholds[feature], words))
        row, first = row + len(rows[-1]), first + len(thresholds[feature])
    for tree in [*trees, *[Tree((), (), (), (0.0,))] * (len(trees) % 2)]:
        reals += _leaf_table(tree.leaf)
    return np.concatenate([np.array(header, np.int64), np.zeros(words, np.int64), *rows]), reals


def _thresholds_on(tree: Tree, feature: int) -> list[float]:
    return [threshold for threshold, split in zip(tree.threshold, tree.feature, strict=True) if split == feature]


def _masks(trees: Sequence[Tree], feature: int, thresholds: Sequence[float], words: int) -> Ints:
    """A row of masks per interval between thresholds, two trees per number, the earlier one in the lower half."""
    rank = {threshold: tree_index + 1 for tree_index, threshold in enumerate(thresholds)}
    masks: Masks = np.full((len(thresholds) + 1, 2 * words), ALL, np.uint32)
    for tree_index, tree in enumerate(trees):
        for node, split in enumerate(tree.feature):
            if split == feature:
                masks[rank[tree.threshold[node]], tree_index] &= ALL ^ np.uint32(tree.closed[node])
    np.bitwise_and.accumulate(masks, axis=0, out=masks)
    wide = masks.astype(np.uint64)
    return (wide[:, ::2] | (wide[:, 1::2] << np.uint64(32))).reshape(-1).view(np.int64)


def _leaf_table(leaf: Sequence[float]) -> list[float]:
    """Leaf values, each at the hash of its bit."""
    table = [0.0] * LEAVES
    for leaf_index, value in enumerate(leaf):
        table[((1 << leaf_index) * HASH & MASK) >> HASH_SHIFT] = value
    return table


def _tree(nodes: Nodes, root: int) -> Tree:
    feature: list[int] = []
    threshold: list[float] = []
    closed: list[int] = []
    leaf: list[float] = []

    def leaves_below(node: int) -> int:
        """Mask of the leaves below ``node``; adds the subtree to the lists."""
        if node < 0:
            leaf.append(nodes.leaf[~node])
            return 1 << (len(leaf) - 1)
        left = leaves_below(nodes.left[node])
        feature.append(nodes.feature[node])
        threshold.append(nodes.threshold[node])
        closed.append(left)
        return left | leaves_below(nodes.right[node])

    leaves_below(root)
    return Tree(feature, threshold, closed, leaf)


_cost = fast_constructor(Cost)


def predictor(packed: Packed, forests: Sequence[Nodes | None], with_delay: bool) -> Predictor:
    """``predict`` of a packed model, for recompute, for swap, or for both in that order.

    ``forests``: one per kind, None for a kind without residual. ``with_delay``: whether to return the victim's delay.
    """
    pair = compiled_pair()
    n, c = arrays(packed, forests)

    def predict(situation: Preemption, options: Sequence[Option]) -> tuple[Cost, ...] | None:
        count = len(options)
        if not 1 <= count <= 2:
            return None
        swap_alone = options[0].kind == "swap"
        if count == 2 and (swap_alone or options[1].kind != "swap"):
            return None
        # Unpacked at once and passed on by name, because slicing the tuple would take as long as the forest. Numbers
        # 1, 2 and 3 are an option's save, load and recompute seconds.
        (
            usable, ratio_low, ratio_high, recompute_s, recompute_1, recompute_2, recompute_3, recompute_stall,
            recompute_low, recompute_high, recompute_outside, recompute_delay, swap_s, swap_1, swap_2, swap_3,
            swap_stall, swap_low, swap_high, swap_outside, swap_delay,
        ) = pair(
            n, c, situation.computed_tokens, situation.cached_tokens, situation.shared_blocks, situation.hit_blocks,
            situation.save_blocks, situation.held_blocks, situation.block_size, situation.block_bytes,
            situation.segment_bytes, situation.queued_save_bytes, situation.queued_load_bytes,
            situation.running_requests, situation.batch_tokens, situation.free_blocks, situation.waiting_requests,
        )  # fmt: skip
        if not usable:
            return None
        if not swap_alone:
            recompute = _cost(
                recompute_s, recompute_1, recompute_2, recompute_3, recompute_stall, recompute_low, recompute_high, 0.0,
                0.0, recompute_outside, recompute_delay if with_delay else None,
            )  # fmt: skip
            if count == 1:
                return (recompute,)
        else:
            ratio_low = ratio_high = 0.0
        swap = _cost(
            swap_s, swap_1, swap_2, swap_3, swap_stall, swap_low, swap_high, ratio_low, ratio_high, swap_outside,
            swap_delay if with_delay else None,
        )  # fmt: skip
        return (swap,) if swap_alone else (recompute, swap)

    return predict
