"""Measured states as numbers to fit: one example per state and option, and the noise under them."""

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
"""No trace is taken to tell costs under a microsecond apart."""


@dataclass(frozen=True, slots=True)
class Example:
    """One option in one state: mean features and median cost over its repeats."""

    x: Features
    engine_s: float


Examples = Mapping[Kind, tuple[Example, ...]]


def option_of(kind: Kind, computed_tokens: int) -> Option:
    return Option("recompute") if kind == "recompute" else Option("swap", computed_tokens, "host")


def examples_of(states: Iterable[State]) -> dict[Kind, tuple[Example, ...]]:
    """One example per state and option, in the order of the states."""
    listed = list(states)
    return {kind: examples_under(listed, kind) for kind in KINDS}


def examples_under(states: Iterable[State], kind: Kind) -> tuple[Example, ...]:
    """The same of one option alone."""
    return tuple(_example(state, kind) for state in states)


def _example(state: State, kind: Kind) -> Example:
    return Example(state.mean_features[kind], state.typical_s[kind])


def noise_floors(states: Sequence[State]) -> dict[Kind, float]:
    """By option, the noise of a state's median cost, seconds: what the traces cannot tell from no cost.

    1.2533 sigma / sqrt(repeats), sigma from the median distance of a window from its state's median: few windows that
    went wrong do not move it. A cost below it, or below 0, is taken as that much wherever a logarithm needs it; fits
    themselves see the values as they are.
    """
    floors = {}
    for kind in KINDS:
        repeated = [(state.typical_s[kind], state.costs_s(kind)) for state in states]
        repeated = [(centre, costs) for centre, costs in repeated if len(costs) > 1]
        floors[kind] = MIN_FLOOR_S
        if repeated:
            distances = [abs(cost_s - centre) for centre, costs in repeated for cost_s in costs]
            sigma_s = 1.4826 * median(distances)
            floors[kind] = max(MIN_FLOOR_S, 1.2533 * sigma_s / sqrt(median(len(costs) for _, costs in repeated)))
    return floors


def log_miss(measured_s: float, predicted_s: float, floor_s: float) -> float:
    """log(measured / predicted), neither below the floor."""
    return log(max(measured_s, floor_s) / max(predicted_s, floor_s))


def ranges_of(examples: Sequence[Example]) -> dict[str, tuple[float, float]]:
    """Lowest and highest of each feature."""
    columns = zip(*(example.x for example in examples), strict=True)
    return {name: (min(column), max(column)) for name, column in zip(FEATURES, columns, strict=True)}


def dealt(states: Sequence[State], hands: int, rng: random.Random) -> list[int]:
    """A hand (0 to ``hands`` - 1) for each state, each hand with every length: neighbours in length are dealt apart."""
    order = sorted(range(len(states)), key=lambda i: (states[i].computed_tokens, states[i].name))
    hand = [0] * len(states)
    for start in range(0, len(order), hands):
        numbers = rng.sample(range(hands), hands)
        for place, number in zip(order[start : start + hands], numbers, strict=False):
            hand[place] = number
    return hand


def drawn(states: Sequence[State], most: int, rng: random.Random) -> list[State]:
    """At most so many of the states, in their order; of more, evenly over the lengths, the shortest and longest too."""
    if len(states) <= most:
        return list(states)
    order = sorted(range(len(states)), key=lambda i: (states[i].computed_tokens, states[i].name))
    inner, start = len(states) - 2, rng.random()
    taken = {1 + int((number + start) * inner / (most - 2)) for number in range(most - 2)}
    return [states[i] for i in sorted(order[at] for at in (0, *sorted(taken), len(states) - 1))]
