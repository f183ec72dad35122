"""Held-out error of a transferred model by the number of states it was measured with."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvpolicy.cost.model import FittedModel
from kvpolicy.datasets.examples import Example, expected_examples_of, log_miss, noise_floors
from kvpolicy.datasets.profiles import State
from kvpolicy.events import KINDS, Kind


@dataclass(frozen=True, slots=True)
class ErrorByCount:
    """Held-out error by number of measured states, over several draws of these."""

    states: int
    draws: int
    mean_error: Mapping[Kind, float]
    """Mean |log(measured / predicted)| of held-out states, averaged over the draws."""
    worst_draw: Mapping[Kind, float]
    """Maximum of the draws' means."""


def error_by_count(
    counts: Sequence[int],
    states: Sequence[State],
    held_out: Sequence[State],
    predict: Callable[[Sequence[State]], FittedModel],
    seed: int,
    draws: int = 5,
) -> tuple[ErrorByCount, ...]:
    """Error on ``held_out`` by number of ``states`` used; ``predict``: from states to a model."""
    rng = random.Random(f"error by count {seed}")
    examples, floors = expected_examples_of(held_out), noise_floors([*states, *held_out])
    rows = []
    for count in counts:
        drawn = (spread(states, count, rng) for _ in range(draws if count else 1))
        errors = [mean_errors(predict(some), examples, floors) for some in drawn]
        rows.append(
            ErrorByCount(
                count,
                len(errors),
                {kind: sum(error[kind] for error in errors) / len(errors) for kind in KINDS},
                {kind: max(error[kind] for error in errors) for kind in KINDS},
            )
        )
    return tuple(rows)


def mean_errors(
    model: FittedModel, examples: Mapping[Kind, Sequence[Example]], floors: Mapping[Kind, float]
) -> dict[Kind, float]:
    """Mean |log(measured / predicted)| over the ``examples``, by option. ``floors``: noise floors, seconds."""
    return {
        kind: sum(
            abs(log_miss(example.engine_s, model.seconds(kind, example.x), floors[kind])) for example in examples[kind]
        )
        / len(examples[kind])
        for kind in KINDS
    }


def spread(states: Sequence[State], count: int, rng: random.Random) -> list[State]:
    """``count`` states, one drawn at random from each of ``count`` quantile ranges of length."""
    ordered = sorted(states, key=lambda state: (state.computed_tokens, state.name))
    edges = [round(i * len(ordered) / count) for i in range(count + 1)] if count else []
    return [rng.choice(ordered[low:high]) for low, high in pairwise(edges)]


def doubling(last: int) -> tuple[int, ...]:
    """1, 2, 4, 8 ... below ``last``, and ``last``."""
    counts = [1 << i for i in range(last.bit_length()) if 1 << i < last]
    return (*counts, last)
