"""Blocks with one history: what is known of each is what it would be if every block were counted by itself."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from kvpolicy.caching.by_cost import ByCost
from kvpolicy.caching.histories import BROKEN, History, Record, taken


def chain_of(text: str) -> list[str]:
    return [text[:length] for length in range(1, len(text) + 1)]


def consistent(policy: ByCost) -> int:
    """How many stretches are whole. Each of these has its blocks, in a row and of one chain."""
    blocks: dict[History, list[tuple[int, str]]] = defaultdict(list)
    for key, record in (*policy._there.items(), *policy._gone.items()):
        assert isinstance(key, str)
        blocks[record.history].append((record.position, key))
    whole = {history: sorted(held) for history, held in blocks.items() if history.first != BROKEN}
    for history, held in whole.items():
        assert [position for position, _ in held] == [*range(history.first, history.first + history.blocks)]
        last = held[-1][1]
        assert all(last.startswith(key) for _, key in held)
    return len(whole)


def test_every_block_has_the_uses_and_the_last_visit_that_counting_it_alone_gives() -> None:
    """Prompts of a binary tree part and meet anywhere, some go on after they were answered, and blocks leave."""
    rng, policy = random.Random(5), ByCost(400)
    uses, visits, texts = defaultdict[str, int](int), dict[str, int](), [""]
    for prompt in range(1, 601):
        known = rng.choice(texts[-20:])
        text = known[: rng.randint(0, len(known))] + "".join(rng.choice("ab") for _ in range(rng.randint(1, 6)))
        texts.append(text)
        chain = chain_of(text)
        policy.asked(chain, 0)
        for key in chain:
            uses[key], visits[key] = uses[key] + 1, prompt
        if rng.random() < 0.4:
            longer, asked = chain_of(text + "ab"), rng.randint(1, len(text))
            policy.extended(longer, asked)
            for key in longer[asked:]:
                if key not in uses:
                    uses[key], visits[key] = 1, visits[chain[asked - 1]]
        policy.stored(chain, [index for index, key in enumerate(chain) if key not in policy])
        policy.evict(max(0, len(policy) - policy.capacity), frozenset(chain))
        for key in chain:
            record = policy._known(key)
            assert record is not None and (record.history.uses, record.history.visit.at) == (uses[key], visits[key])
    assert consistent(policy) > 10
    everything = {key: policy._known(key) for key in uses}
    assert all(record is None or record.history.uses == uses[key] for key, record in everything.items())


def test_stretches_stay_right_where_blocks_are_forgotten_in_between() -> None:
    rng, policy, forgotten, texts = random.Random(6), ByCost(6), 0, [""]
    for _ in range(800):
        known = rng.choice(texts[-30:])
        text = known[: rng.randint(0, len(known))] + "".join(rng.choice("abc") for _ in range(rng.randint(1, 5)))
        texts.append(text)
        policy.asked(chain_of(text), 0)
        policy.stored(chain_of(text)[:1], [0] if text[0] not in policy else [])
        consistent(policy)
        forgotten += any(record.history.first == BROKEN for record in policy._gone.values())
    assert forgotten > 100


@pytest.mark.parametrize(("begin", "end", "first"), [(0, 2, 12), (3, 5, 10), (1, 3, BROKEN)])
def test_what_is_left_of_a_stretch_is_whole_unless_blocks_between_were_taken(begin: int, end: int, first: int) -> None:
    history = History(10, 5)
    records = [Record(10 + index, history) for index in range(5)]
    part = taken(records[begin:end])
    assert (part.first, part.blocks, history.first, history.blocks) == (10 + begin, end - begin, first, 5 - end + begin)
    assert [record.history is part for record in records] == [begin <= index < end for index in range(5)]


class Counted(str):
    """A key that counts how often one is looked up."""

    looked_up = 0

    def __hash__(self) -> int:
        Counted.looked_up += 1
        return super().__hash__()

    __eq__ = str.__eq__


def test_a_prompt_that_goes_on_where_a_known_one_ends_is_not_looked_up_block_by_block() -> None:
    policy, prefix = ByCost(5000), [Counted(f"prefix {position}") for position in range(1000)]
    for number in range(4):
        Counted.looked_up = 0
        policy.asked([*prefix, Counted(f"text {number}")], 0)
    assert Counted.looked_up < 30
    record = policy._gone[prefix[500]]
    assert isinstance(record, Record) and record.history.uses == 4 and record.history.blocks == 1000
