"""Lengths by quantiles: drawn lengths follow them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from kvpolicy.workload import (
    AZURE_CONVERSATION,
    DEEPSEEK_R1,
    LEVELS,
    SHAREGPT,
    SHIPPED,
    Lengths,
    length_at,
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


def test_lengths_that_fall_or_are_too_few_are_refused() -> None:
    with pytest.raises(ValueError, match="rising quantiles"):
        Lengths("few", (1, 2), (1, 2), "")
    with pytest.raises(ValueError, match="rising quantiles"):
        Lengths("falling", tuple(reversed(UNIFORM.prompt_tokens)), UNIFORM.output_tokens, "")


def test_shipped_names_are_those_of_their_lengths() -> None:
    assert SHIPPED["azure-conversation-2023"] is AZURE_CONVERSATION
