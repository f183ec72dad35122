"""What survives of a victim's blocks: worked by hand, and learned from draws of known chance."""

from __future__ import annotations

import random
from dataclasses import replace
from math import exp
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.events import Cause, Preemption
from kvpolicy.survival import DECAY, PRIOR_TOKENS, PRIOR_WEIGHT, Absences, AllOrNothing, Survival
from tests.synthetic import situation

SIZE = 16


def victim(blocks: int, **more: int | Cause) -> Preemption:
    """Full blocks of 16 tokens, all hashed, and a last one with a single token."""
    return situation(SIZE * blocks + 1, SIZE, hashed_blocks=blocks, **more)


def expected(survival: Survival, one: Preemption) -> float:
    return survival.hit_blocks(
        one.held_blocks, one.shared_blocks, one.hashed_blocks, one.free_blocks, one.block_size, one.cause
    )


def lost_blocks(mean_tokens: float, ahead: int, blocks: int) -> float:
    """The integral, summed up in steps of an eighth of a token."""
    steps = range(ahead * SIZE * 8, (ahead + blocks) * SIZE * 8)
    return sum(exp(-(step + 0.5) / 8 / mean_tokens) for step in steps) / 8 / SIZE


def drawn_blocks(rng: random.Random, mean_tokens: float) -> int:
    """Blocks that are taken in an absence; how full the blocks of those that take them are is a matter of chance."""
    return int(rng.expovariate(1 / mean_tokens) / SIZE + rng.random())


def happens(survival: Survival, name: str, one: Preemption, taken_blocks: int) -> int:
    """Preempt, admit and close, after so many blocks were taken; returns the blocks found."""
    survival.preempted(name, one)
    survival.admitted(name)
    ahead = one.free_blocks + one.held_blocks - one.hashed_blocks
    at_risk = one.hashed_blocks - one.shared_blocks
    found = one.hashed_blocks - min(max(taken_blocks - ahead, 0), at_risk)
    survival.closed(name, found * SIZE)
    return found


@pytest.mark.parametrize(("free", "shared"), [(0, 0), (3, 0), (5, 4)])
def test_before_anything_was_seen_the_prior_decides(free: int, shared: int) -> None:
    """20 hashed blocks; the unhashed last one and the free ones are taken first."""
    one = victim(20, free_blocks=free, shared_blocks=shared)
    wanted = 20 - lost_blocks(PRIOR_TOKENS, free + 1, 20 - shared)
    assert expected(Survival(), one) == pytest.approx(wanted, abs=1e-4)


def test_without_hashed_blocks_only_the_shared_ones_survive() -> None:
    assert expected(Survival(), replace(victim(9), hashed_blocks=0)) == 0.0
    assert expected(Survival(), replace(victim(9, shared_blocks=2), hashed_blocks=0)) == 2.0
    assert expected(Survival(), victim(9, shared_blocks=9)) == 9.0


def test_with_memory_to_spare_all_survives() -> None:
    assert expected(Survival(), victim(20, free_blocks=1000)) == pytest.approx(20)


@given(
    blocks=st.integers(0, 3000),
    shared=st.integers(0, 3000),
    free=st.integers(0, 10**6),
    seen=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 100), st.booleans()), max_size=30),
)
def test_what_is_expected_lies_between_the_shared_and_the_hashed(
    blocks: int, shared: int, free: int, seen: list[tuple[int, int, bool]]
) -> None:
    survival = Survival()
    for number, (held, taken, spare) in enumerate(seen):
        happens(survival, str(number), victim(held + 1, free_blocks=5 * spare), taken)
    one = victim(blocks, shared_blocks=min(shared, blocks), free_blocks=free)
    assert one.shared_blocks <= expected(survival, one) <= one.hashed_blocks


@pytest.mark.parametrize("mean_tokens", [40.0, 300.0, 2000.0])
def test_it_learns_how_many_survive_though_many_absences_outlast_the_blocks(mean_tokens: float) -> None:
    """Of victims of 1 to 60 blocks, all draws of one chance; in the long run as many survive as were expected."""
    rng, survival = random.Random(f"{mean_tokens}"), Survival()
    sums = [0.0, 0.0]
    for number in range(4000):
        one = victim(rng.randint(1, 60), free_blocks=1)
        hits = expected(survival, one)
        found = happens(survival, str(number), one, drawn_blocks(rng, mean_tokens))
        if number > 100:
            sums = [sums[0] + one.hashed_blocks - hits, sums[1] + one.hashed_blocks - found]
    assert sums[0] == pytest.approx(sums[1], rel=0.08)


def test_an_absence_counts_with_the_tokens_that_were_written() -> None:
    """The victim's last block is ahead of the others. 3 of 10 lost: 4 blocks; all lost: more than 11."""
    survival = Survival()
    happens(survival, "some", victim(10, free_blocks=0), 4)
    tokens, ends = DECAY * PRIOR_WEIGHT * PRIOR_TOKENS + 4 * SIZE, DECAY * PRIOR_WEIGHT + 1
    memory = survival.absences["memory"]
    assert (memory.tokens, memory.ends) == (tokens, ends)
    happens(survival, "all", victim(10), 99)
    assert (memory.tokens, memory.ends) == (DECAY * tokens + 11 * SIZE, DECAY * ends)
    mean = memory.tokens / memory.ends
    assert memory.mean_tokens == mean
    happens(survival, "none", victim(10, free_blocks=3), 0)
    before = DECAY * tokens + 11 * SIZE
    assert memory.tokens == pytest.approx(DECAY * before + mean - 4 * SIZE / (exp(4 * SIZE / mean) - 1))


@pytest.mark.parametrize(("limit", "mean"), [(0.0, 0.0), (1e-9, 0.5e-9), (1e9, PRIOR_TOKENS), (PRIOR_TOKENS, 107.02)])
def test_the_mean_of_what_lasts_less_than_a_limit(limit: float, mean: float) -> None:
    """(1 - 1 / (e - 1)) of the mean, where that is the limit."""
    assert Absences().mean_below(limit) == pytest.approx(mean, rel=1e-4)


def test_memory_to_spare_says_little_of_how_long_absences_last() -> None:
    survival = Survival()
    for number in range(200):
        happens(survival, str(number), victim(10, free_blocks=4000, cause="forced"), 1)
    assert survival.absences["forced"].mean_tokens == pytest.approx(PRIOR_TOKENS)


def test_those_that_wait_have_lost_all_once_no_block_is_free() -> None:
    """Known before they are resumed, and counted once."""
    survival = Survival()
    survival.preempted("waits", victim(10, free_blocks=2))
    survival.preempted("is back", victim(10, free_blocks=2))
    survival.admitted("is back")
    before = expected(survival, victim(10))
    survival.preempted("spare", victim(5, free_blocks=1))
    assert expected(survival, victim(10)) == before
    survival.preempted("next", victim(5, free_blocks=0))
    memory, ends = survival.absences["memory"], DECAY**2 * PRIOR_WEIGHT
    tokens = DECAY * (DECAY * PRIOR_WEIGHT * PRIOR_TOKENS + 13 * SIZE) + 7 * SIZE
    assert (memory.tokens, memory.ends) == (pytest.approx(tokens), ends)
    assert expected(survival, victim(10)) < before
    survival.closed("waits", 0)
    assert memory.ends == ends
    survival.closed("is back", 10 * SIZE)
    assert memory.ends == DECAY * ends + 1


def test_what_is_not_known_is_not_learned() -> None:
    survival = Survival()
    survival.preempted("aborted", victim(10))
    survival.closed("aborted", None)
    survival.closed("never seen", 0)
    survival.preempted("emptied", victim(10))
    survival.forget()
    survival.closed("emptied", 0)
    survival.preempted("nothing at risk", victim(10, shared_blocks=10))
    survival.closed("nothing at risk", 160)
    assert survival == Survival()


def test_a_reset_empties_the_cache_and_teaches_nothing() -> None:
    survival = Survival()
    one = victim(10, shared_blocks=2, cause="reset")
    assert expected(survival, one) == 2.0
    survival.preempted("reset", replace(one, free_blocks=9))
    assert survival == Survival()


def test_preemptions_by_tools_are_learned_from_by_themselves() -> None:
    survival = Survival()
    happens(survival, "forced", victim(10, cause="forced"), 99)
    assert survival.absences["forced"] != Absences()
    assert survival.absences["memory"] == Absences()
    assert expected(survival, victim(10)) > expected(survival, victim(10, cause="forced"))


def test_the_mean_is_bounded_where_all_victims_end_alike() -> None:
    """All resumed at once; all gone for long."""
    at_once, gone = Absences(), Absences()
    for _ in range(40_000):
        at_once.add(0.0, ended=True)
        gone.add(1e6, ended=False)
    assert 0 < at_once.mean_tokens < 0.1
    assert 1e9 < gone.mean_tokens < 1e10


def test_nothing_is_kept_of_preemptions_that_are_over() -> None:
    survival = Survival()
    for number in range(500):
        happens(survival, str(number), victim(3 + number % 7, free_blocks=number % 2), number % 9)
    assert survival == Survival(survival.absences)


def test_of_several_tables_nothing_is_expected_before_anything_was_seen() -> None:
    assert expected(AllOrNothing(), victim(20, free_blocks=1000)) == 0.0
    assert AllOrNothing().absence_tokens("memory") == PRIOR_TOKENS and AllOrNothing().absence_tokens("reset") is None


def test_of_several_tables_an_absence_is_counted_until_the_request_has_blocks() -> None:
    """By cause; one that ends while it waits was longer than that, and what is forgotten says nothing."""
    survival, memory, displaced = AllOrNothing(), Absences(), Absences()
    survival.wrote(70)
    for name, cause in (("a", "memory"), ("b", "displaced"), ("c", "memory"), ("reset", "reset")):
        survival.preempted(name, of_tables(0, cause=cause))
        survival.wrote(10)
    survival.admitted("a")
    survival.admitted("reset")
    survival.wrote(5)
    survival.admitted("b")
    survival.closed("c", None)
    survival.closed("a", 0)
    memory.add(40, ended=True)
    memory.add(25, ended=False)
    displaced.add(35, ended=True)
    assert survival.absences == {"memory": memory, "displaced": displaced, "forced": Absences()}
    assert survival.absence_tokens("displaced") == displaced.mean_tokens
    survival.preempted("d", of_tables(0))
    survival.forget()
    survival.admitted("d")
    assert survival.absences["memory"] == memory and not survival._away


def test_of_several_tables_the_share_that_found_all_is_learned_by_cause() -> None:
    """Every third victim finds all of its blocks; one block fewer is as good as none. The others could find none."""
    survival = AllOrNothing()
    for number in range(600):
        name = str(number)
        survival.preempted(name, of_tables(20))
        survival.preempted(f"{name} past its window", of_tables(0))
        survival.closed(name, SIZE * (20 if number % 3 == 0 else 19))
        survival.closed(f"{name} past its window", 0)
    assert expected(survival, of_tables(12)) == pytest.approx(2 * 12 / 3, rel=0.05)
    assert survival.hit_tokens(12 * SIZE, "memory") == pytest.approx(12 * SIZE / 3, rel=0.05)
    assert expected(survival, of_tables(12, cause="forced")) == expected(survival, of_tables(12, cause="reset")) == 0.0
    assert survival.hit_tokens(12 * SIZE, "reset") == 0.0


def test_of_a_window_tokens_are_found_that_no_block_of_it_holds() -> None:
    """A boundary before the window: nothing of the window need not be loaded, and still fewer tokens are computed."""
    survival = AllOrNothing()
    before = replace(of_tables(20), hashed_blocks=0)
    for number in range(600):
        survival.preempted(str(number), before)
        survival.closed(str(number), 20 * SIZE)
    assert expected(survival, before) == 0.0
    assert survival.hit_tokens(20 * SIZE, "memory") == pytest.approx(20 * SIZE, rel=0.05)
    assert Survival().hit_tokens(20 * SIZE, "memory") is None


def of_tables(blocks: int, **more: Any) -> Preemption:
    """A victim that could find tokens of so many blocks in each of two tables."""
    return victim(2 * blocks, hashed_tokens=blocks * SIZE, hit_tokens=0.0, **more)


def test_of_several_tables_what_is_not_known_teaches_nothing() -> None:
    survival = AllOrNothing()
    for name, hit_tokens in (("failed load", None), ("reset", 20 * SIZE)):
        survival.preempted(name, of_tables(20, cause="reset" if name == "reset" else "memory"))
        survival.admitted(name)
        survival.closed(name, hit_tokens)
    survival.preempted("emptied", of_tables(20))
    survival.forget()
    survival.closed("emptied", 20 * SIZE)
    assert all(share.found == 0.0 and share.seen == PRIOR_WEIGHT for share in survival.shares.values())
