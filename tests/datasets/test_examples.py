"""Examples to learn from: features once per sample, draws spread over lengths."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from kvpolicy.datasets.examples import examples_of, noise_floors, option_of, sample_states
from kvpolicy.datasets.profiles import dataset_of
from kvpolicy.events import KINDS
from tests.synthetic import changed, make_trace


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
    some = sample_states(states, 20, random.Random(0))
    assert len(some) == 20 and some == [state for state in states if state in some]
    every = sorted(state.computed_tokens for state in states)
    places = sorted(every.index(state.computed_tokens) for state in some)
    assert (places[0], places[-1]) == (0, 100)
    assert max(b - a for a, b in pairwise(places)) <= 12
    assert sample_states(states, 101, random.Random(0)) == states
    assert sample_states(states, 20, random.Random(1)) != some


def test_a_window_that_went_wrong_does_not_move_its_state() -> None:
    trace = make_trace(noise=0.02, repeats=5)
    rows = trace.rows("outcomes")
    for row in rows[::10]:
        row["engine_s"] += 1.0
    wrong = examples_of(dataset_of({"made": changed(trace, "outcomes", rows)}).states)
    right = examples_of(dataset_of({"made": trace}).states)
    for kind in KINDS:
        for one, other in zip(wrong[kind], right[kind], strict=True):
            assert one.engine_s == pytest.approx(other.engine_s, rel=0.1)


def test_floor_is_the_noise_of_a_median() -> None:
    """1.2533 sigma / sqrt(25); a tenth of the windows going wrong moves it by little."""
    trace = make_trace(noise=0.0, additive_noise_s=2e-4, repeats=25)
    for floor in noise_floors(dataset_of({"made": trace}).states).values():
        assert floor == pytest.approx(1.2533 * 2e-4 / 5, rel=0.1)
    rows = trace.rows("outcomes")
    for row in rows[::10]:
        row["engine_s"] += 1.0
    for floor in noise_floors(dataset_of({"made": changed(trace, "outcomes", rows)}).states).values():
        assert floor == pytest.approx(1.2533 * 2e-4 / 5, rel=0.3)
