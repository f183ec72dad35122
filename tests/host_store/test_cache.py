"""Host memory as a cache of all requests' contents: copies come first, and what is found is what was lost."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from kvpolicy.caching import KINDS, ByCost, Foreseen, Hinted, Lru
from kvpolicy.caching.base import CachingPolicy
from kvpolicy.host_store import HostBlock, HostCopy, HostStore, by_owner
from kvpolicy.request_marks import ANYBODY, Client, HintLimits, Hints
from tests.caching.reluctant import Reluctant


def keys(blocks: Iterable[HostBlock]) -> list[object]:
    return [block.key for block in blocks]


def chain(text: str) -> list[str]:
    """Keys of the blocks of a prompt, one letter a block: each stands for all letters before it, too."""
    return [text[: length + 1] for length in range(len(text))]


def serve(store: HostStore, text: str, first_place: int, asked: int | None = None) -> list[int]:
    """A request with that prompt comes, is computed at places from the first one on, and ends."""
    blocks = chain(text)
    store.asked(blocks[:asked])
    places = [*range(first_place, first_place + len(blocks))]
    store.extended(blocks, len(blocks) if asked is None else asked)
    store.watch(blocks, dict(enumerate(places)))
    return places


def test_what_the_device_loses_is_saved_and_found() -> None:
    store = HostStore(8, Lru(8))
    places = serve(store, "abc", 10)
    assert store.lookup(chain("abc")) == 0 and store.used == 0, "it is still on the device"
    assert keys(store.lost(places[1:])) == ["ab", "abc"]
    assert (store.lookup(chain("abcd")), store.lookup(chain("abcd")[1:])) == (0, 2)
    assert (store.used, store.free, store.cached) == (0, 8, 2), "whoever needs a slot can have them all"
    assert keys(store.lost(places)) == ["a"] and store.lookup(chain("abcd")) == 3


def test_without_a_policy_nothing_is_cached() -> None:
    store = HostStore(8)
    places = serve(store, "abc", 10)
    assert not store.watched and store.lost(places) == []


def test_a_hit_holds_its_contents_while_it_is_loaded() -> None:
    store = HostStore(3, Lru(3))
    store.lost(serve(store, "abc", 10))
    hit = HostCopy(32, blocks=[])
    store.hold(hit, chain("ab"))
    assert (store.used, store.cached) == (2, 1)
    assert store.begin_load(hit, range(2)) == []
    assert store.obtainable(1000, 3) == 1
    assert keys(store.lost(serve(store, "xyz", 20))) == ["x"], "and abc goes for it"
    assert store.lookup(chain("abc")) == 2 and store.counts.refused == 2
    store.release(hit)
    assert (store.used, store.cached) == (0, 3)


def test_a_copy_takes_the_slots_of_cached_contents_before_another_copy_is_given_up() -> None:
    store = HostStore(3, Lru(3))
    short, long = HostCopy(10), HostCopy(20)
    store.add(short, [(None, 1)])
    store.lost(serve(store, "ab", 10))
    assert (store.obtainable(20, 2), store.obtainable(20, 3), store.obtainable(5, 3)) == (2, 3, 2)
    store.add(long, [(None, 2), (None, 3)])
    assert store.given_up == [] and store.used == 3 and store.lookup(chain("ab")) == 0
    assert store.counts.evicted == 2


def test_a_cached_content_that_the_copy_itself_needs_is_no_room_for_it() -> None:
    store = HostStore(2, Lru(2))
    store.lost(serve(store, "a", 10))
    assert store.obtainable(20, 2) == 2 and store.obtainable(20, 2, ["a"]) == 1
    copy = HostCopy(20)
    store.add(copy, [("a", 11), (None, 12)])
    assert store.given_up == [] and store.used == 2


def test_what_a_copy_needed_stays_when_it_is_done_with() -> None:
    store = HostStore(4, Lru(4))
    copy = HostCopy(40)
    places = serve(store, "ab", 10)
    store.add(copy, [("a", 10), ("ab", 11), (None, 12)])
    assert store.used == 1
    store.lost(places)
    assert store.used == 3 and store.counts.stored == 0, "saved for the copy"
    store.release(copy)
    assert (store.used, store.cached, store.lookup(chain("ab"))) == (0, 2, 2)


def test_a_content_that_is_still_on_the_device_is_saved_again_after_it_was_evicted() -> None:
    store = HostStore(1, Lru(1))
    store.lost(serve(store, "a", 10))
    serve(store, "a", 30)  # it came back to the device
    assert keys(store.lost(serve(store, "x", 20))) == ["x"] and store.lookup(["a"]) == 0
    assert keys(store.lost([30])) == ["a"] and store.lookup(["a"]) == 1


def test_what_is_needed_most_has_the_slots_whatever_its_position() -> None:
    """Of two prompts that the device loses together the second is asked for again; a slot is unused, two are not."""
    soon = chain("xyz")
    store = HostStore(3, Foreseen(3, [soon]))
    assert isinstance(store.cache, Foreseen)
    store.admission.in_order = store.cache.in_order
    store.lost(serve(store, "mn", 40))
    lost = [*serve(store, "abc", 10), *serve(store, "xyz", 20)]
    assert keys(store.lost(lost)) == soon and store.lookup(soon) == 3


def test_one_that_is_stored_is_not_saved_twice() -> None:
    store = HostStore(4, Lru(4))
    store.lost(serve(store, "ab", 10))
    assert store.lost(serve(store, "ab", 20)) == [] and store.counts.stored == 2


def test_after_a_change_of_weights_nothing_is_found() -> None:
    store = HostStore(4, Lru(4))
    places = serve(store, "abcd", 10)
    store.lost(places[:2])
    hit = HostCopy(16)
    store.hold(hit, ["a"])
    store.begin_load(hit, range(1))
    store.forget_keys()
    assert store.lookup(chain("ab")) == 0 and not store.watched and (store.used, store.cached) == (1, 0)
    assert store.cache is not None and len(store.cache) == 0
    store.release(hit)
    assert (store.used, store.cached) == (0, 0), "an old content does not come back when its load has ended"
    assert keys(store.lost(serve(store, "ab", 20))) == ["a", "ab"]


def test_a_save_that_failed_leaves_nothing_to_be_found() -> None:
    store = HostStore(4, Lru(4))
    lost = store.lost(serve(store, "ab", 10))
    hit = HostCopy(16)
    store.hold(hit, ["a"])
    for block in (*lost, *lost):
        store.spoiled(block)
    assert (store.counts.stored, store.counts.spoiled) == (2, 2), "the load fails, too"
    assert store.lookup(["a"]) == 0 and store.lookup(["ab"]) == 0 and (store.used, store.cached) == (1, 0)
    store.release(hit)
    assert (store.used, store.cached) == (0, 0) and store.cache is not None and len(store.cache) == 0


def test_what_is_dropped_is_not_found_nor_saved_but_for_what_copies_need() -> None:
    store = HostStore(8, Lru(8))
    store.lost(serve(store, "ab", 10))
    places, copy = serve(store, "xyz", 20), HostCopy(40)
    assert store.add(copy, [("xy", places[1])]) == []
    store.drop(["a", "x", "xy", "nothing"])
    assert store.lookup(["a"]) == 0 and store.lookup(["ab"]) == 1 and (store.used, store.cached) == (0, 1)
    assert keys(store.lost(places)) == ["xy", "xyz"] and store.contents == 3, "x is not watched"
    store.drop(["xy"])
    assert store.lookup(["xy"]) == 0 and copy.blocks[0].slot is not None and store.contents == 2
    store.release(copy)
    assert (store.used, store.cached, store.free) == (0, 2, 8)


def test_blocks_are_watched_from_any_place_of_their_prompt_on() -> None:
    store = HostStore(8, Lru(8))
    assert store.watch(chain("abc"), {1: 11, 2: 12}) == [1, 2] and store.watch(chain("abc"), {2: 12}) == []
    assert keys(store.lost([11, 12])) == ["ab", "abc"] and store.lookup(chain("abc")) == 0
    assert store.watch(chain("abc"), {0: 10, 1: 21}) == [0], "the other one has a slot"


def test_what_a_copy_needed_stays_where_a_save_would_not_pay() -> None:
    store = HostStore(8, Lru(8))
    store.admission.worth_saving = lambda blocks: False
    serve(store, "cd", 30)
    copy = HostCopy(20)
    store.add(copy, [("c", 30), ("cd", 31)])
    assert keys(store.lost([30, 31])) == ["c", "cd"]
    store.release(copy)
    assert store.lookup(["c", "cd"]) == 2


def test_what_is_not_worth_a_load_is_not_stored() -> None:
    """By the length of the longest prompt that a block was in: its beginning alone is of no use."""
    store = HostStore(8, Lru(8))
    store.admission.worth_saving = store.admission.worth_keeping = lambda blocks: blocks >= 3
    places = serve(store, "ab", 10) + serve(store, "xyz", 20)
    assert keys(store.lost(places)) == ["x", "xy", "xyz"] and store.counts.refused == 2
    copy = HostCopy(20)
    serve(store, "cd", 30)
    store.add(copy, [("c", 30), ("cd", 31)])
    store.lost([30, 31])
    store.release(copy)
    assert store.lookup(["c"]) == 0 and store.cached == 3, "nor what only a copy needed"


def test_saves_of_cached_contents_have_an_owner() -> None:
    store = HostStore(4, Lru(4))
    copy, cache = HostCopy(40, number=2), HostCopy(0)
    lost = store.lost(serve(store, "ab", 10)) + store.add(copy, [(None, 12)])
    assert [(owner, keys(blocks)) for owner, blocks in by_owner(lost, cache)] == [(cache, ["a", "ab"]), (copy, [None])]
    assert [owner for owner, _ in by_owner(lost)] == [copy]
    store.spoiled(lost[0])
    assert [keys(blocks) for _, blocks in by_owner(lost, cache)] == [["ab"], [None]], "less what is not wanted any more"


def test_where_there_is_no_room_for_all_the_leading_ones_are_stored() -> None:
    store = HostStore(2, Lru(2))
    places = serve(store, "abcd", 10)
    assert keys(store.lost(reversed(places))) == ["a", "ab"]


def test_what_the_policy_would_leave_out_comes_all_the_same_where_a_tier_below_takes_it() -> None:
    """It is next to go, before what the policy would rather keep; what the tier below does not take stays out."""
    store = HostStore(4, Reluctant(4))
    store.lost(serve(store, "abcd", 10))
    assert store.lost(serve(store, "xyz", 20)) == [] and store.counts.refused == 3
    store.admission.worth_handing_on = lambda key, blocks: blocks == 3 and key != "xy"
    assert keys(store.lost(serve(store, "xyz", 20))) == ["x", "xyz"]
    assert store.lookup(chain("abcd")) == 2 and store.stored(chain("xyz")) == 2
    assert keys(store.lost(serve(store, "uvw", 30))) == ["u", "uv", "uvw"]
    assert store.stored(chain("xyz")) == 0 and store.lookup(chain("abcd")) == 1, "a third slot was needed"
    assert store.lost(serve(store, "mn", 40)) == [] and store.stored(chain("uvw")) == 3


def with_hints(slots: int) -> HostStore:
    """Its policy would keep what is there; hints hold half of the slots at most."""
    return HostStore(slots, Hinted(Reluctant(slots), lambda: 0.0, 1, HintLimits(600.0, 0.5, 0.5)))


def pin(store: HostStore, text: str, first_place: int) -> list[int]:
    """A request whose prompt is pinned comes, is computed at places from the first one on, and ends."""
    store.hinted(chain(text), Hints(pin_tokens=len(text)), ANYBODY, over=True)
    return serve(store, text, first_place)


def test_what_a_hint_holds_back_gets_its_room_and_the_rest_what_the_policy_gives_up() -> None:
    store = with_hints(6)
    store.lost(serve(store, "uvwxyz", 10))
    places = pin(store, "abcd", 20)
    assert keys(store.lost(places)) == ["a", "ab", "abc"] and store.counts.refused == 1, "its share is three blocks"
    assert store.lost(places) == [] and store.lost(serve(store, "mn", 30)) == []
    assert store.lookup(chain("abc")) == store.lookup(chain("uvw")) == 3, "nobody else had to go"


def test_a_content_is_there_on_the_device_and_in_its_slot() -> None:
    store = HostStore(1, Lru(1))
    places = serve(store, "ab", 10)
    assert "a" in store and "ab" in store and "abc" not in store
    store.lost(places)
    assert "a" in store and "ab" not in store


def test_what_a_request_that_comes_still_has_to_compute_takes_no_room_of_hints() -> None:
    """Whether it is computed at all or not; what is there, in a slot or on the device, is held at once."""
    store = HostStore(8, Hinted(Lru(8), lambda: 0.0, 1, HintLimits(600.0, 0.5, 0.5)))
    assert isinstance(store.cache, Hinted)
    store.lost(pin(store, "abcd", 10))
    serve(store, "xy", 20)
    store.hinted(chain("uvwz"), Hints(keep_s=600.0), ANYBODY, "cancelled")
    assert store.cache.held(chain("abcd")) == {*chain("abcd")} and store.cache.counts.displaced == 0
    store.hinted(chain("xyz"), Hints(keep_s=600.0), ANYBODY, "next turn")
    assert store.cache.held(chain("xyz")) == {*chain("xy")} and store.cache.counts.displaced == 2


def test_what_a_preempted_request_asks_to_keep_is_held_while_it_is_away() -> None:
    """And what a tier below has of a request that comes, as it may be brought here while that waits."""
    store = HostStore(8, Hinted(Lru(8), lambda: 0.0, 1, HintLimits(600.0, 0.5, 0.5)))
    assert isinstance(store.cache, Hinted)
    said = Hints(keep_s=600.0, session="s")
    store.hinted(chain("abc"), said, ANYBODY, "one")
    assert store.cache.held_blocks == 0
    store.watch(chain("ab"), {0: 10, 1: 11})
    store.goes_on(chain("abc"), said, ANYBODY, "one")
    assert store.cache.held(chain("abc")) == {*chain("ab")}
    store.hinted(chain("abcd"), said, ANYBODY, "two")
    store.watch(chain("abc"), {0: 10, 1: 11, 2: 12})
    store.goes_on(chain("abc"), said, ANYBODY, "one")
    assert store.cache.held(chain("abc")) == {*chain("ab")}, "its session has gone on without it"
    store.below = {"x"}
    store.hinted(chain("xy"), Hints(pin_tokens=2), ANYBODY, "three")
    assert store.cache.held(chain("xy")) == {"x"}


def test_what_is_left_out_and_what_is_forgotten_takes_no_share_of_hints() -> None:
    store = HostStore(8, Hinted(Lru(8), lambda: 0.0, 1, HintLimits(600.0, 0.5, 0.5)))
    assert isinstance(store.cache, Hinted)
    places = pin(store, "abc", 10)
    store.admission.worth_saving = lambda blocks: False
    assert store.cache.held_blocks == 3 and store.lost(places[2:]) == []
    assert store.cache.held(chain("abc")) == {"a", "ab"}, "the device had the third one alone, and has lost it"
    store.hinted(chain("xy"), Hints(keep_s=60.0, session="s"), ANYBODY, over=True)
    store.forget_keys()
    assert store.cache.held_blocks == 0, "nor what was on the device alone when all was forgotten"


def test_what_a_hint_holds_back_goes_before_what_comes_with_it_and_nobody_holds() -> None:
    """Though the others are of earlier places in their prompts, and what is there need not all go for them."""
    store = with_hints(6)
    store.lost(serve(store, "uvwx", 10))
    places = [*serve(store, "mno", 30), *pin(store, "abc", 20)]
    assert keys(store.lost(places)) == ["a", "ab", "abc"] and store.stored(chain("uvwx")) == 3


def test_what_a_hint_holds_back_gets_its_room_where_copies_have_most_slots() -> None:
    """More blocks come at once than slots are left, so that all that is cached would not be enough for them."""
    store = with_hints(6)
    store.lost(serve(store, "uvwx", 10))
    assert len(store.add(HostCopy(40), [(None, place) for place in (70, 71, 72)])) == store.cached == 3
    places = [*serve(store, "mnopq", 30), *pin(store, "ab", 20)]
    assert keys(store.lost(places)) == ["a", "ab"] and store.stored(chain("uvwx")) == 1


def test_the_block_before_a_new_one_is_not_evicted_for_it() -> None:
    """Not even where it is worth less than the other one, which was used last."""
    store = HostStore(2, ByCost(2, lambda position: 100.0**position))
    places = serve(store, "ab", 10) + serve(store, "x", 20)
    store.lost([places[0], places[2]])
    assert store.lookup(["a"]) == store.lookup(["x"]) == 1
    assert keys(store.lost([places[1]])) == ["ab"] and store.lookup(chain("ab")) == 2


def test_a_copy_gets_a_slot_even_where_the_policy_has_none_to_give_up() -> None:
    """The copy's own block continues the only cached one, which is therefore no leaf."""
    store = HostStore(2, ByCost(2))
    store.lost(serve(store, "ab", 10))
    copy = HostCopy(20)
    assert keys(store.add(copy, [("ab", 11), (None, 12)])) == [None]
    assert store.lookup(["a"]) == 0 and store.lookup(["ab"]) == 1


def test_what_a_request_has_generated_is_of_the_same_turn() -> None:
    """A conversation is recognized by the end of what was generated, so that its blocks are of a class of their own."""
    policy = ByCost(16)
    store = HostStore(16, policy)
    store.lost(serve(store, "abcd", 10, asked=2))
    store.asked(chain("abcdef"))
    assert {policy._there["abcd"].turn, policy._gone["abcdef"].turn} == {1, 2}
    store.asked(chain("abxy"))
    assert policy._gone["abxy"].turn == 2, "the end of a prompt counts as well"


class Device:
    """A device of a few places under a host pool. Prompts share beginnings; each place has a content, and what is
    loaded is compared with it."""

    PLACES, SLOTS, LETTERS = 24, (1, 10), "ab"

    def __init__(self, seed: int, make: Callable[[int], CachingPolicy], stored: type[HostStore] = HostStore) -> None:
        self.random = random.Random(seed)
        slots = self.random.randint(*self.SLOTS)
        cache = make(slots)
        self.now_s = 0.0
        if isinstance(cache, Hinted):
            cache._clock = lambda: self.now_s
        self.store = stored(slots, cache)
        if seed % 4 == 0:
            self.store.admission.worth_saving = self.store.admission.worth_keeping = lambda blocks: blocks > 1
        self.content: list[Any] = [None] * self.PLACES
        self.weights = 0
        self.host: dict[int, Any] = {}
        self.kept: dict[HostCopy, list[Any]] = {}
        self.loading: list[tuple[HostCopy, list[Any]]] = []
        self.private = self.loaded = self.hits = self.refused = 0

    def save(self, blocks: list[HostBlock]) -> None:
        cache = HostCopy(0)
        for _, saved in by_owner(blocks, cache):
            for block in saved:
                assert block.slot is not None
                self.host[block.slot] = self.content[block.place]
        for copy in self.store.given_up:
            self.kept.pop(copy)
        self.store.given_up = []

    def take(self, count: int) -> list[int]:
        places = self.random.sample(range(self.PLACES), count)
        self.lose(places)
        for place in places:
            self.content[place] = None
        return places

    def lose(self, places: Sequence[int]) -> None:
        """Where a newcomer that a hint holds back gets no slot, no other one does, and nobody could make room."""
        store, cache = self.store, self.store.cache
        watched = [one for place in places if (one := store.watched.get(place)) is not None]
        coming = [one for one in watched if one.slot is None and not one.holders and one.node is not None]
        worth = {one.key for one in coming if one.node is not None and store.admission.worth_saving(one.node.reach)}
        held = cache.held(worth) if isinstance(cache, Hinted) else frozenset()
        before = {one.node.parent.key for one in coming if one.node is not None and one.node.parent}
        saved = store.lost(places)
        self.save(saved)
        if not isinstance(cache, Hinted) or held <= {*keys(saved)}:
            return
        self.refused += 1
        kept = cache.held(store._by_key)
        assert not [one for one in saved if one in coming and one.cached and one.key not in kept]
        there = [one for one in store._by_key.values() if one.cached and one not in saved]
        left = [one for one in there if one.key not in kept and one.key not in before]
        assert not left or isinstance(cache.inner, ByCost), "which gives up what no other one continues, only"

    def end(self) -> None:
        """A request is computed at fresh places, and gives them back."""
        blocks = chain("".join(self.random.choice(self.LETTERS) for _ in range(self.random.randint(1, 4))))
        asked = self.random.randint(0, len(blocks))
        self.store.asked(blocks[:asked])
        self.hint(blocks[:asked])
        places = self.take(len(blocks))
        for key, place in zip(blocks, places, strict=True):
            self.content[place] = (self.weights, key)
        self.hint(blocks, over=True)
        self.store.extended(blocks, asked)
        self.store.watch(blocks, dict(enumerate(places)))
        if self.random.random() < 0.5:
            self.preempt(blocks, places)

    def hint(self, blocks: Sequence[str], over: bool = False) -> None:
        """Some requests say what will be asked for again; where the policy does not heed it, nothing comes of it."""
        drawn = self.random
        said = Hints(
            drawn.choice((None, 3.0, 50.0)), drawn.random() < 0.2, drawn.choice((0, 0, 1, 3)),
            drawn.choice((None, "s", "t")), drawn.random() < 0.2,
        )  # fmt: skip
        self.store.hinted(blocks, said, drawn.choice((ANYBODY, Client("chat", b"salt"))), over=over)

    def preempt(self, blocks: Sequence[str], places: list[int]) -> None:
        """It is not at its end, after all: a copy of it is made, with a partial block."""
        (last,) = self.random.sample([place for place in range(self.PLACES) if place not in places], 1)
        self.save(self.store.lost([last]))
        self.private += 1
        self.content[last] = self.private
        tokens = self.random.randint(1, 30)
        if self.store.obtainable(tokens, 1, blocks) < 1:
            return
        copy = HostCopy(tokens)
        self.kept[copy] = [self.content[place] for place in (*places, last)]
        self.save(self.store.add(copy, [*zip(blocks, places, strict=True), (None, last)]))
        assert copy in self.kept, "it has the slots that it was said to obtain"

    def hit(self) -> None:
        """A prompt is found in host memory; its load takes a while."""
        blocks = chain("".join(self.random.choice(self.LETTERS) for _ in range(4)))
        self.store.asked(blocks)
        count = self.store.lookup(blocks)
        if count:
            copy = HostCopy(count)
            self.store.hold(copy, blocks[:count])
            assert self.store.begin_load(copy, range(count)) == []
            self.loading.append((copy, [(self.weights, key) for key in blocks[:count]]))
            self.hits += 1

    def load(self) -> None:
        if self.kept:
            copy = self.random.choice(list(self.kept))
            first = self.random.randint(0, len(copy.blocks) - 1)
            self.save(self.store.begin_load(copy, range(first, len(copy.blocks))))
            self.loading.append((copy, self.kept.pop(copy)[first:]))

    def loaded_now(self) -> None:
        if self.loading:
            copy, contents = self.loading.pop(self.random.randrange(len(self.loading)))
            for block, content in zip(copy.blocks, contents, strict=True):
                assert block.slot is None or self.host[block.slot] == content
            self.store.release(copy)
            self.loaded += 1

    def forget(self) -> None:
        if self.kept:
            copy = self.random.choice(list(self.kept))
            self.store.release(copy)
            del self.kept[copy]

    def fail(self) -> None:
        """The save of some content has failed."""
        cached = [block for block in self.store._by_key.values() if block.cached]
        if cached:
            block = self.random.choice(cached)
            assert block.slot is not None
            self.host[block.slot] = "garbage"
            self.store.spoiled(block)

    def reset(self) -> None:
        for copy in list(self.kept):
            self.store.release(copy)
        self.kept = {}
        self.store.forget_keys()
        self.weights += 1

    def end_all(self) -> None:
        for copy in [*self.kept, *(copy for copy, _ in self.loading)]:
            self.store.release(copy)
        self.kept, self.loading = {}, []

    def check(self) -> None:
        store = self.store
        self.now_s += 2.0
        held = {id(b): b for copy in (*self.kept, *(copy for copy, _ in self.loading)) for b in copy.blocks}
        slots = [block.slot for block in held.values() if block.slot is not None]
        cached = [block for block in store._by_key.values() if block.cached]
        assert len(slots) == store.used and len(cached) == store.cached
        everywhere = [*slots, *(block.slot for block in cached), *store._unused]
        assert sorted(everywhere) == [*range(store.total)], "each slot belongs to one content, or is unused"
        with_slot = {block.key for block in store._by_key.values() if block.slot is not None and block.node is not None}
        assert store.cache is not None
        assert len(store.cache) == len(with_slot) and all(key in store.cache for key in with_slot)
        for place, block in store.watched.items():
            assert block.place == place and self.content[place] == (self.weights, block.key)


def heeding(kind: str) -> Callable[[int], CachingPolicy]:
    made = {**KINDS, "reluctant": Reluctant}[kind]
    return lambda slots: Hinted(made(slots), lambda: 0.0, 1, HintLimits(100.0, 0.6, 0.4))


HEEDING = [f"{kind} with hints" for kind in ("lru", "cost", "reluctant")]


@pytest.mark.parametrize("kind", HEEDING)
def test_drawn_newcomers_that_hints_hold_back_are_left_out_now_and_then(kind: str) -> None:
    """So that the rule of :meth:`Device.lose` for them is met at all."""
    refused = 0
    for seed in range(4):
        device = Device(seed, heeding(kind.partition(" ")[0]))
        for _ in range(400):
            device.random.choice([device.end, device.end, device.hit, device.load, device.loaded_now])()
            device.check()
        refused += device.refused
    assert refused > 0


@pytest.mark.parametrize(
    ("kind", "seed"), [*itertools.product([*KINDS, *HEEDING], range(8)), *itertools.product(HEEDING, range(8, 24))]
)
def test_what_is_found_is_what_was_lost(kind: str, seed: int) -> None:
    device = Device(seed, KINDS[kind] if kind in KINDS else heeding(kind.partition(" ")[0]))
    for _ in range(400):
        actions = [device.end, device.end, device.hit, device.load, device.loaded_now, device.loaded_now]
        device.random.choice([*actions, *actions, device.forget, device.fail])()
        if device.random.random() < 0.01:
            device.reset()
        device.check()
    least = 10 if kind.startswith("s3fifo") else 15  # which keeps little of what comes once
    assert device.loaded > 10 and (device.hits > least or device.store.total < 5)
    device.end_all()
    assert device.store.used == 0
    device.store.forget_keys()
    assert len(device.store._unused) == device.store.total and len(device.store._tree) == 0


def test_a_copy_that_is_given_up_while_its_blocks_are_lost_leaves_each_in_one_slot() -> None:
    """The first block has its slot when the second one finds none but that."""
    store = HostStore(1, Lru(1))
    copy = HostCopy(40)
    places = serve(store, "ab", 10)
    store.add(copy, [("a", 10), ("ab", 11)])
    store.lost(places)
    assert store.given_up == [copy] and (store.used, store.cached, len(store._unused)) == (0, 1, 0)
