"""Examples to learn from: features once per sample, draws spread over lengths."""

from __future__ import annotations

import random
from itertools import pairwise

from kvpolicy.datasets.examples import drawn, examples_of, option_of
from kvpolicy.datasets.profiles import dataset_of
from kvpolicy.events import KINDS
from tests.synthetic import make_trace


def test_every_fold_of_a_fit_gets_the_same_features_without_working_them_out_again() -> None:
    states = dataset_of({"x": make_trace(states=12)}).states
    first, again = examples_of(states), examples_of(states[:6])
    for kind in KINDS:
        assert all(one.x is other.x for one, other in zip(first[kind], again[kind], strict=False))
    sample = states[0].samples["swap"][0]
    assert sample.option == option_of("swap", sample.situation.computed_tokens)


def test_a_draw_keeps_the_ends_and_spreads_over_the_lengths() -> None:
    states = list(dataset_of({"made": make_trace(states=101, repeats=1)}).states)
    random.Random(5).shuffle(states)
    some = drawn(states, 20, random.Random(0))
    assert len(some) == 20 and some == [state for state in states if state in some]
    every = sorted(state.computed_tokens for state in states)
    places = sorted(every.index(state.computed_tokens) for state in some)
    assert (places[0], places[-1]) == (0, 100)
    assert max(b - a for a, b in pairwise(places)) <= 12
    assert drawn(states, 101, random.Random(0)) == states
    assert drawn(states, 20, random.Random(1)) != some
