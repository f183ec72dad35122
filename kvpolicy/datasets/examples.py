"""Training examples from measured states, one per state and option, and their noise floors."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import median

from kvpolicy.datasets.profiles import State
from kvpolicy.events import KINDS, Kind, Option
from kvpolicy.features import FEATURES, Features

MIN_FLOOR_S = 1e-6
"""Minimum noise floor: costs under a microsecond count as indistinguishable from none."""


@dataclass(frozen=True, slots=True)
class Example:
    """One option in one state: mean features of what was really lost, and median cost, over its repeats."""

    x: Features
    engine_s: float
    weight: float = 1.0
    """Number of situations that it stands for."""


Examples = Mapping[Kind, tuple[Example, ...]]


def option_of(kind: Kind, computed_tokens: int) -> Option:
    return Option("recompute") if kind == "recompute" else Option("swap", computed_tokens, "host")


def examples_of(states: Iterable[State]) -> dict[Kind, tuple[Example, ...]]:
    """One example per state and option, in the order of the states."""
    state_list = list(states)
    return {kind: examples_of_option(state_list, kind) for kind in KINDS}


def expected_examples_of(states: Iterable[State]) -> dict[Kind, tuple[Example, ...]]:
    """The same with the features that were known at the decisions: what predictions are judged on."""
    state_list = list(states)
    return {
        kind: tuple(Example(state.expected_features[kind], state.typical_s[kind]) for state in state_list)
        for kind in KINDS
    }


def examples_of_option(states: Iterable[State], kind: Kind) -> tuple[Example, ...]:
    """One example per state, for one option."""
    return tuple(_example(state, kind) for state in states)


def _example(state: State, kind: Kind) -> Example:
    return Example(state.mean_features[kind], state.typical_s[kind])


def noise_floors(states: Sequence[State]) -> dict[Kind, float]:
    """Noise floor by option: the noise of a state's median cost, seconds.

    It is 1.2533 sigma / sqrt(repeats). Sigma comes from the median distance of a window from its state's median, so a
    few disturbed windows do not change it. Where a logarithm is taken, a cost below the floor is replaced by it; fits
    use the values as they are.
    """
    floors = {}
    for kind in KINDS:
        repeated = [(state.typical_s[kind], state.costs_s(kind)) for state in states]
        repeated = [(typical_s, costs) for typical_s, costs in repeated if len(costs) > 1]
        floors[kind] = MIN_FLOOR_S
        if repeated:
            distances = [abs(cost_s - typical_s) for typical_s, costs in repeated for cost_s in costs]
            sigma_s = 1.4826 * median(distances)
            floors[kind] = max(MIN_FLOOR_S, 1.2533 * sigma_s / sqrt(median(len(costs) for _, costs in repeated)))
    return floors


def log_miss(measured_s: float, predicted_s: float, floor_s: float) -> float:
    """log(measured / predicted), both raised to the floor if below it."""
    return log(max(measured_s, floor_s) / max(predicted_s, floor_s))


def ranges_of(examples: Sequence[Example]) -> dict[str, tuple[float, float]]:
    """Minimum and maximum of each feature."""
    columns = zip(*(example.x for example in examples), strict=True)
    return {name: (min(column), max(column)) for name, column in zip(FEATURES, columns, strict=True)}


def stratified_folds(states: Sequence[State], folds: int, rng: random.Random) -> list[int]:
    """Fold number (0 to ``folds`` - 1) of each state, stratified by length."""
    order = sorted(range(len(states)), key=lambda i: (states[i].computed_tokens, states[i].name))
    fold = [0] * len(states)
    for start in range(0, len(order), folds):
        fold_numbers = rng.sample(range(folds), folds)
        for index, number in zip(order[start : start + folds], fold_numbers, strict=False):
            fold[index] = number
    return fold


def sample_states(states: Sequence[State], maximum: int, rng: random.Random) -> list[State]:
    """Sample at most ``maximum`` states, evenly over the lengths and with the shortest and longest; in their order."""
    if len(states) <= maximum:
        return list(states)
    order = sorted(range(len(states)), key=lambda i: (states[i].computed_tokens, states[i].name))
    inner, start = len(states) - 2, rng.random()
    positions = {1 + int((number + start) * inner / (maximum - 2)) for number in range(maximum - 2)}
    return [states[i] for i in sorted(order[position] for position in (0, *sorted(positions), len(states) - 1))]
