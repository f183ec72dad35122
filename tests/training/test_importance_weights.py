"""Weights of records of a log, and averages over all of its situations."""

from __future__ import annotations

import random
from math import sqrt

import pytest

from kvpolicy.datasets.examples import Example
from kvpolicy.features import features_of
from kvpolicy.training.importance_weights import (
    MAX_WEIGHT,
    Average,
    Term,
    average,
    clipped,
    weight_of,
    weighted_example,
)
from tests.synthetic import options_for
from tests.training.log_records import record


def test_an_example_weighs_what_its_record_stands_for() -> None:
    one = record(chance=0.4)
    x = features_of(one.situation, options_for(one.situation)[1])
    assert weighted_example(one) == Example(x, one.engine_s, 2.5)


def test_weights_are_clipped_and_counted() -> None:
    some = [record(chance=0.001), record(chance=0.2)]
    assert [weight_of(one) for one in some] == [MAX_WEIGHT, 5.0]
    assert clipped(some) == 1


def test_an_average_worked_by_hand() -> None:
    """Terms 2 + 2 x (3 - 2) = 4, and 1; two requests: mean 2.5, standard error 1.5, t of one degree 12.706."""
    mean = average([Term("a", 2.0, 2.0, 3.0), Term("b", 1.0, 0.0, 0.0)])
    assert (mean.direct_s, mean.robust_s) == (1.5, 2.5)
    assert mean.high_s - mean.robust_s == pytest.approx(12.7062 * 1.5, rel=1e-4)


def test_what_happens_to_one_request_counts_once() -> None:
    """Every record four times: no narrower."""
    rng = random.Random(1)
    terms = [Term(str(n), 1.0, 2.0 * (n % 2), rng.gauss(1.0, 0.2)) for n in range(60)]
    once, often = average(terms), average(terms * 4)
    assert often.high_s - often.low_s == pytest.approx(once.high_s - once.low_s, rel=1e-9)


def test_a_wrong_model_is_put_right_by_right_probabilities() -> None:
    """True costs 1 to 3, taken with a chance that rises with the cost; the model says half of it."""
    rng, terms = random.Random(2), []
    for n in range(20_000):
        cost = rng.uniform(1.0, 3.0)
        chance = 0.1 + 0.25 * cost
        taken = rng.random() < chance
        terms.append(Term(str(n), cost / 2, 1 / chance if taken else 0.0, cost if taken else 0.0))
    mean = average(terms)
    assert mean.low_s <= 2.0 <= mean.high_s
    assert mean.factor == pytest.approx(2.0, rel=0.03)


def test_an_interval_holds_nineteen_times_in_twenty() -> None:
    held = 0
    for seed in range(300):
        rng = random.Random(seed)
        terms = [
            Term(str(n // 2), 1.5, 2.0 if taken else 0.0, rng.expovariate(0.5) if taken else 0.0)
            for n in range(400)
            for taken in [rng.random() < 0.5]
        ]
        mean = average(terms)
        held += mean.low_s <= 2.0 <= mean.high_s
    assert 0.95 - 3 * sqrt(0.95 * 0.05 / 300) <= held / 300


@pytest.mark.parametrize(
    ("given", "factor"),
    [
        (Average(1.0, 1.1, 0.9, 1.3), 1.0),
        (Average(1.0, 1.5, 1.2, 1.8), 1.5),
        (Average(1.0, -0.5, -0.8, -0.2), 1.0),
    ],
)
def test_only_what_is_more_than_chance_scales(given: Average, factor: float) -> None:
    assert given.factor == factor


def test_one_request_has_no_interval() -> None:
    with pytest.raises(ValueError, match="of 1 requests"):
        average([Term("a", 1.0, 1.0, 1.0)])
