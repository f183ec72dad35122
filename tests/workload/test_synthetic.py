"""Workloads: the same seed gives the same requests, and their lengths follow the quantiles they are drawn from."""

from __future__ import annotations

import random
from dataclasses import FrozenInstanceError
from itertools import pairwise

import pytest

from kvpolicy.workload import (
    AZURE_CONVERSATION,
    DEEPSEEK_R1,
    LEVELS,
    SHAREGPT,
    Lengths,
    Request,
    Workload,
    all_at_once,
    length_at,
    random_arrivals,
    scale_to,
)

ALL = (AZURE_CONVERSATION, SHAREGPT, DEEPSEEK_R1)
UNIFORM = Lengths("uniform", tuple(round(1000 * level) for level in LEVELS), tuple(range(len(LEVELS))), "made up")


def test_levels_are_every_five_percent_with_tails() -> None:
    assert len(LEVELS) == 23
    assert LEVELS[:3] == (0.0, 0.01, 0.05)
    assert LEVELS[-3:] == (0.95, 0.99, 1.0)
    assert list(LEVELS) == sorted(LEVELS)


def test_quantile_is_linear_between_levels() -> None:
    assert length_at(UNIFORM.prompt_tokens, 0.0) == 0
    assert length_at(UNIFORM.prompt_tokens, 1.0) == 1000
    assert length_at(UNIFORM.prompt_tokens, 0.5) == 500
    assert length_at(UNIFORM.prompt_tokens, 0.525) == pytest.approx(525)
    assert length_at(UNIFORM.prompt_tokens, 0.03) == pytest.approx(30)


def test_quantile_refuses_levels_outside() -> None:
    with pytest.raises(ValueError, match=r"level 1\.5: should be from 0 to 1"):
        length_at(UNIFORM.prompt_tokens, 1.5)


@pytest.mark.parametrize("lengths", ALL, ids=lambda lengths: lengths.name)
def test_drawn_lengths_have_the_quantiles(lengths: Lengths) -> None:
    rng = random.Random(0)
    drawn = [lengths.draw(rng) for _ in range(20_000)]
    for values, column in ((lengths.prompt_tokens, 0), (lengths.output_tokens, 1)):
        ordered = sorted(pair[column] for pair in drawn)
        for level in (0.25, 0.5, 0.75, 0.9):
            # In levels, since a distribution may be steep: the share below the quantile is the level, to 5 errors.
            below = sum(value < length_at(values, level) for value in ordered) / len(ordered)
            assert below == pytest.approx(level, abs=5 * (level * (1 - level) / len(ordered)) ** 0.5)


@pytest.mark.parametrize("lengths", ALL, ids=lambda lengths: lengths.name)
def test_mean_is_that_of_what_is_drawn(lengths: Lengths) -> None:
    rng = random.Random(1)
    drawn = [lengths.draw(rng) for _ in range(40_000)]
    for column, quantiles in enumerate((lengths.prompt_tokens, lengths.output_tokens)):
        widths = [high - low for low, high in pairwise(LEVELS)]
        mean = sum(width * (a + b) / 2 for width, (a, b) in zip(widths, pairwise(quantiles), strict=True))
        assert sum(pair[column] for pair in drawn) / len(drawn) == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize("lengths", ALL, ids=lambda lengths: lengths.name)
def test_lengths_name_source_and_licence(lengths: Lengths) -> None:
    assert any(licence in lengths.source for licence in ("CC-BY-4.0", "Apache-2.0"))
    assert "/" in lengths.source


def test_same_seed_same_workload() -> None:
    one, other, third = (all_at_once(AZURE_CONVERSATION, 50, seed, 2048) for seed in (3, 3, 4))
    assert one == other
    assert one.requests != third.requests
    assert one.seed == 3


@pytest.mark.parametrize("lengths", ALL, ids=lambda lengths: lengths.name)
def test_requests_fit_the_context(lengths: Lengths) -> None:
    workload = all_at_once(lengths, 2000, 0, 512)
    assert workload.longest_tokens <= 512
    assert min(request.prompt_tokens for request in workload.requests) >= 1
    assert min(request.output_tokens for request in workload.requests) >= 1


def test_scale_brings_the_tails_into_the_context() -> None:
    factor = scale_to(AZURE_CONVERSATION, 2048)
    assert factor == pytest.approx(2048 / (4123 + 610))
    assert scale_to(AZURE_CONVERSATION, 1 << 20) == 1.0
    one = all_at_once(AZURE_CONVERSATION, 100, 0, 1 << 20, scale=1.0)
    half = all_at_once(AZURE_CONVERSATION, 100, 0, 1 << 20, scale=0.5)
    for request, smaller in zip(one.requests, half.requests, strict=True):
        assert smaller.prompt_tokens == pytest.approx(request.prompt_tokens / 2, abs=1)


def test_all_at_once_arrives_at_once() -> None:
    assert {request.arrival_s for request in all_at_once(SHAREGPT, 10, 0, 1024).requests} == {0.0}


def test_a_context_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="context_tokens is 1"):
        all_at_once(SHAREGPT, 1, 0, 1)


def test_random_arrivals_have_rate_and_variation() -> None:
    for variation in (0.5, 1.0, 2.0):
        arrivals = random_arrivals(40_000, 8.0, random.Random(0), variation)
        gaps = [later - earlier for earlier, later in pairwise(arrivals)]
        mean = sum(gaps) / len(gaps)
        spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
        assert mean == pytest.approx(1 / 8, rel=0.05)
        assert spread / mean == pytest.approx(variation, rel=0.05)
        assert list(arrivals) == sorted(arrivals)


def test_random_arrivals_refuse_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="rate_per_s 0"):
        random_arrivals(3, 0, random.Random(0))


def test_arriving_keeps_everything_else() -> None:
    workload = all_at_once(AZURE_CONVERSATION, 3, 0, 1024)
    moved = workload.arriving((0.0, 1.5, 2.0))
    assert [request.arrival_s for request in moved.requests] == [0.0, 1.5, 2.0]
    assert [one.total_tokens for one in moved.requests] == [one.total_tokens for one in workload.requests]
    with pytest.raises(ValueError, match="zip"):
        workload.arriving((0.0,))


def test_sums_and_first() -> None:
    workload = Workload("by hand", (Request(0.0, 3, 4), Request(1.0, 5, 6)), 0)
    assert (workload.prompt_tokens, workload.output_tokens, workload.longest_tokens) == (8, 10, 11)
    assert workload.first(1).requests == (Request(0.0, 3, 4),)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ((Request(1.0, 1, 1), Request(0.0, 1, 1)), "should rise"),
        ((Request(-1.0, 1, 1),), "not be negative"),
        ((Request(0.0, 0, 1),), "request 0"),
        ((Request(0.0, 1, 1), Request(0.0, 1, 0)), "request 1"),
    ],
)
def test_impossible_workloads_are_refused(requests: tuple[Request, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload("wrong", requests, 0)


def test_lengths_that_fall_or_are_too_few_are_refused() -> None:
    with pytest.raises(ValueError, match="rising quantiles"):
        Lengths("few", (1, 2), (1, 2), "")
    with pytest.raises(ValueError, match="rising quantiles"):
        Lengths("falling", tuple(reversed(UNIFORM.prompt_tokens)), UNIFORM.output_tokens, "")


def test_records_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Request(0.0, 1, 1).prompt_tokens = 2  # type: ignore[misc]
