"""A boosted forest as arrays, evaluated one row at a time, so that servers do not need LightGBM.

It is read from LightGBM's text format. For decisions it is packed with the rest of a model
(:mod:`kvpolicy.cost.kernel`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from kvpolicy.errors import KVPolicyError

NUMERICAL_DECISIONS = frozenset({0, 2})
"""LightGBM's ``decision_type``: no category, no special treatment of missing values; bit 1 is the default direction."""


class ForestError(KVPolicyError):
    """A text is not a LightGBM forest of plain numerical splits; the message names the field."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Inner nodes of all trees, as parallel arrays. A child below 0 is leaf ``~child``."""

    feature: tuple[int, ...]
    threshold: tuple[float, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    leaf: tuple[float, ...]
    roots: tuple[int, ...]
    """First node of each tree; below 0 for a tree that is a single leaf."""


class Forest:
    """Sum of trees. ``feature`` numbers in ``nodes`` are positions in the row given to :meth:`predict`."""

    def __init__(self, nodes: Nodes, text: str = "", positions: Sequence[int] = ()) -> None:
        self.nodes = nodes
        self.used = frozenset(nodes.feature)
        self.text = text
        """The text it was read from, together with ``positions``; empty for a forest built from nodes."""
        self.positions = tuple(positions)

    @classmethod
    def from_text(cls, text: str, positions: Sequence[int]) -> Forest:
        """Read LightGBM's text format. ``positions``: position in a row of each of its features.

        Raises :class:`ForestError` for anything but a complete forest of numerical splits on those features.
        """
        if not text.startswith("tree\n"):
            raise ForestError("does not begin with 'tree': not a LightGBM model")
        body, end, _ = text.partition("\nend of trees")
        if not end:
            raise ForestError("'end of trees' is missing: the file is truncated")
        header, *trees = body.split("\nTree=")
        tree_count = len(_field(_fields(header), "tree_sizes").split())
        if tree_count != len(trees):
            raise ForestError(f"tree_sizes lists {tree_count} trees, the file holds {len(trees)}")
        nodes = _Builder(positions)
        for number, tree in enumerate(trees):
            try:
                nodes.add(_fields(tree))
            except ValueError as error:
                raise ForestError(f"tree {number}: {error}") from error
        return cls(nodes.build(), text, positions)

    def predict(self, row: Sequence[float]) -> float:
        """The forest's raw value for one row of finite numbers."""
        nodes = self.nodes
        feature, threshold, left, right, leaf = nodes.feature, nodes.threshold, nodes.left, nodes.right, nodes.leaf
        total = 0.0
        for node in nodes.roots:
            while node >= 0:
                node = left[node] if row[feature[node]] <= threshold[node] else right[node]
            total += leaf[~node]
        return total


class _Builder:
    """Appends trees one after another, with renumbered children."""

    def __init__(self, positions: Sequence[int]) -> None:
        self._positions = positions
        self._feature: list[int] = []
        self._threshold: list[float] = []
        self._left: list[int] = []
        self._right: list[int] = []
        self._leaf: list[float] = []
        self._roots: list[int] = []

    def add(self, tree: dict[str, str]) -> None:
        if int(_field(tree, "num_cat")) or int(tree.get("is_linear", "0")):
            raise ForestError("has categorical splits or linear leaves")
        count = int(_field(tree, "num_leaves"))
        leaves = _reals(tree, "leaf_value", count)
        inner = count - 1
        first_node, first_leaf = len(self._feature), len(self._leaf)
        self._leaf += leaves
        self._roots.append(first_node if inner else ~first_leaf)
        if not inner:
            return
        if not set(_ints(tree, "decision_type", inner)) <= NUMERICAL_DECISIONS:
            raise ForestError(f"decision_type {tree['decision_type']}: only plain numerical splits are read")
        self._feature += [self._position(number) for number in _ints(tree, "split_feature", inner)]
        self._threshold += _reals(tree, "threshold", inner)
        children = [_ints(tree, "left_child", inner), _ints(tree, "right_child", inner)]
        _refuse_loops(children, inner)
        for children_so_far, column in zip((self._left, self._right), children, strict=True):
            children_so_far += [first_node + child if child >= 0 else ~(first_leaf + ~child) for child in column]

    def _position(self, number: int) -> int:
        if not 0 <= number < len(self._positions):
            raise ForestError(f"split_feature {number}: the model has {len(self._positions)} inputs")
        return self._positions[number]

    def build(self) -> Nodes:
        return Nodes(
            tuple(self._feature), tuple(self._threshold), tuple(self._left), tuple(self._right), tuple(self._leaf),
            tuple(self._roots),
        )  # fmt: skip


def _refuse_loops(children: Sequence[Sequence[int]], inner: int) -> None:
    """Raises ForestError unless each node and leaf is the child of exactly one earlier node, so that walks end."""
    referenced = sorted(child for side in children for child in side)
    if referenced != [*range(-inner - 1, 0), *range(1, inner)]:
        raise ForestError("left_child and right_child do not form a tree")
    for side in children:
        for parent, child in enumerate(side):
            if 0 <= child <= parent:
                raise ForestError(f"node {child} comes before its parent {parent}")


def _fields(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def _field(fields: dict[str, str], name: str) -> str:
    if name not in fields:
        raise ForestError(f"field {name} is missing")
    return fields[name]


def _ints(tree: dict[str, str], name: str, count: int) -> list[int]:
    values = list(map(int, _field(tree, name).split()))
    if len(values) != count:
        raise ForestError(f"{name} holds {len(values)} numbers, should hold {count}")
    return values


def _reals(tree: dict[str, str], name: str, count: int) -> list[float]:
    values = list(map(float, _field(tree, name).split()))
    if len(values) != count or not all(map(isfinite, values)):
        raise ForestError(f"{name} holds {len(values)} numbers, should hold {count} finite ones")
    return values
