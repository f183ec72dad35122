"""Fitted models of random coefficients, forests, ranges and intervals."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import inf

from kvpolicy.cost.forest import Forest, Nodes
from kvpolicy.cost.intervals import PREDICTED, Intervals
from kvpolicy.cost.laws import Channel, LinearLaw, RecomputeRoofline, SwapRoofline
from kvpolicy.cost.model import FittedModel
from kvpolicy.events import KINDS
from kvpolicy.features import FEATURES
from tests.synthetic import fitted_model


def random_forest(trees: int, leaves: int, seed: int, used: Sequence[str] = FEATURES) -> Forest:
    """A forest of random trees: any feature, any depth, thresholds where situations are."""
    rng = random.Random(seed)
    feature: list[int] = []
    threshold: list[float] = []
    children: tuple[list[int], list[int]] = ([], [])
    leaf: list[float] = []
    roots: list[int] = []

    def grow(count: int) -> int:
        if count == 1:
            leaf.append(rng.gauss(0.0, 0.5 / trees))
            return -len(leaf)
        at = len(feature)
        feature.append(FEATURES.index(rng.choice(used)))
        threshold.append(rng.choice([rng.uniform(0, 8), rng.uniform(0, 4000), 10 ** rng.uniform(3, 9)]))
        for side in children:
            side.append(0)
        left = rng.randrange(1, count)
        children[0][at], children[1][at] = grow(left), grow(count - left)
        return at

    for _ in range(trees):
        roots.append(grow(rng.randint(1, leaves)))
    return Forest(Nodes(tuple(feature), tuple(threshold), *map(tuple, children), tuple(leaf), tuple(roots)))


@cache
def random_model(seed: int, trees: int = 100, leaves: int = 31) -> FittedModel:
    """A model of random coefficients, ranges, forests and intervals, of every kind of law."""
    rng = random.Random(seed)
    few, many = rng.uniform(0, 0.01), rng.uniform(1e-9, 1e-5)
    again = RecomputeRoofline(
        few, few / 2, many, many / 1e4, rng.choice([0.0, few]), rng.choice([0.0, few]), rng.random(),
        rng.choice([0.0, many]), rng.choice([0.0, many / 1e4]), rng.choice([100.0, 4096.0]),
        rng.choice([64.0, 2048.0, inf]),
    )  # fmt: skip
    copies = [Channel(few, many / 1e5, many / 10) for _ in range(2)]
    swap = SwapRoofline(*copies, few, few, *(rng.random() for _ in range(5)))
    linear = LinearLaw(few, {name: 10 ** rng.uniform(-9, -5) for name in rng.sample(FEATURES, 6)})
    kinds = dict(zip(KINDS, (again, swap) if seed % 3 else (linear, linear), strict=True))
    forests = {
        kind: random_forest(trees, leaves, seed + i) for i, kind in enumerate(KINDS) if trees and rng.random() < 0.9
    }
    top = {name: rng.choice([10 ** rng.uniform(1, 9), 1e12]) for name in FEATURES}
    spans = {name: (rng.choice([0.0, 0.0, high / 100]), high) for name, high in top.items()}
    loads = tuple(tuple(sorted(rng.sample(range(1, 40), rng.randrange(3)))) for _ in range(3))
    bins = sum(len(edges) + 1 for edges in loads)

    def rooms() -> dict[str, tuple[tuple[float, float], ...]]:
        return {of: tuple((rng.random(), rng.choice([rng.random(), inf])) for _ in range(bins)) for of in PREDICTED}

    growth = {of: rng.choice([0.0, rng.random(), inf]) for of in PREDICTED}
    intervals = Intervals((100, 1000), loads, rooms(), rooms(), growth, (30,) * bins)
    return replace(
        fitted_model("analytic"), laws=kinds, residuals=forests, ranges=dict.fromkeys(KINDS, spans),
        floor_s={kind: rng.choice([1e-6, 1e-2]) for kind in KINDS}, intervals=intervals,
        carried={kind: rng.random() < 0.5 for kind in KINDS}, victim_delays=rng.choice([{}, kinds]),
        others_share={kind: rng.random() for kind in KINDS},
    )  # fmt: skip


@cache
def plain_and_compiled(one: int | str, trees: int = 100, leaves: int = 31) -> tuple[FittedModel, FittedModel]:
    """A model as it is, and compiled."""
    plain = fitted_model(one) if isinstance(one, str) else random_model(one, trees, leaves)
    fast = replace(plain)
    assert fast.warm()
    return plain, fast
