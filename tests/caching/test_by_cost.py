"""The policy by cost: trees of blocks, and what it learns."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest

from kvpolicy.caching.base import Part
from kvpolicy.caching.by_cost import SAMPLE, ByCost
from kvpolicy.caching.by_use import Lru
from kvpolicy.caching.prompt_replay import replay
from tests.caching.test_by_use import serve


def test_a_block_that_others_continue_stays_until_they_are_gone() -> None:
    policy = ByCost(6)
    serve(policy, "abcd")
    serve(policy, "abef")
    assert len(policy) == 6
    gone = policy.evict(6, ())
    assert set(gone) == set("abcdef")
    assert gone.index("b") > max(gone.index(key) for key in "cdef") and gone[-1] == "a"
    assert gone.index("d") < gone.index("c") and gone.index("f") < gone.index("e")


def test_a_lost_block_counts_what_continues_it_when_it_is_back() -> None:
    policy = ByCost(4)
    serve(policy, "abc")
    policy.lost("b")
    assert policy.hits("abc") == 1
    serve(policy, "abc")
    assert policy.hits("abc") == 3 and policy.evict(1, ()) == ["c"]


def test_the_cheaper_of_two_alike_goes_first() -> None:
    policy = ByCost(4, price=lambda position: 1.0 + position)
    policy.asked("abxy", 0)  # one prompt in which all blocks have the same class and age
    policy.stored("abxy", [0, 1, 2, 3])
    policy.lost("b")  # now a and y continue nothing that is there
    assert policy.evict(1, ()) == ["a"]


def test_never_more_than_the_capacity_and_nobody_protected_goes() -> None:
    """Over a tree of blocks, some of which are lost at times."""
    rng = random.Random(7)
    policy, there = ByCost(8), set[str]()
    for _ in range(2000):
        path = "".join(rng.choice("ab") for _ in range(rng.randint(1, 5)))
        chain = [path[:length] for length in range(1, len(path) + 1)]
        policy.asked(chain, policy.hits(chain))
        missing = [position for position, key in enumerate(chain) if key not in policy]
        gone = policy.evict(max(0, len(policy) + len(missing) - policy.capacity), frozenset(chain))
        assert set(gone) <= there and not set(gone) & set(chain)
        policy.stored(chain, missing[: policy.capacity - len(policy)])
        there = {key for key in there | set(chain) if key in policy}
        assert len(there) == len(policy) <= policy.capacity
        if there and rng.random() < 0.1:
            lost = rng.choice(sorted(there))
            policy.lost(lost)
            there.remove(lost)
            assert lost not in policy


def conversations(seed: int) -> list[list[tuple[int, int]]]:
    """Prompts of conversations that grow by a block a turn, with a pause of about 40 prompts, beside one-time ones that
    are longer."""
    rng = random.Random(seed)
    turns, chains = dict.fromkeys(range(30), 0), []
    for number in range(4000):
        if rng.random() < 0.4:
            talk = rng.choice(sorted(turns))
            turns[talk] += 1
            chains.append([(talk, block) for block in range(turns[talk])])
            if turns[talk] == 12:
                del turns[talk]
                turns[30 + number] = 0
        else:
            chains.append([(-number - 1, block) for block in range(8)])
    return chains


@pytest.mark.parametrize("seed", [0, 1])
def test_it_learns_that_conversations_go_on_and_other_prompts_do_not(seed: int) -> None:
    chains = conversations(seed)
    by_cost, lru = (replay(chains, policy, lambda _: 1.0) for policy in (ByCost(150), Lru(150)))
    assert by_cost.hit_blocks > 1.3 * lru.hit_blocks


def test_it_gives_the_same_under_the_same_seed() -> None:
    chains = conversations(0)[:2500]
    one, same, other = (replay(chains, ByCost(100, seed=seed), lambda _: 1.0) for seed in (1, 1, 2))
    assert one == same and one != other


def test_a_conversation_that_went_on_stays_before_one_that_has_just_begun() -> None:
    """One prompt in ten is continued, and one that continues another always is; their last blocks are used alike."""
    policy = ByCost(1000)
    for number in range(1500):
        chain = [(number, 0)]
        serve(policy, chain)
        if number % 10 == 0:
            for _ in range(4):
                chain = [*chain, (number, len(chain))]
                serve(policy, chain)
    serve(policy, going_on := [("on", 0)])
    serve(policy, [*going_on, ("on", 1)])
    serve(policy, [("new", 0)])
    others = {(number, block) for number in range(1500) for block in range(5)}
    assert policy.evict(1, others) == [("new", 0)]


def test_newcomers_that_are_worth_less_are_left_out() -> None:
    """Of two kinds of prompts, one comes back after ten others and one never: what comes back is not given up for it,
    where room is asked for, and is where it has to be."""
    policy = ByCost(40)
    chains = [[f"talk-{number % 10}-{block}" for block in range(4)] for number in range(400)]
    for number, chain in enumerate(chains):
        policy.asked(chain, policy.hits(chain))
        policy.stored(chain, [position for position, key in enumerate(chain) if key not in policy])
        once = [f"once-{number}-{block}" for block in range(4)]
        policy.asked(once, 0)
    assert len(policy) == 40
    assert policy.make_room(4, (), once) == []
    assert len(policy.evict(4, ())) == 4


def test_a_part_of_a_chain_has_the_places_of_the_whole() -> None:
    """Blocks that were generated come after the one block before them alone."""
    policy = ByCost(10, price=lambda position: 1.0 + position)
    whole = [*range(6)]
    policy.asked(whole[:3], 0)
    policy.stored(whole[:3], [0, 1, 2])
    policy.stored(whole[2:], [1, 2, 3])
    assert [policy._there[key].position for key in whole] == whole


def test_a_part_of_a_chain_has_the_places_that_it_says_whatever_is_known_of_the_block_before_it() -> None:
    """As where the end of what was generated comes first, a block at a time."""
    policy = ByCost(10)
    policy.asked("abc", 0)
    for first in (4, 3, 2):
        policy.stored(Part("abcdef"[first : first + 2], first), [1])
    assert [policy._there[key].position for key in "def"] == [3, 4, 5]


def test_every_block_is_counted_with_the_last_prompt_that_asked_for_it() -> None:
    """Prompts that leave a shared prefix at different places: what their last visits count is what there is of them."""
    rng, policy = random.Random(3), ByCost(1000)
    prefix = [f"p{position}" for position in range(30)]
    for number in range(300):
        at = rng.choice((1, 3, 7, 30, 30, 30))
        chain = [*prefix[:at], *(f"{number} {position}" for position in range(rng.randint(1, 3)))]
        policy.asked(chain, 0)
        policy.extended([*chain, f"{number} answer"], len(chain))
    counted = Counter((id(one.visit), one.name) for one in policy._gone.values())
    visits = {id(one.visit): one.visit for one in policy._gone.values()}
    left = {(number, name): count for number, one in visits.items() for name, count in one.blocks.items() if count}
    assert left == counted
    assert policy._gone["p0"].uses == 300 and len({policy._gone[key].uses for key in prefix}) == 4


def test_blocks_of_a_prompt_with_other_histories_are_counted_apart() -> None:
    """Eight that a prompt asked for, two that were generated behind a part of it, and two of which nothing is known."""
    policy, chain = ByCost(100), "abcdefghijkl"
    policy.asked(chain[:8], 0)
    policy.extended(chain[:10], 3)
    policy.stored(Part(chain[10:], 10), [0, 1])
    visits = [record.visit for key in chain if (record := policy._known(key)) is not None]
    assert len({id(visit) for visit in visits}) == 3 and sum(sum(visit.blocks.values()) for visit in visits[9:]) == 12
    policy.asked(chain, 0)
    assert not any(count for visit in visits for count in visit.blocks.values())


def test_without_counts_it_gives_up_what_was_used_first_and_leaves_no_newcomer_out() -> None:
    """Of prompts whose ages are of different levels, and of each the last block first."""
    policy = ByCost(24)
    policy._returns._next_fit = 0  # what was counted is never evaluated
    chains = [[f"{number}-{block}" for block in range(4)] for number in range(6)]
    for number, chain in enumerate(chains):
        serve(policy, chain)
        for other in range(max(8, 128 >> number)):
            policy.asked([f"not stored {number} {other}"], 0)
    newcomers = [f"new-{block}" for block in range(4)]
    policy.asked(newcomers, 0)
    first_used = [key for chain in chains for key in reversed(chain)]
    assert policy.make_room(4, newcomers, newcomers) == first_used[:4]
    assert policy.evict(20, ()) == first_used[4:]


def described(policy: ByCost, keys: str) -> list[tuple[object, ...]]:
    """What is known of blocks, and by which of the visits that these have."""
    records = [record for key in keys if (record := policy._known(key)) is not None]
    visits = [*dict.fromkeys(id(record.visit) for record in records)]
    return [(one.uses, one.name, one.turn, one.position, visits.index(id(one.visit))) for one in records]


@pytest.mark.parametrize(
    "parts",
    [["cdef"], ["cd", "def"], ["def", "cd"], ["ef", "de", "cd"]],
    ids=["at once", "in parts", "the end first", "the end first, one by one"],
)
def test_what_was_generated_is_of_its_prompt_whether_that_is_said_or_not(parts: list[str]) -> None:
    """Files hear of prompts and of what is stored alone, in parts that begin with the block before."""
    said, unsaid = ByCost(20), ByCost(20)
    for policy in (said, unsaid):
        policy.asked("ab", 0)
        policy.asked("abc", 0)
        policy.stored("abc", [0, 1, 2])
        policy.asked("xy", 0)
    said.extended("abcdef", 3)
    said.stored("abcdef", [3, 4, 5])
    for part in parts:
        unsaid.stored(Part(part, "abcdef".index(part[0])), range(1, len(part)))
    assert described(said, "abcdefxy") == described(unsaid, "abcdefxy")
    levels = [sum(map(sum, policy._returns._reached.values())) for policy in (said, unsaid)]
    assert levels[0] == levels[1], "as many blocks have reached each age"
    for policy in (said, unsaid):
        policy.asked("abcdefg", 6)
    assert described(said, "abcdefgxy") == described(unsaid, "abcdefgxy")


def test_a_block_whose_prompt_is_known_only_when_it_is_stored_again_is_of_it_then() -> None:
    policy = ByCost(20)
    policy.stored(Part("bc", 1), [1])
    policy.lost("c")
    assert not policy._old_behind
    policy.asked("ab", 0)
    policy.stored("abc", [0, 1, 2])
    _, visit, last = [record.visit for key in "abc" if (record := policy._known(key)) is not None]
    assert visit is last and sum(visit.blocks.values()) == 3


def test_a_block_that_is_asked_for_all_the_time_is_not_forgotten() -> None:
    """It is not stored, as where the device has it: others that are gone are forgotten before it."""
    policy = ByCost(4)
    for number in range(200):
        policy.asked(["system", f"{number} a", f"{number} b"], 0)
    assert policy._gone["system"].uses == 200
    long = [f"long {block}" for block in range(100)]
    policy.asked(long, 0)
    policy.asked(long, 0)
    assert all(policy._gone[key].uses == 2 for key in long) and len(policy._gone) <= 2 * 4 * 4 + 100


@pytest.mark.parametrize("asked", [2, 3, 0])
def test_nothing_that_was_generated_is_no_visit_and_leaves_no_record(asked: int) -> None:
    """Of a prompt that was forgotten, and of one below a block, of which what is generated is of the last visit."""
    policy = ByCost(10)
    policy.asked("xy", 0)
    policy.extended("ab" if asked else "", asked)
    assert policy._returns._prompts == 1 and len(policy._gone) == 2
    policy.extended("pq", 0)
    assert policy._returns._prompts == 1 and policy._gone["p"].visit is policy._gone["x"].visit
    policy.stored("ab", [0, 1])
    policy.asked("ab", 2)
    policy.evict(4, ())


class Looked:
    """Blocks that may not be given up, and how often a policy has asked for one."""

    def __init__(self, keys: Iterable[object]) -> None:
        self._keys, self.count = frozenset(keys), 0

    def __contains__(self, key: object) -> bool:
        self.count += 1
        return key in self._keys


def test_where_nearly_all_is_held_the_same_goes_and_what_is_held_is_not_looked_through() -> None:
    """Whether the policy hears of what is held or not."""
    held = [f"held {number}" for number in range(1000)]
    gone, looks = [], []
    for told in (True, False):
        policy, protected = ByCost(1010), Looked(held)
        for key in [*held, *"abcdefghij"]:
            policy.asked([key], 0)
            policy.stored([key], [0])
        for key in held if told else ():
            policy.hold_began(key)
        gone.append([policy.evict(1, protected) for _ in range(8)])
        looks.append(protected.count)
        for key in held if told else ():
            policy.hold_ended(key)
        gone[-1].append(policy.evict(100, ()))
    assert gone[0] == gone[1] and len(gone[0][-1]) == 100
    assert looks[0] <= 8 * (SAMPLE + 10) < looks[1]


def test_of_leaves_that_are_worth_the_same_the_first_goes_where_none_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that goes leaves its place to the last one."""
    policy = ByCost(8)
    policy.asked("abcde", 0)
    for key in "abcde":
        policy.stored([key], [0])
    policy.hold_began("a")
    monkeypatch.setattr(policy, "_drawn", lambda: iter(()))
    assert policy.evict(4, "a") == ["b", "e", "d", "c"]
