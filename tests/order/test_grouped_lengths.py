"""Lengths by class and prompt length: who is told apart, from how many lengths on, and what it costs in memory."""

from __future__ import annotations

import random

import pytest

from kvpolicy.order.grouped_lengths import MAX_CLASSES, PROMPT_LEVELS, SHRINKAGE, GroupedLengths, prompt_level
from kvpolicy.order.seen_lengths import LEVELS, Lengths, level_of

Seen = tuple[str, int, int]


def learned(*seen: Seen) -> GroupedLengths:
    state = GroupedLengths()
    for class_name, prompt_tokens, tokens in seen:
        state = state.seen(class_name, prompt_tokens, tokens)
    return state


def test_levels_of_prompts_double() -> None:
    assert [prompt_level(tokens) for tokens in (0, 1, 2, 3, 4, 1023, 1024)] == [0, 0, 1, 1, 2, 9, 10]
    assert prompt_level(1 << 40) == PROMPT_LEVELS - 1


def test_classes_are_told_apart() -> None:
    state = learned(*[("chat", 100, 10), ("batch", 100, 4000)] * 200)
    assert state.of("chat", 100).remaining(0, 10**6) < 200 < 2000 < state.of("batch", 100).remaining(0, 10**6)
    assert state.of("nobody", 100) == state.pooled


def test_prompts_are_told_apart() -> None:
    state = learned(*[("default", 50, 10), ("default", 5000, 4000)] * 400)
    assert state.of("default", 60).remaining(0, 10**6) < 400 < 2000 < state.of("default", 4500).remaining(0, 10**6)
    assert state.of("default", 1).weights == pytest.approx(state.of("default", 10**6).weights), "its class's"


def test_few_lengths_say_little() -> None:
    """One among many: by hand, its level gets 1 beside the share of its class's, which has the pooled one's in turn."""
    many = learned(*[("batch", 100, 4000)] * 300)
    one = many.seen("chat", 7, 10)
    level = level_of(10)
    of_class = 1.0 + SHRINKAGE * one.pooled.weights[level] / sum(one.pooled.weights)
    total = 1.0 + SHRINKAGE
    assert one.of("chat", 7).weights[level] == pytest.approx(1.0 + SHRINKAGE * of_class / total)
    assert one.of("chat", 7).remaining(0, 10**6) > 2000, "still as of all requests"


def test_without_lengths_it_is_as_of_all() -> None:
    assert GroupedLengths().of("default", 7) == Lengths()
    assert learned(("chat", 1, 50)).pooled == Lengths().seen(50)


def test_the_state_is_frozen_and_bounded() -> None:
    rng = random.Random(1)
    state = GroupedLengths()
    for number in range(3 * MAX_CLASSES):
        before, seen = state, (f"class {number}", rng.randint(1, 10**7), rng.randint(1, 10**7))
        state = state.seen(*seen)
        assert before != state and state == before.seen(*seen) and hash(state) == hash(before.seen(*seen))
    assert len(state.classes) == MAX_CLASSES and len(state.groups) == MAX_CLASSES * (PROMPT_LEVELS + 1)
    assert {len(group) for group in state.groups} == {0, LEVELS}
