"""Files that are given up by price go by the same order as blocks in host memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvpolicy.caching import ByCost, Hinted, Part
from kvpolicy.request_marks import HintLimits
from kvpolicy.tiers import digest_of_key
from tests.tiers.blocks import content, ended, opened

BLOCKS = 24


def prompts(count: int, seed: int) -> list[list[bytes]]:
    """Short prompts and long ones, of which some come again."""
    rng = random.Random(seed)
    names = [b"%d" % rng.randrange(12) if rng.random() < 0.5 else b"once %d" % number for number in range(count)]
    return [[name + b" %d" % place for place in range(3 + len(name) * 7 % 10)] for name in names]


def dearer_further_back(position: int) -> float:
    return 1.0 + position**2


def cheaper_further_back(position: int) -> float:
    return 1.0 / (1 + position)


def kept_in_files(
    directory: Path, price: object, trace: list[list[bytes]], hints: HintLimits | None
) -> list[set[bytes]]:
    tier = opened(directory, BLOCKS, policy="cost", queue_blocks=1000, hints=hints)
    if callable(price):
        tier.reprice(price)
    kept = []
    for number, chain in enumerate(trace, 1):
        tier.asked(chain)
        blocks = {place: [content(key)] for place, key in enumerate(chain)}
        tier.store(number, chain, blocks)
        ended(tier)
        tier.usage()
        kept.append({*tier.digests()})
    tier.close()
    return kept


def kept_in_host_memory(price: object, trace: list[list[bytes]]) -> list[set[bytes]]:
    policy, kept = ByCost(BLOCKS, price) if callable(price) else ByCost(BLOCKS), []
    for keys in trace:
        chain = [digest_of_key(key) for key in keys]
        policy.asked(chain, policy.hits(chain))
        missing = [place for place, key in enumerate(chain) if key not in policy]
        policy.evict(max(0, len(policy) + len(missing) - BLOCKS), {*chain})
        policy.stored(chain, missing)
        kept.append({key for key in policy._there if isinstance(key, bytes)})
    return kept


@pytest.mark.parametrize("hints", [None, HintLimits()], ids=["plain", "heeding hints"])
def test_files_are_given_up_in_the_order_of_host_memory(hints: HintLimits | None, tmp_path: Path) -> None:
    trace, ways = prompts(60, 1), []
    for number, price in enumerate((dearer_further_back, cheaper_further_back, None)):
        in_files = kept_in_files(tmp_path / str(number), price, trace, hints)
        assert in_files == kept_in_host_memory(price, trace)
        ways.append(in_files[-1])
    assert ways[0] != ways[1] != ways[2] != ways[0], "prices decide"


@pytest.mark.parametrize("hints", [None, HintLimits()], ids=["plain", "heeding hints"])
def test_a_part_of_a_prompt_has_the_prices_of_its_places(hints: HintLimits | None, tmp_path: Path) -> None:
    """Nothing else is known of the prompt."""
    tier = opened(tmp_path, BLOCKS, policy="cost", hints=hints)
    tier.store(1, Part([b"f", b"g"], 5), {1: [content(b"g")]})
    policy = tier._policy.inner if isinstance(tier._policy, Hinted) else tier._policy
    assert isinstance(policy, ByCost) and policy._there[digest_of_key(b"g")].position == 6
    ended(tier)
    tier.close()


def test_other_policies_have_no_prices(tmp_path: Path) -> None:
    tier = opened(tmp_path, BLOCKS)
    tier.reprice(dearer_further_back)
    tier.close()
