"""Errors by the number of measurements: how many are taken, and which."""

from __future__ import annotations

import random

from kvpolicy.datasets.profiles import dataset_of
from kvpolicy.training.error_by_count import doubling, spread
from tests.synthetic import make_trace


def test_states_to_measure_are_spread_over_length() -> None:
    states = dataset_of({"made": make_trace(states=60)}).states
    some = [state.computed_tokens for state in spread(states, 4, random.Random(0))]
    ordered = sorted(state.computed_tokens for state in states)
    assert some == sorted(some)
    for quarter, tokens in enumerate(some):
        assert ordered[15 * quarter] <= tokens <= ordered[15 * quarter + 14]


def test_numbers_of_measurements_double() -> None:
    assert doubling(1) == (1,)
    assert doubling(16) == (1, 2, 4, 8, 16)
    assert doubling(43) == (1, 2, 4, 8, 16, 32, 43)
