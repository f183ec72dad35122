"""Host memory by content: saved when the device loses it, once for all; the shortest request is given up first."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from kvpolicy.host_store import HostBlock, HostCopy, HostStore


def keys(blocks: Iterable[HostBlock]) -> list[object]:
    return [block.key for block in blocks]


def slots(copy: HostCopy) -> list[int | None]:
    return [block.slot for block in copy.blocks]


def test_only_what_has_no_key_is_saved_at_once() -> None:
    store = HostStore(8)
    copy = HostCopy(40)
    assert keys(store.add(copy, [("a", 7), ("b", 8), (None, 9)])) == [None]
    assert store.used == 1 and store.watched
    assert [block.slot is None for block in copy.blocks] == [True, True, False]


def test_a_block_is_saved_when_its_place_is_given_away_and_only_then() -> None:
    store = HostStore(8)
    copy = HostCopy(40)
    store.add(copy, [("a", 7), ("b", 8)])
    assert (store.key_at(8), store.key_at(3)) == ("b", None)
    assert keys(store.lost([3, 8])) == ["b"] and store.lost([8]) == [], "once"
    assert (store.used, store.key_at(8)) == (1, None)
    store.release(copy)
    assert store.used == 0 and not store.watched


def test_a_content_that_several_need_is_kept_once_until_the_last_has_it() -> None:
    store = HostStore(8)
    first, second = HostCopy(40), HostCopy(50)
    store.add(first, [("a", 7), (None, 8)])
    store.add(second, [("a", 17), (None, 18)])
    assert first.blocks[0] is second.blocks[0] and first.blocks[0].owner is first
    assert store.lost([17]) == [] and keys(store.lost([7])) == ["a"]
    store.release(first)
    assert second.blocks[0].slot is not None and second.blocks[0].owner is second and store.used == 2
    store.release(second)
    assert store.used == 0


def test_a_load_keeps_only_what_it_reads_and_saves_what_is_still_on_the_device() -> None:
    store = HostStore(8)
    copy = HostCopy(64)
    store.add(copy, [("a", 6), ("b", 7), ("c", 8), (None, 9)])
    store.lost([7])
    assert keys(store.begin_load(copy, range(1, 4))) == ["c"]
    assert [block.slot is not None for block in copy.blocks] == [True, True, True]
    assert not store.watched and store.used == 3, "the first one was in the prefix cache"
    store.release(copy)
    assert store.used == 0


def test_the_shortest_request_is_given_up_where_slots_are_short() -> None:
    store = HostStore(4)
    short, long = HostCopy(16), HostCopy(32)
    store.add(long, [(None, 1), (None, 2)])
    store.add(short, [(None, 3), (None, 4)])
    assert (store.obtainable(10, 2), store.obtainable(20, 2), store.obtainable(40, 3)) == (0, 2, 4)
    middle = HostCopy(20)
    store.add(middle, [(None, 5)])
    assert store.given_up == [short] and slots(middle) == [2] and slots(long) == [0, 1]
    store.release(short)
    assert store.used == 3, "it holds nothing any more"


def test_what_saves_the_least_per_slot_is_given_up_however_long_it_is() -> None:
    store = HostStore(4)
    dear, cheap = HostCopy(16, gain_per_block=3e-3), HostCopy(32, gain_per_block=1e-3)
    store.add(cheap, [(None, 1), (None, 2)])
    store.add(dear, [(None, 3), (None, 4)])
    gains = [None, 0.5e-3, 2e-3, 4e-3]
    assert [store.obtainable(20, 2, gain_per_block=lambda gain=gain: gain) for gain in gains] == [0, 0, 2, 4]
    assert store.obtainable(40, 2, gain_per_block=lambda: 1e-3) == 2, "the longer of two that save as much"
    newcomer = HostCopy(20, gain_per_block=2e-3)
    store.add(newcomer, [(None, 5)])
    assert store.given_up == [cheap] and slots(newcomer) == [0] and slots(dear) == [2, 3]


def test_copies_without_a_prediction_are_given_up_first() -> None:
    store = HostStore(3)
    loss, unknown = HostCopy(16, gain_per_block=-1e-3), HostCopy(64)
    store.add(loss, [(None, 1)])
    store.add(unknown, [(None, 2), (None, 3)])
    assert store.obtainable(8, 2, gain_per_block=lambda: -2e-3) == 2
    store.add(HostCopy(8, gain_per_block=-2e-3), [(None, 4)])
    assert store.given_up == [unknown]


def test_a_gain_is_predicted_only_where_slots_are_short() -> None:
    store, asked = HostStore(2), []
    store.add(HostCopy(16, gain_per_block=1e-3), [(None, 1)])

    def predicted() -> float:
        asked.append(1)
        return 2e-3

    assert store.obtainable(8, 1, gain_per_block=predicted) == 1 and not asked
    assert store.obtainable(8, 2, gain_per_block=predicted) == 2 and asked


def test_a_slot_that_copies_share_is_obtained_by_giving_up_both() -> None:
    store = HostStore(2)
    first, second = HostCopy(10), HostCopy(12)
    for copy, place in ((first, 1), (second, 2)):
        store.add(copy, [("a", 7), (None, place)])
    store.lost([7])
    assert second in store.given_up or first in store.given_up, "three contents in two slots"
    store, first, second = HostStore(1), HostCopy(10), HostCopy(12)
    store.add(first, [("a", 7)])
    store.add(second, [("a", 7)])
    store.lost([7])
    assert (store.obtainable(11, 1), store.obtainable(20, 1)) == (0, 1)
    long = HostCopy(20)
    assert len(store.add(long, [(None, 3)])) == 1 and store.given_up == [first, second]


def test_a_slot_with_a_content_that_the_copy_itself_needs_is_not_obtained() -> None:
    """Giving up the shorter copy leaves it in use: the new copy would be given up for its own block."""
    store = HostStore(1)
    short, long = HostCopy(10), HostCopy(20)
    store.add(short, [("a", 7)])
    store.lost([7])
    assert store.obtainable(20, 1) == 1
    assert store.obtainable(20, 1, ["a", None]) == 0
    store.add(long, [("a", 7), (None, 8)])
    assert store.given_up == [short, long], "hence"


def test_one_that_is_given_up_for_its_own_block_needs_none() -> None:
    store = HostStore(1)
    short, long = HostCopy(16), HostCopy(32)
    store.add(long, [(None, 1)])
    store.add(short, [("a", 2)])
    assert store.lost([2]) == [] and store.given_up == [short] and slots(long) == [0]


def test_a_load_is_never_given_up() -> None:
    store = HostStore(1)
    short, long = HostCopy(16), HostCopy(32)
    store.add(short, [(None, 1)])
    store.begin_load(short, range(0, 1))
    store.add(long, [("a", 2)])
    assert store.obtainable(32, 1) == 0
    assert store.lost([2]) == [] and store.given_up == [long] and slots(short) == [0]


def test_a_block_that_can_have_no_slot_cannot_be_loaded() -> None:
    store = HostStore(1)
    first, second = HostCopy(16), HostCopy(32)
    store.add(first, [(None, 1)])
    store.add(second, [("a", 2)])
    store.begin_load(first, range(0, 1))
    assert store.begin_load(second, range(0, 1)) == [] and slots(second) == [None] and store.given_up == []


def test_no_later_copy_finds_a_block_that_could_have_no_slot() -> None:
    store = HostStore(1)
    first, second, third = HostCopy(16), HostCopy(32), HostCopy(40)
    store.add(first, [(None, 1)])
    store.begin_load(first, range(0, 1))
    store.add(second, [("a", 2)])
    store.begin_load(second, range(0, 1))
    store.add(third, [("a", 5)])
    store.release(first)
    store.release(second)
    assert keys(store.lost([2, 5])) == ["a"], "what is at 2 is watched by nobody"
    assert third.blocks[0].place == 5 and store.used == 1
    store.release(third)
    assert store.used == 0


def test_one_that_is_given_up_for_its_own_blocks_keeps_no_slot() -> None:
    store = HostStore(2)
    short, long = HostCopy(20), HostCopy(30)
    store.add(short, [("a", 1), ("b", 2)])
    store.lost([1, 2])
    assert store.add(long, [("a", 1), ("b", 2), (None, 3), (None, 4)]) == []
    assert store.given_up == [short, long] and store.used == 0


def test_a_place_that_was_given_away_unnoticed_makes_its_copies_useless() -> None:
    store = HostStore(4)
    first, second = HostCopy(16), HostCopy(16)
    store.add(first, [("a", 7), (None, 8)])
    store.add(second, [("b", 7)])
    assert store.given_up == [first] and store.used == 0 and store.key_at(7) == "b"


def test_after_a_change_of_weights_no_content_is_found_by_its_key() -> None:
    store = HostStore(4)
    old, new = HostCopy(16), HostCopy(16)
    store.add(old, [("a", 7)])
    store.lost([7])
    store.begin_load(old, range(0, 1))
    store.forget_keys()
    store.add(new, [("a", 7)])
    assert new.blocks[0] is not old.blocks[0] and store.key_at(7) == "a"
    store.release(old)
    store.release(new)
    assert store.used == 0 and not store.watched


class Device:
    """A device of a few places and a host pool, each place with a content; copies are checked when they are loaded."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.store = HostStore(self.random.randint(1, 6))
        self.content: list[object] = [None] * 12
        self.host: dict[int, object] = {}
        self.kept: dict[HostCopy, list[object]] = {}
        self.private = 0
        self.loaded = self.given_up = 0

    def save(self, blocks: list[HostBlock]) -> None:
        for block in blocks:
            assert block.slot is not None
            if block.holders:
                self.host[block.slot] = self.content[block.place]
        for copy in self.store.given_up:
            del self.kept[copy]
            self.given_up += 1
        self.store.given_up = []

    def give_away(self) -> None:
        places = self.random.sample(range(12), 3)
        self.save(self.store.lost(places))
        for place in places:
            self.content[place] = None

    def preempt(self) -> None:
        """A request whose leading blocks may be the same as those of others."""
        places = self.random.sample(range(12), self.random.randint(1, 3))
        self.save(self.store.lost(places))
        keyed = self.random.randint(0, len(places))
        contents: list[tuple[object | None, int]] = []
        for number, place in enumerate(places):
            self.private += 1
            key = f"{self.random.randint(0, 1)}-{number}" if number < keyed else None
            self.content[place] = key if key is not None else self.private
            contents.append((key, place))
        tokens = self.random.randint(1, 30)
        unkeyed = len(places) - keyed
        if self.store.obtainable(tokens, unkeyed, [key for key, _ in contents]) < unkeyed:
            return
        copy = HostCopy(tokens)
        self.kept[copy] = [self.content[place] for place in places]
        self.save(self.store.add(copy, contents))
        assert copy in self.kept, "it has the slots that it was said to obtain"

    def load(self) -> None:
        copy = self.random.choice(list(self.kept))
        first = self.random.randint(0, len(copy.blocks) - 1)
        self.save(self.store.begin_load(copy, range(first, len(copy.blocks))))
        for block, content in zip(copy.blocks, self.kept[copy][first:], strict=True):
            assert block.slot is None or self.host[block.slot] == content
            assert block.slot is not None or len(copy.blocks) > self.store.total
        self.store.release(copy)
        del self.kept[copy]
        self.loaded += 1

    def forget(self) -> None:
        copy = self.random.choice(list(self.kept))
        self.store.release(copy)
        del self.kept[copy]


@pytest.mark.parametrize("seed", range(40))
def test_every_copy_that_is_not_given_up_comes_back_as_it_was(seed: int) -> None:
    device = Device(seed)
    for _ in range(300):
        actions = [device.give_away, device.preempt, device.preempt]
        device.random.choice([*actions, device.load, device.load, device.forget] if device.kept else actions)()
        used = {block.slot for copy in device.kept for block in copy.blocks if block.slot is not None}
        assert len(used) == device.store.used, "each slot belongs to one content"
    assert device.loaded > 10
    for copy in list(device.kept):
        device.store.release(copy)
    assert device.store.used == 0 and not device.store.watched


def test_such_runs_give_copies_up_too() -> None:
    assert any(_run(seed).given_up for seed in range(5))


def _run(seed: int) -> Device:
    device = Device(seed)
    for _ in range(100):
        device.preempt()
        device.give_away()
    return device
