"""Sessions: who may arrive when, what prompts repeat, and that no request overtakes its predecessor."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.workload import (
    AZURE_CONVERSATION,
    Conversations,
    Even,
    Poisson,
    Request,
    Session,
    Starting,
    Think,
    Turn,
    Users,
    WorkloadError,
    served,
)
from kvpolicy.workload.sessions import history
from tests.examples import examples
from tests.workload.drawn_times import times

HAND = [
    Session("a", (Turn(5, 1, 0.0, 0.0), Turn(9, 2, 4.0, 6.0), Turn(12, 1, 1.0, 8.0))),
    Session("b", (Turn(7, 1, 0.0, 0.0), Turn(11, 1, 0.5, 2.5))),
    Session("c", (Turn(3, 3, 0.0, 0.0),)),
]


def test_a_closed_loop_by_hand() -> None:
    """Sessions begin at 1, 2, 3 s; a later request can come after the pauses before it at the earliest."""
    begun = Starting(Even(1.0)).start(HAND, _rng())
    assert times(list(served(begun))) == [
        ("a", 1.0, None),
        ("b", 2.0, None),
        ("b", 2.5, 0.5),
        ("c", 3.0, None),
        ("a", 5.0, 4.0),
        ("a", 6.0, 1.0),
    ]


def test_recorded_times_by_hand() -> None:
    begun = Starting(Even(1.0)).start(HAND, _rng())
    assert times(list(served(begun, closed=False))) == [
        ("a", 1.0, None),
        ("b", 2.0, None),
        ("c", 3.0, None),
        ("b", 4.5, None),
        ("a", 7.0, None),
        ("a", 9.0, None),
    ]


def test_two_people_by_hand() -> None:
    """The third session goes to whoever waits least between requests, after a pause of 2 s: user 1, at 0.5 + 2."""
    begun = Users(2, Think(2.0, 0.0)).start(HAND, _rng())
    assert times(list(served(begun))) == [
        ("user-0", 0.0, None),
        ("user-1", 0.0, None),
        ("user-1", 0.5, 0.5),
        ("user-1", 2.5, 2.0),
        ("user-0", 4.0, 4.0),
        ("user-0", 5.0, 1.0),
    ]


def test_sessions_without_pauses_are_dealt_to_all_users() -> None:
    """Of users who are free at the same time, the one who has had no session for longest gets the next."""
    single = [Session(str(number), (Turn(5, 1, 0.0),)) for number in range(7)]
    assert [request.session for request in served(Users(3).start(single, _rng()))] == [
        *("user-0", "user-1", "user-2", "user-0", "user-1", "user-2", "user-0")
    ]
    assert [request.think_s for request in served(Users(3).start(single, _rng()))] == [None] * 3 + [0.0] * 4


def test_impossible_sessions_are_refused() -> None:
    with pytest.raises(WorkloadError, match="users is 0"):
        Users(0)
    with pytest.raises(WorkloadError, match="session x: no recorded times"):
        list(served([(Session("x", (Turn(1, 1, 0.0),)), 0.0, None)], closed=False))


def test_only_sessions_that_overlap_are_held() -> None:
    """Sessions of 2 s begin every second, without an end: no more than three are read before one is over."""
    read = 0

    def endless() -> Iterator[Session]:
        nonlocal read
        while True:
            read += 1
            yield Session(str(read), (Turn(5, 1, 0.0), Turn(9, 1, 1.0), Turn(11, 1, 1.0)))

    for given_so_far, _ in enumerate(served(Starting(Even(1.0)).start(endless(), _rng())), 1):
        assert read <= given_so_far / 3 + 4
        if given_so_far == 3000:
            break
    assert read > 900


CONVERSATIONS = st.builds(
    Conversations,
    lengths=st.just(AZURE_CONVERSATION),
    count=st.integers(0, 8),
    seed=st.integers(0, 10**6),
    mean_turns=st.floats(1, 5),
    think=st.builds(Think, st.floats(0, 30), st.sampled_from((0.0, 0.5, 2.0))),
    beginning=st.one_of(
        st.builds(Starting, st.builds(Poisson, st.floats(0.01, 10))), st.builds(Users, st.integers(1, 5))
    ),
    block_tokens=st.integers(8, 64),
    system_tokens=st.integers(0, 100),
    context_tokens=st.one_of(st.none(), st.integers(102, 5000)),
)


@given(CONVERSATIONS)
@examples(40)
def test_conversations_grow_and_share_what_they_repeat(source: Conversations) -> None:
    requests = list(source)
    assert requests == list(source)
    assert [request.arrival_s for request in requests] == sorted(request.arrival_s for request in requests)
    by_prefix: dict[int, list[Request]] = defaultdict(list)
    for request in requests:
        assert len(request.prefix) == -(-request.total_tokens // source.block_tokens)
        assert source.context_tokens is None or request.total_tokens <= source.context_tokens
        by_prefix[request.prefix[-1] >> 32].append(request)
    assert len(by_prefix) == source.count
    for turns in by_prefix.values():
        for earlier, later in pairwise(turns):
            # All that was said before, the answer included, is the beginning of the next prompt.
            assert later.prompt_tokens > earlier.total_tokens
            assert later.prefix[: len(earlier.prefix)] == earlier.prefix
            assert later.session == earlier.session
            assert later.think_s is not None


def test_a_system_prompt_is_shared_by_whole_blocks() -> None:
    source = Conversations(AZURE_CONVERSATION, 2, 0, 1.0, Think(1.0), block_tokens=16, system_tokens=40)
    first, second = source
    assert first.prefix[:2] == second.prefix[:2] == (0, 1)
    assert not set(first.prefix[2:]) & set(second.prefix[2:])


def test_the_mean_number_of_turns_is_the_one_asked_for() -> None:
    source = Conversations(AZURE_CONVERSATION, 3000, 0, 4.0, Think(0.0))
    assert sum(1 for _ in source) / 3000 == pytest.approx(4.0, rel=0.06)


def test_history_by_hand() -> None:
    assert history(0, 33, 16) == (1 << 32, (1 << 32) + 1, (1 << 32) + 2)
    assert history(1, 32, 16, shared_blocks=1) == (0, (2 << 32) + 1)


@pytest.mark.parametrize(
    "bad", [{"mean_turns": 0.5}, {"block_tokens": 0}, {"system_tokens": 50, "context_tokens": 51}, {"count": -1}]
)
def test_impossible_conversations_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(WorkloadError, match=r"conversations: \w+ is "):
        Conversations(
            **{"lengths": AZURE_CONVERSATION, "count": 1, "seed": 0, "mean_turns": 1, "think": Think(1)} | bad
        )


def _rng() -> random.Random:
    return random.Random(0)
