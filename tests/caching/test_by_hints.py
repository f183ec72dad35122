"""Hints over caching policies: who stays, who goes first, and what every inner policy has to bear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.caching import KINDS, Arc, ByCost, CachingPolicy, Hinted, Lfu, Lru, S3Fifo, eviction_queue
from kvpolicy.caching.by_hints import REMEMBERED
from kvpolicy.caching.holds import STALE
from kvpolicy.request_marks import ALL_TOKENS, ANYBODY, NO_HINTS, Client, HintLimits, Hints
from tests.caching.reluctant import Reluctant

BLOCK = 16


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def hinted(
    capacity: int = 8, share: float = 0.5, each: float = 0.5, client: float | None = None
) -> tuple[Hinted, Clock]:
    clock = Clock()
    return Hinted(Lru(capacity), clock, BLOCK, HintLimits(600.0, share, each, client)), clock


def serve(policy: Hinted, chain: Sequence[str], hints: Hints = NO_HINTS, client: Client = ANYBODY) -> list[str]:
    """Ask for a window and store what is worth it; returns what was evicted."""
    policy.asked(chain, policy.hits(chain))
    if hints:
        policy.hinted(chain, hints, client)
    missing = [position for position in range(policy.wanted(chain, hints)) if chain[position] not in policy]
    evicted = policy.evict(max(0, len(policy) + len(missing) - policy.capacity), frozenset(chain))
    policy.stored(chain, missing[: policy.capacity - len(policy)])
    if hints.ended:
        end(policy, chain, hints, client)
    return [str(key) for key in evicted]


def end(policy: Hinted, chain: Sequence[str], hints: Hints, client: Client = ANYBODY, request: object = None) -> None:
    """A request with this window has ended."""
    policy.hinted(chain, hints, client, request, over=True)


def test_a_kept_window_stays_until_its_time_is_over() -> None:
    policy, clock = hinted(6)
    serve(policy, "ab", Hints(keep_s=10.0))
    assert serve(policy, "wxyz") == [] and serve(policy, "stu") == ["z", "y", "x"]
    assert policy.hits("ab") == 2 and policy.held_blocks == 2
    clock.now_s = 10.0
    assert policy.held_blocks == 0
    assert serve(policy, "mn") == ["b", "a"]


def test_a_pin_is_of_whole_leading_blocks_and_outlasts_the_session() -> None:
    policy, _ = hinted()
    serve(policy, "abc", Hints(pin_tokens=2 * BLOCK + 5, session="s"))
    assert policy.held_blocks == 2
    serve(policy, "abcd", Hints(session="s", ended=True))
    assert policy.evict(8, ()) == ["c"] and policy.hits("ab") == 2


def test_what_was_pinned_is_needed_until_its_time_is_over() -> None:
    """Though nobody has asked for anything since."""
    policy, clock = hinted()
    policy.asked("ab", 0)
    policy.hinted("ab", Hints(pin_tokens=BLOCK))
    assert policy.is_needed("a") and not policy.is_needed("b")
    clock.now_s = policy.limits.keep_s
    assert not policy.is_needed("a")
    policy.stored("ab", [0, 1])
    assert policy.is_needed("a"), "the block that continues it is there"


ANNE, BEN = Client("chat", b"anne"), Client("chat", b"ben")


def test_nobody_ends_or_replaces_a_session_of_another_salt() -> None:
    policy, _ = hinted(12, share=0.9, each=0.9)
    serve(policy, "abcd", Hints(keep_s=100.0, session="s"), ANNE)
    serve(policy, "q", Hints(session="s", ended=True), BEN)
    serve(policy, "xy", Hints(keep_s=100.0, session="s"), BEN)
    serve(policy, "q", Hints(session="s", ended=True), Client("chat"))
    assert policy.held("abcdxy") == {*"abcdxy"}
    serve(policy, "abc", Hints(keep_s=100.0, session="s"), ANNE)
    assert policy.held("abcdxy") == {*"abcxy"} and policy.evict(1, ()) == ["d"], "her own window takes its place"
    serve(policy, "q", Hints(session="s", ended=True), ANNE)
    assert policy.held("abcdxy") == {*"xy"}


@pytest.mark.parametrize("client", [ANYBODY, Client("batch")])
@pytest.mark.parametrize(
    "said", [Hints(once=True), Hints(session="other", once=True), Hints(ended=True), Hints(session="other", ended=True)]
)
def test_what_is_kept_stays_though_a_request_with_its_beginning_is_the_last_one(said: Hints, client: Client) -> None:
    """While it is on the device alone, too, where nothing of it is in the tier."""
    policy, _ = hinted()
    policy.asked("sab", 0)
    policy.hinted("sab", Hints(keep_s=100.0))
    serve(policy, "sq", said, client)
    assert policy.held("sabq") == {*"sab"} and policy.counts.released == 1, "q alone"
    policy.stored("sab", [0, 1, 2])
    serve(policy, "xy")
    assert policy.evict(8, ()) == ["y", "x"] and policy.hits("sab") == 3


@pytest.mark.parametrize("order", ["xy", "yx"])
def test_a_session_that_ends_leaves_what_another_one_asked_to_keep_too(order: str) -> None:
    policy, clock = hinted(12, share=0.9, each=0.9)
    windows = {"x": "sab", "y": "scd"}
    for session in order:
        policy.hinted(windows[session], Hints(keep_s=100.0 if session == "y" else 50.0, session=session))
    end(policy, "scd", Hints(session="y", ended=True))
    assert policy.held("sabcd") == {*"sab"} and policy.counts.released == 2
    clock.now_s = 99.0
    assert policy.held("sabcd") == {"s"}, "until the last of the times"
    clock.now_s = 100.0
    assert policy.held_blocks == 0


@pytest.mark.parametrize("is_there", [True, False])
def test_of_two_sessions_with_one_window_none_ends_what_the_other_keeps(is_there: bool) -> None:
    policy, clock = hinted(8, share=0.9, each=0.9)
    for session in "xy":
        policy.hinted("abc", Hints(keep_s=100.0, session=session))
    if is_there:
        policy.stored("abc", [0, 1, 2])
    for session in "yx":
        end(policy, "abc", Hints(session=session, ended=True))
        assert policy.held("abc") == {*"abc"} and policy.evict(8, ()) == [] and policy.counts.released == 0
    clock.now_s = 100.0
    assert policy.held_blocks == 0


def test_a_session_that_goes_on_ends_all_that_it_alone_asked_for() -> None:
    policy, _ = hinted(12, share=0.9, each=0.9)
    for window in ("ab", "abcd", "abcdef"):
        policy.hinted(window, Hints(keep_s=100.0, session="x"), replace(ANNE))
        policy.hinted(window, Hints(keep_s=100.0, session="x"), replace(ANNE))
    end(policy, "abcdef", Hints(session="x", ended=True), replace(ANNE))
    assert policy.held_blocks == 0 and policy.counts.released == 6


def test_a_request_that_is_not_repeated_does_not_end_what_its_own_session_keeps() -> None:
    policy, _ = hinted(8, share=0.9, each=0.9)
    policy.hinted("ab", Hints(keep_s=100.0, session="x"))
    policy.hinted("abc", Hints(once=True, session="x"))
    assert policy.held("abc") == {*"ab"} and policy.counts.released == 1


def test_a_block_goes_not_first_while_one_that_continues_it_is_kept_for_another_session() -> None:
    """Though its own hold went with it when it was lost."""
    policy, _ = hinted(8, share=0.9, each=0.9)
    serve(policy, "ab", Hints(keep_s=100.0, session="x"))
    policy.lost("a")
    policy.hinted("ab", Hints(keep_s=100.0, session="y"))
    end(policy, "ab", Hints(session="y", ended=True))
    assert policy.held("ab") == {*"ab"} and policy.counts.released == 0


def test_what_is_not_repeated_is_not_stored_and_what_was_goes_first() -> None:
    policy, _ = hinted()
    once = Hints(once=True, pin_tokens=BLOCK)
    assert policy.wanted("abc", once) == 1 and policy.wanted("abc", Hints(ended=True)) == 0
    serve(policy, "abc", once)
    assert policy.hits("abc") == 1 and policy.held_blocks == 1
    serve(policy, "xy")
    policy.asked("pq", 0)
    policy.hinted("pq", Hints(once=True))
    policy.stored("pq", [0, 1])  # a tier that stores it all the same
    assert policy.evict(2, ()) == ["q", "p"], "before x and y, which are older"


def test_a_block_that_is_asked_for_again_goes_first_no_longer() -> None:
    policy, _ = hinted()
    policy.asked("pq", 0)
    policy.hinted("pq", Hints(once=True))
    policy.stored("pq", [0, 1])
    serve(policy, "xy")
    serve(policy, "pq")
    assert policy.evict(2, ()) == ["y", "x"]


def test_the_end_of_a_session_frees_what_no_other_window_shares() -> None:
    policy, _ = hinted(8, share=0.9, each=0.9)
    serve(policy, "abcd", Hints(keep_s=100.0, session="s"))
    serve(policy, "abx", Hints(keep_s=100.0, session="t"))
    serve(policy, "abcd", Hints(session="s", ended=True))
    assert policy.evict(8, ()) == ["d", "c"]
    assert policy.hits("abx") == 3


def test_a_session_may_be_ended_by_another_prompt() -> None:
    """A client need not send the whole window to say that it is over; nobody else's session is touched."""
    policy, _ = hinted(8, share=0.9, each=0.9)
    serve(policy, "abcd", Hints(keep_s=100.0, session="s"), Client("one"))
    serve(policy, "q", Hints(session="s", ended=True), Client("two"))
    assert policy.held_blocks == 4
    serve(policy, "q", Hints(session="s", ended=True), Client("one"))
    assert policy.held_blocks == 0 and policy.evict(2, ()) == ["d", "c"]


def test_what_a_session_has_on_the_device_alone_is_held_no_longer_than_the_session() -> None:
    """A window is there as a rule when its session ends: nothing of it has come to the tier."""
    policy, _ = hinted(8, share=0.9, each=0.9)
    policy.hinted("abcd", Hints(keep_s=100.0, session="s"))
    policy.hinted("abz", Hints(keep_s=100.0, session="s"))
    assert policy.held("abcdz") == {*"abz"}, "what the next turn does not continue"
    serve(policy, "q", Hints(session="s", ended=True))
    assert policy.held_blocks == 0
    policy.stored("abcd", [0, 1, 2, 3])
    serve(policy, "xy")
    assert policy.evict(4, ()) == ["d", "c", "b", "a"], "before x and y, which are older"


def test_the_last_turn_of_a_session_finds_its_window_when_its_turn_has_come() -> None:
    policy, _ = hinted(8, share=0.9, each=0.9)
    serve(policy, "abcd", Hints(keep_s=100.0, session="s"))
    said = Hints(session="s", ended=True)
    policy.asked("abcd", 4)
    policy.hinted("abcd", said)
    serve(policy, "wxyz")
    assert policy.evict(4, ()) == ["z", "y", "x", "w"] and policy.hits("abcd") == 4, "it waits"
    end(policy, "abcd", said)
    assert policy.held_blocks == 0 and policy.evict(4, ()) == ["d", "c", "b", "a"]


def test_a_request_that_ends_after_its_session_holds_nothing() -> None:
    """It was cancelled, say, when the application had said that the conversation is over."""
    policy, _ = hinted(8, share=0.9, each=0.9)
    kept, over = Hints(keep_s=100.0, session="s"), Hints(session="s", ended=True)
    policy.hinted("abc", kept, ANYBODY, 1)
    policy.hinted("q", over, ANYBODY, 2)
    end(policy, "q", over, request=2)
    end(policy, "abcd", kept, request=1)
    assert policy.held_blocks == 0
    policy.stored("abcd", [0, 1, 2, 3])
    serve(policy, "xy")
    assert policy.evict(4, ()) == ["d", "c", "b", "a"]


def test_a_request_that_ends_with_less_than_it_came_with_holds_no_more_than_that() -> None:
    """It was cancelled while it waited: what it came with beyond the turns before will not come."""
    policy, _ = hinted(8, share=0.9, each=0.9)
    kept = Hints(keep_s=100.0, session="s")
    for request, window in enumerate(("ab", "abcd")):
        policy.hinted(window, kept, ANYBODY, request)
        end(policy, "ab", kept, request=request)
        assert policy.held("abcd") == {*"ab"} and policy.counts.released == 2 * request
    policy.hinted("xy", replace(kept, session="t", pin_tokens=BLOCK), ANYBODY, 2)
    end(policy, "", replace(kept, session="t", pin_tokens=BLOCK), request=2)
    assert policy.held("xy") == {"x"}, "its pin, until its time is over"


def test_of_two_requests_of_a_session_the_window_of_the_later_one_stays_whichever_ends_last() -> None:
    policy, _ = hinted(8, share=0.9, each=0.9)
    kept = Hints(keep_s=100.0, session="s")
    policy.hinted("ab", kept, ANYBODY, 1)
    policy.hinted("abc", kept, ANYBODY, 2)
    end(policy, "abcd", kept, request=2)
    end(policy, "abx", replace(kept, pin_tokens=BLOCK), request=1)
    assert policy.held("abcdx") == {*"abcd"} and policy.is_needed("a")
    for window in ("q", "abcd"):
        end(policy, window, Hints(session="s", ended=True), request=3)
        assert policy.held("abcdx") == {*"abcd"}, "nor may one that came before end it"


def test_a_session_begins_with_a_prompt_of_less_than_a_block() -> None:
    policy, _ = hinted()
    kept = Hints(keep_s=100.0, session="s")
    policy.hinted((), kept, ANYBODY, 1)
    end(policy, "ab", kept, request=1)
    assert policy.held_blocks == 2
    for number in range(1000):
        policy.hinted((), Hints(session=f"s{number}"), ANYBODY, number)
    assert len(policy._sessions) <= REMEMBERED * policy.capacity


def test_a_window_that_was_cut_frees_its_old_end() -> None:
    policy, _ = hinted(8, share=0.9, each=0.9)
    serve(policy, "abcd", Hints(keep_s=100.0, session="s"))
    serve(policy, "abz", Hints(keep_s=100.0, session="s"))
    assert policy.evict(8, ()) == ["d", "c"] and policy.hits("abz") == 3


def test_whoever_is_protected_does_not_go_first_either() -> None:
    policy, _ = hinted()
    serve(policy, "pq", Hints(session="s"))
    serve(policy, "pq", Hints(session="s", ended=True))
    assert policy.evict(2, {"q"}) == ["p"] and policy.evict(2, ()) == ["q"]


def test_a_block_that_is_lost_is_held_no_longer() -> None:
    policy, _ = hinted()
    serve(policy, "ab", Hints(keep_s=10.0))
    policy.lost("b")
    assert policy.held_blocks == 1
    serve(policy, "abxy")
    assert policy.evict(8, ()) == ["y", "x", "b"]


def test_a_block_that_another_window_continues_stays_though_ones_own_next_one_is_not_there() -> None:
    policy, _ = hinted()
    serve(policy, "ax")
    policy.asked("ab", 1)
    end(policy, "ab", Hints(session="s", ended=True))
    serve(policy, "z")
    assert policy.evict(1, ()) == ["x"], "the least recently used, and not a"


def test_hints_that_are_forgotten_hold_no_block_and_take_no_share() -> None:
    policy, _ = hinted()
    serve(policy, "abcd", Hints(keep_s=600.0, session="s"))
    policy.hinted("xy", Hints(once=True))
    policy.forget_hints()
    assert policy.held_blocks == 0 and policy.hits("abcd") == 4
    serve(policy, "wxyz", Hints(keep_s=10.0))
    assert policy.held_blocks == 4
    end(policy, (), Hints(session="s", ended=True))
    assert policy.evict(8, ()) == ["d", "c", "b", "a"], "by use: the session's window is not known any more"


LIMITS = HintLimits(50.0, 0.6, 0.4, 0.25)
CLIENTS = Client("one"), Client("one", b"a"), Client("one", b"b"), Client("two", b"a"), Client("three")
PATHS = st.text("ab", min_size=1, max_size=6)
HINTS = st.builds(
    Hints,
    st.none() | st.floats(0.1, 100.0),
    st.booleans(),
    st.sampled_from((0, 1, BLOCK, 3 * BLOCK, ALL_TOKENS)),
    st.none() | st.sampled_from("st"),
    st.booleans(),
)
STEPS = st.lists(
    st.tuples(PATHS, HINTS | st.just(NO_HINTS), st.sampled_from(CLIENTS), st.floats(0, 30), st.booleans()), max_size=60
)


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_over_any_policy(
    kind: Callable[[int], CachingPolicy], steps: list[tuple[str, Hints, Client, float, bool]]
) -> None:
    """The capacity holds, whoever is protected or held back stays, holds are within their bounds and end with their
    time, and memory is bounded."""
    clock = Clock()
    policy = Hinted(kind(8), clock, BLOCK, LIMITS)
    there: set[str] = set()
    for path, hints, client, pause_s, is_lost in steps:
        clock.now_s += pause_s
        chain = [path[:length] for length in range(1, len(path) + 1)]
        policy.asked(chain, policy.hits(chain))
        policy.hinted(chain, hints, client)
        held = {key for key in there if key in policy._holds}
        assert all(policy._holds._of[key].until_s > clock.now_s for key in policy._holds._of)
        missing = [position for position in range(policy.wanted(chain, hints)) if chain[position] not in policy]
        gone = policy.evict(max(0, len(policy) + len(missing) - policy.capacity), frozenset(chain))
        assert set(gone) <= there and len(set(gone)) == len(gone)
        assert not set(gone) & set(chain) and not set(gone) & held
        policy.stored(chain, missing[: policy.capacity - len(policy)])
        end(policy, chain, hints, client)
        there = {key for key in there | set(chain) if key in policy}
        assert len(there) == len(policy) <= policy.capacity
        if is_lost and there:
            policy.lost(min(there))
            there.remove(min(there))
        check_bounds(policy, there)
    clock.now_s += LIMITS.keep_s
    assert policy.held_blocks == 0
    assert policy._holds.clients is not None and not policy._holds.classes._held and not policy._holds.clients._held
    assert set(policy.evict(8, ())) == there and not policy._first and not policy._parent and not policy._children


def check_bounds(policy: Hinted, there: set[str]) -> None:
    holds = policy._holds
    assert len(holds) <= 4
    ends: dict[object, list[float]] = {}
    for hold in holds._of.values():
        for holder in (hold.client.class_name, hold.client):
            ends.setdefault(holder, []).append(hold.until_s)
    for holders, each in ((holds.classes, 3), (holds.clients, 2)):
        assert holders is not None and sum(held.blocks for held in holders._held.values()) == len(holds)
        for holder, held in holders._held.items():
            assert 0 < held.blocks <= each and len(held.heap) <= STALE * 16 + 1
            first = holders.first(holder)
            assert held.blocks == len(ends[holder]) and first is not None and first[0] == min(ends[holder])
    assert getattr(policy.inner, "_held", set(holds._of)) == set(holds._of)
    first = set(policy._first.keys())
    assert first <= there and not {*first, *policy._unwanted} & set(holds._of)
    assert len(policy._unwanted) <= policy.capacity and set(policy._parent) == there
    assert (
        policy._session_blocks
        == sum(latest.size for latest in policy._sessions.values())
        <= REMEMBERED * policy.capacity
    )


@settings(max_examples=200, deadline=None)
@given(steps=STEPS)
def test_a_hold_ends_early_only_for_room_or_by_the_session_that_alone_asked_for_it(
    steps: list[tuple[str, Hints, Client, float, bool]],
) -> None:
    policy, clock = hinted(8, 0.6, 0.4)
    asked_by: dict[str, set[object]] = {}
    for path, hints, client, pause_s, is_lost in steps:
        clock.now_s += pause_s
        before = {str(key) for key in policy.held(asked_by)}
        asked_by = {key: asked_by[key] for key in before}
        displaced = policy.counts.displaced
        chain = [path[:length] for length in range(1, len(path) + 1)]
        session = None if hints.session is None else (client, hints.session)
        serve(policy, chain, hints, client)
        ended = before - policy.held(before)
        assert sum(asked_by[key] != {session} for key in ended) <= policy.counts.displaced - displaced
        pinned = min(hints.pin_tokens // BLOCK, len(chain))
        kept = 0 if hints.keep_s is None or hints.once or hints.ended else len(chain)
        for position, key in enumerate(chain[: max(pinned, kept)]):
            if key in policy.held([key]):
                asked_by.setdefault(key, set()).add("a pin" if position < pinned else session or "no session")
        if is_lost:
            policy.lost(chain[0])


QUEUED = Lru, Lfu, Arc, S3Fifo
"""Policies that set aside what is held."""


@pytest.mark.parametrize("kind", [*QUEUED, ByCost])
@settings(max_examples=100, deadline=None)
@given(steps=STEPS)
def test_what_was_held_goes_when_it_would_have_gone_without_being_set_aside(
    kind: type[CachingPolicy], steps: list[tuple[str, Hints, Client, float, bool]]
) -> None:
    clock = Clock()
    told_nothing = {name: getattr(CachingPolicy, name) for name in ("hold_began", "hold_ended")}
    deaf: Callable[[int], CachingPolicy] = type("Deaf", (kind,), told_nothing)
    policies = [Hinted(make(8), clock, BLOCK, LIMITS) for make in (kind, deaf)]
    for path, hints, client, pause_s, is_lost in steps:
        clock.now_s += pause_s
        chain = [path[:length] for length in range(1, len(path) + 1)]
        evicted = [serve(policy, chain, hints, client) for policy in policies]
        assert evicted[0] == evicted[1]
        if is_lost:
            for policy in policies:
                policy.lost(chain[0])
    clock.now_s += LIMITS.keep_s
    assert policies[0].evict(8, ()) == policies[1].evict(8, ())


@pytest.mark.parametrize("kind", QUEUED)
def test_what_is_held_is_not_passed_over_at_every_eviction(
    kind: Callable[[int], CachingPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the blocks are held, and are those that would go next."""
    looked_at: list[Any] = []

    def counted(heap: list[Any]) -> Any:
        looked_at.append(heap[0])
        return heappop(heap)

    monkeypatch.setattr(eviction_queue, "heappop", counted)
    for held in (32, 512):
        policy = Hinted(kind(2 * held), Clock(), BLOCK, HintLimits(600.0, 0.5, 0.5))
        serve(policy, [f"held {number}" for number in range(held)], Hints(keep_s=600.0))
        serve(policy, [f"other {number}" for number in range(held)])
        assert policy.held_blocks == held and len(policy.evict(1, ())) == 1
        looked_at.clear()
        for number in range(20):
            assert len(policy.evict(1, ())) == 1
            policy.stored([f"new {number}"], [0])
        assert 0 < len(looked_at) <= 40


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_without_a_share_of_clients_salts_change_no_hold(
    steps: list[tuple[str, Hints, Client, float, bool]],
) -> None:
    (salted, salted_clock), (plain, plain_clock) = hinted(8, 0.6, 0.4), hinted(8, 0.6, 0.4)
    for path, hints, client, pause_s, _ in steps:
        salted_clock.now_s = plain_clock.now_s = plain_clock.now_s + pause_s
        chain, hints = [path[:length] for length in range(1, len(path) + 1)], replace(hints, session=None)
        assert serve(salted, chain, hints, client) == serve(plain, chain, hints, Client(client.class_name))
        assert salted.counts == plain.counts and salted.held_blocks == plain.held_blocks


def test_newcomers_have_the_room_that_the_other_policy_gives_up_and_what_goes_first() -> None:
    policy = Hinted(Reluctant(6), Clock(), BLOCK, HintLimits(600.0, 0.5, 0.5))
    serve(policy, "uvwxyz")
    policy.hinted("abc", Hints(pin_tokens=2 * BLOCK), ANYBODY)
    assert policy.held("abc") == {"a", "b"}
    assert policy.make_room(1, frozenset("abc"), ["c"]) == []
    end(policy, "uvwxyz", Hints(ended=True), ANYBODY)
    assert policy.make_room(1, frozenset("abc"), ["c"]) == ["z"]
