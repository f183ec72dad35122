"""The keys of prompts, what a replay counts, and what hindsight gives up."""

from __future__ import annotations

import pytest

from kvpolicy.caching.by_use import Lru
from kvpolicy.caching.prompt_replay import chains_of, hindsight, replay
from kvpolicy.workload import Request


def test_keys_stand_for_a_block_and_all_before_it() -> None:
    requests = [
        Request(0.0, 64, 1, (1, 2, 3, 4), 16),
        Request(1.0, 64, 1, (1, 2, 9, 4), 16),
        Request(2.0, 40, 1, (1, 2, 3), 16),  # two full blocks of the prompt
        Request(3.0, 15, 1, (1,), 16),
        Request(4.0, 100, 1),
    ]
    first, second, third = chains_of(requests)
    assert first[:2] == second[:2] == third and len(first) == 4
    assert first[2] != second[2] and first[3] != second[3]
    joined = list(chains_of(requests, join=2))
    assert [len(chain) for chain in joined] == [2, 2, 1] and joined[0][0] == joined[1][0] == joined[2][0]


def test_a_replay_counts_what_leading_blocks_save() -> None:
    result = replay(["abc", "abd", "xbc"], Lru(10), lambda position: 1.0 + position)
    assert (result.prompts, result.blocks, result.hit_blocks) == (3, 9, 2)
    assert (result.saved_s, result.whole_s) == (3.0, 18.0) and result.saved_share == pytest.approx(1 / 6)


def test_a_prompt_beyond_the_capacity_is_stored_from_its_beginning() -> None:
    assert replay(["abcde", "abcde"], Lru(2), lambda _: 1.0).hit_blocks == 2


def test_hindsight_gives_up_what_is_asked_for_last_and_stores_nothing_in_vain() -> None:
    chains = ["a", "b", "c", "a", "b", "d", "b", "a"]
    assert replay(chains, Lru(2), lambda _: 1.0).hit_blocks == 1
    assert hindsight(chains, 2, lambda _: 1.0).hit_blocks == 4


def test_hindsight_never_gives_up_a_block_that_others_continue() -> None:
    """With two blocks, ab stays whole although a comes again only with b."""
    chains = ["ab", "c", "d", "c", "d", "ab"]
    assert hindsight(chains, 2, lambda _: 1.0).hit_blocks == 2
    assert hindsight(chains, 3, lambda _: 1.0).hit_blocks == 3


def test_hindsight_by_price_prefers_what_is_dearer() -> None:
    dear = {0: 1.0, 1: 100.0}
    chains = ["xy", "p", "q", "p", "q", "xy"]
    plain, priced = (hindsight(chains, 2, dear.__getitem__, by_price) for by_price in (False, True))
    assert priced.saved_s > plain.saved_s


def test_hindsight_by_price_compares_blocks_at_one_time() -> None:
    """At equal prices it gives up what plain hindsight does, however long ago a block was asked for; and nothing is
    worth keeping that costs nothing."""
    chains = ["c", "d", "a", "a", "c", "d", "a", "c"]
    assert [hindsight(chains, 2, lambda _: 1.0, by_price).hit_blocks for by_price in (False, True)] == [4, 4]
    assert hindsight(chains, 2, lambda _: 0.0, by_price=True).saved_s == 0.0
