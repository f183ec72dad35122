"""Arrival processes have the rate and the variation that they are asked for, and the same seed gives the same times."""

from __future__ import annotations

import math
import random
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.workload import (
    Arrivals,
    AtOnce,
    Bursts,
    Even,
    Gamma,
    Groups,
    Poisson,
    Think,
    Weibull,
    WorkloadError,
    random_arrivals,
)

RATE_PER_S = 4.0


PROCESSES: tuple[Arrivals, ...] = (
    Even(RATE_PER_S),
    Poisson(RATE_PER_S),
    Gamma(RATE_PER_S, 2.0),
    Weibull(RATE_PER_S, 0.7),
    Bursts(RATE_PER_S, on_s=3.0, off_s=9.0),
    Groups(RATE_PER_S, 12),
)


def drawn(process: Arrivals, count: int, seed: int = 0) -> list[float]:
    return list(islice(process.times_s(random.Random(seed)), count))


def gaps_s(times_s: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise([0.0, *times_s])]


def variation(gaps: list[float]) -> float:
    mean = sum(gaps) / len(gaps)
    return math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: type(process).__name__)
def test_the_rate_is_the_one_asked_for(process: Arrivals) -> None:
    count = 40_000
    assert count / drawn(process, count)[-1] == pytest.approx(RATE_PER_S, rel=0.05)


@pytest.mark.parametrize("process", [*PROCESSES, AtOnce()], ids=lambda process: type(process).__name__)
@given(seed=st.integers(0, 1000))
def test_times_never_fall_and_follow_the_seed(process: Arrivals, seed: int) -> None:
    times = drawn(process, 50, seed)
    assert times == sorted(times)
    assert times[0] >= 0
    assert times == drawn(process, 50, seed)


@pytest.mark.parametrize(
    ("process", "expected"),
    [
        (Even(3.0), 0.0),
        (Poisson(3.0), 1.0),
        (Gamma(3.0, 0.5), 0.5),
        (Gamma(3.0, 2.0), 2.0),
        # sqrt(gamma(1 + 2/k) / gamma(1 + 1/k)**2 - 1) by hand for k = 1 and 2.
        (Weibull(3.0, 1.0), 1.0),
        (Weibull(3.0, 2.0), math.sqrt(4 / math.pi - 1)),
    ],
    ids=repr,
)
def test_gaps_vary_as_asked(process: Arrivals, expected: float) -> None:
    assert variation(gaps_s(drawn(process, 40_000))) == pytest.approx(expected, rel=0.04, abs=1e-9)


def test_bursts_are_silent_between() -> None:
    """On for 1 s and off for 99 s on average: nearly all gaps are short, a few are very long."""
    gaps = gaps_s(drawn(Bursts(1.0, on_s=1.0, off_s=99.0), 20_000))
    assert sum(gap < 0.1 for gap in gaps) / len(gaps) > 0.97
    assert max(gaps) > 300


def test_groups_arrive_together() -> None:
    """Bursts of 12 at 4 requests/s: a third of a group per second, at independent times."""
    times = drawn(Groups(4.0, 12), 12 * 3000)
    groups = times[::12]
    assert times == [at_s for at_s in groups for _ in range(12)]
    gaps = gaps_s(groups)
    assert sum(gaps) / len(gaps) == pytest.approx(3.0, rel=0.05)
    assert variation(gaps) == pytest.approx(1.0, rel=0.05)
    assert drawn(Groups(4.0, 1), 20) == drawn(Poisson(4.0), 20)


def test_even_and_at_once_by_hand() -> None:
    assert drawn(Even(4.0), 3) == [0.25, 0.5, 0.75]
    assert drawn(AtOnce(), 3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Poisson(0.0),
        lambda: Even(-1.0),
        lambda: Gamma(1.0, 0.0),
        lambda: Weibull(1.0, math.nan),
        lambda: Bursts(1.0, 1.0, math.inf),
        lambda: Think(-1.0),
        lambda: Groups(0.0, 3),
        lambda: Gamma(1.0, 1e-200),
    ],
)
def test_impossible_processes_are_refused(make: type) -> None:
    with pytest.raises(WorkloadError, match=r"\w+: \w+ is .*, should be (above 0|0 or more|from 0\.0?01 to 1000)"):
        make()


def test_groups_of_none_are_refused() -> None:
    with pytest.raises(WorkloadError, match="Groups: size is 0, should be 1 or more"):
        Groups(1.0, 0)


def test_pauses_have_mean_and_variation() -> None:
    rng = random.Random(0)
    assert [Think(3.0, 0.0).draw(rng), Think(0.0).draw(rng)] == [3.0, 0.0]
    pauses = [Think(5.0, 0.5).draw(rng) for _ in range(20_000)]
    assert sum(pauses) / len(pauses) == pytest.approx(5.0, rel=0.05)
    assert variation(pauses) == pytest.approx(0.5, rel=0.05)


def test_random_arrivals_have_rate_and_variation() -> None:
    for variation in (0.5, 1.0, 2.0):
        arrivals = random_arrivals(40_000, 8.0, random.Random(0), variation)
        gaps = [later - earlier for earlier, later in pairwise(arrivals)]
        mean = sum(gaps) / len(gaps)
        spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
        assert mean == pytest.approx(1 / 8, rel=0.05)
        assert spread / mean == pytest.approx(variation, rel=0.05)
        assert list(arrivals) == sorted(arrivals)


def test_random_arrivals_refuse_a_rate_of_zero() -> None:
    with pytest.raises(ValueError, match="rate_per_s 0"):
        random_arrivals(3, 0, random.Random(0))
