"""A packed model made ready to be compiled: arrays, forests as tables of masks where their trees are small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpolicy.cost import kernel
from kvpolicy.cost.forest import Nodes
from kvpolicy.cost.kernel import COUNT, HASH, HASH_SHIFT, LEAVES, MASK, OPTION, OPTION_SIZE, TABLE, TABLE_FEATURE
from kvpolicy.cost.packed import Packed

Reals = NDArray[np.float64]
Whole = NDArray[np.int64]
Masks = NDArray[np.uint32]

MOST_WORDS = 4_000_000
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


def arrays(packed: Packed, forests: Sequence[Nodes | None]) -> tuple[Whole, Reals]:
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


def _table(nodes: Nodes, n_at: int, c_at: int) -> tuple[Whole, list[float]] | None:
    """What is appended to ``n``, from ``n_at`` on, and to ``c``; None for a forest that is not for a table."""
    trees = [_tree(nodes, root) for root in nodes.roots]
    used = sorted(set(nodes.feature))
    words = (len(trees) + 1) // 2
    places = {feature: sorted({t for tree in trees for t in _on(tree, feature)}) for feature in used}
    if max(len(tree.leaf) for tree in trees) > LEAVES or words * sum(map(len, places.values())) > MOST_WORDS:
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


def _masks(trees: Sequence[Tree], feature: int, places: Sequence[float], words: int) -> Whole:
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
