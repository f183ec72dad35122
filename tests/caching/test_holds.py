"""What is held back for whom, and what makes room where a client, a class or all hold as much as they may."""

from __future__ import annotations

import pytest

from kvpolicy.caching import Hinted, Lru
from kvpolicy.caching.base import Key
from kvpolicy.caching.holds import STALE
from kvpolicy.request_marks import ALL_TOKENS, Client, HintLimits, Hints
from tests.caching.test_by_hints import ANNE, BEN, BLOCK, Clock, end, hinted, serve


def test_a_pin_of_the_whole_prompt_is_cut_to_the_share_of_its_class() -> None:
    policy, _ = hinted(12, share=0.5, each=0.25)
    serve(policy, "abcdef", Hints(pin_tokens=ALL_TOKENS), Client("one"))
    assert policy.held_blocks == 3 and policy.counts.refused == 3
    serve(policy, "uvwxyz", Hints(pin_tokens=ALL_TOKENS), Client("two"))
    assert policy.held_blocks == 6
    serve(policy, "mn", Hints(pin_tokens=ALL_TOKENS), Client("three"))
    assert policy.held_blocks == 6 and policy.hits("abc") == 3 and policy.hits("uvw") == 3


def test_of_a_class_the_holds_that_end_first_make_room() -> None:
    policy, clock = hinted(8, share=0.5, each=0.5)
    serve(policy, "abcd", Hints(keep_s=100.0))
    clock.now_s = 1.0
    serve(policy, "xy", Hints(keep_s=100.0))
    assert policy.held_blocks == 4 and policy.counts.displaced == 2
    assert set(policy.evict(8, ())) == {"c", "d"}, "the end of the older window"
    serve(policy, "z", Hints(keep_s=1.0))
    assert policy.hits("xy") == 2 and policy.counts.refused == 1, "a shorter hold does not displace a longer one"


def test_a_hold_that_was_extended_makes_room_by_its_new_end() -> None:
    policy, clock = hinted(8, share=0.5, each=0.5)
    serve(policy, "ab", Hints(keep_s=10.0))
    serve(policy, "xy", Hints(keep_s=20.0))
    clock.now_s = 1.0
    serve(policy, "ab", Hints(keep_s=100.0))
    serve(policy, "mn", Hints(keep_s=50.0))
    assert policy.held("abmnxy") == {*"abmn"} and policy.counts.displaced == 2
    clock.now_s = 51.0
    assert policy.held("abmnxy") == {*"ab"}


def test_a_client_holds_no_more_than_its_share_beside_others_of_its_class() -> None:
    policy, _ = hinted(12, share=0.75, each=0.5, client=0.25)
    serve(policy, "abcd", Hints(pin_tokens=ALL_TOKENS), ANNE)
    assert policy.held_blocks == 3 and policy.counts.refused == 1
    serve(policy, "uvwx", Hints(pin_tokens=ALL_TOKENS), BEN)
    assert policy.held_blocks == 6 and policy.counts.displaced == 0
    serve(policy, "mnop", Hints(pin_tokens=ALL_TOKENS), Client("batch", b"anne"))
    assert policy.held_blocks == 9, "with the same salt in another class it is another client"
    assert policy.hits("abc") == policy.hits("uvw") == policy.hits("mno") == 3


def test_of_a_client_its_own_holds_make_room_though_others_end_before_them() -> None:
    policy, clock = hinted(12, share=0.5, each=0.5, client=0.25)
    serve(policy, "xy", Hints(keep_s=50.0), BEN)
    serve(policy, "abc", Hints(keep_s=100.0), ANNE)
    clock.now_s = 1.0
    serve(policy, "mn", Hints(keep_s=100.0), ANNE)
    assert policy.held("abcmnxy") == {*"amnxy"} and policy.counts.displaced == 2


def test_of_a_class_without_room_the_holds_that_end_first_make_it_whoever_has_them() -> None:
    """Who invents salts is many clients, and still one class."""
    policy, clock = hinted(16, share=0.75, each=0.5, client=0.25)
    serve(policy, "wxyz", Hints(keep_s=100.0), Client("batch"))
    for salt, chain in enumerate(("abcd", "efgh", "ijkl")):
        clock.now_s += 1.0
        serve(policy, chain, Hints(keep_s=100.0), Client("chat", b"%d" % salt))
    assert policy.held("abcdefghijklwxyz") == {*"efghijklwxyz"} and policy.counts.displaced == 4


def test_memory_is_bounded_however_often_a_hint_is_repeated() -> None:
    policy, clock = hinted(12, client=0.4)
    serve(policy, "a", Hints(keep_s=600.0))  # it ends before all that are extended, which stay below it in the heap
    for _ in range(500):
        clock.now_s += 1.0
        serve(policy, "xyz", Hints(keep_s=600.0, session="s"))
    assert policy.held_blocks == 4
    for holders in (policy._holds.classes, policy._holds.clients):
        assert holders is not None and all(len(held.heap) <= STALE * 16 + 1 for held in holders._held.values())


class Told(Lru):
    """Notes what it hears of holds."""

    def __init__(self) -> None:
        super().__init__(8)
        self.told: list[tuple[str, object]] = []

    def hold_began(self, key: Key) -> None:
        self.told.append(("began", key))

    def hold_ended(self, key: Key) -> None:
        self.told.append(("ended", key))


@pytest.mark.parametrize("hint_first", [True, False])
@pytest.mark.parametrize("hint_last", [True, False])
def test_what_hints_hold_and_copies_need_is_told_once(hint_first: bool, hint_last: bool) -> None:
    inner, clock = Told(), Clock()
    policy = Hinted(inner, clock, BLOCK, HintLimits(600.0, 0.5, 0.5))
    for by_hint in (hint_first, not hint_first):
        if by_hint:
            serve(policy, "ab", Hints(keep_s=10.0))
        else:
            policy.hold_began("a")
    assert sorted(inner.told) == [("began", "a"), ("began", "b")]
    inner.told.clear()
    for by_hint in (not hint_last, hint_last):
        assert ("ended", "a") not in inner.told
        if by_hint:
            clock.now_s = 10.0
            assert policy.held_blocks == 0
        else:
            policy.hold_ended("a")
    assert sorted(inner.told) == [("ended", "a"), ("ended", "b")]


def test_what_is_to_go_first_goes_in_its_turn_though_copies_needed_it() -> None:
    policy, _ = hinted(8)
    serve(policy, "abcd", Hints(session="s"))
    serve(policy, "xy")
    end(policy, "abcd", Hints(session="s", ended=True))
    for key in "dc":
        policy.hold_began(key)
    assert policy.evict(1, "cd") == ["b"]
    policy.hold_ended("c")
    assert policy.evict(1, "d") == ["c"]
    policy.hold_ended("d")
    assert policy.evict(3, ()) == ["d", "a", "y"]


def test_without_a_share_nothing_is_held() -> None:
    policy, _ = hinted()
    policy = Hinted(Lru(4), Clock(), BLOCK, HintLimits.parse("none"))
    serve(policy, "ab", Hints(keep_s=10.0))
    assert policy.held_blocks == 0 and policy.evict(2, ()) == ["b", "a"]
