"""Requests say what they are, and sources are merged without getting mixed up."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.request_marks import Classes
from kvpolicy.workload import (
    AZURE,
    AZURE_CONVERSATION,
    DEEPSEEK_R1,
    Care,
    ClosedLoop,
    Conversations,
    Granted,
    Joined,
    Labelled,
    Looped,
    Poisson,
    Request,
    Source,
    SyntheticRequests,
    Think,
    TimedFile,
    Users,
    Workload,
    WorkloadError,
    counts_of,
)
from tests.examples import examples
from tests.workload import published_files

HAND = Workload("hand", (Request(0.0, 10, 1), Request(2.0, 20, 2, class_name="own", priority=3, tpot_s=0.1)), 3, "h")


def test_what_is_set_is_set_for_all_and_the_rest_stays() -> None:
    source = Labelled(HAND, priority=-1, ttft_s=0.5)
    first, second = source
    assert first == Request(0.0, 10, 1, priority=-1, ttft_s=0.5)
    assert second == Request(2.0, 20, 2, class_name="own", priority=-1, ttft_s=0.5, tpot_s=0.1)
    assert source.name == "hand,priority=-1,ttft_s=0.5"
    assert [request.class_name for request in Labelled(HAND, "urgent")] == ["urgent", "urgent"]


def test_a_request_is_what_a_server_grants_it() -> None:
    """By the operator's list, whatever it claims; and nothing else about it changes."""
    source = Granted(Joined((HAND, Looped(Labelled(HAND, "chat", -3, 0.1, 0.1), 2))), Classes.parse("chat:ttft=1+own"))
    assert [(one.class_name, one.priority, one.ttft_s, one.tpot_s) for one in source] == [
        ("default", 0, None, None),
        ("chat", -3, 1.0, None),
        ("own", 3, None, None),
        ("chat", -3, 1.0, None),
    ]
    unmarked = {"class_name": "x", "priority": 0, "ttft_s": None, "tpot_s": None}
    assert [replace(one, **unmarked) for one in source] == [replace(one, **unmarked) for one in source.inner]
    assert (source.name, source.seed) == (source.inner.name, 3)


def test_a_closed_loop_is_one_loop() -> None:
    source = Looped(HAND, 4)
    assert {request.loop for request in source} == {ClosedLoop(4)}
    assert [replace(request, loop=None) for request in source] == list(HAND)
    with pytest.raises(WorkloadError, match="concurrency 3 is given to requests that have one of 4"):
        list(Looped(source, 3))


def test_sources_are_joined_by_arrival() -> None:
    other = Workload("other", (Request(0.0, 30, 3), Request(1.0, 40, 4), Request(2.0, 50, 5)), 4, "o")
    source = Joined((HAND, other))
    assert [request.prompt_tokens for request in source] == [10, 30, 40, 20, 50]
    assert (source.name, source.source, source.seed) == ("hand + other", "h; o", 3)
    assert list(source) == list(source) == list(pickle.loads(pickle.dumps(source)))


def test_nothing_is_shared_across_sources() -> None:
    """Two equal sources of sessions in closed loops: each of them has its own users, prefixes and places."""
    one = Looped(Conversations(AZURE_CONVERSATION, 12, 0, 3.0, Think(1.0), Users(3), system_tokens=64), 2)
    requests = list(Joined((one, one)))
    assert len(requests) == 2 * len(list(one))
    halves = [[request for request in requests if request.session.startswith(f"{part}/")] for part in (0, 1)]
    assert len(halves[0]) == len(halves[1]) == len(list(one))
    for of in (lambda request: {request.session}, lambda request: set(request.prefix), lambda request: {request.loop}):
        first, second = (set().union(*map(of, half)) for half in halves)
        assert first and not first & second
    for half in halves:
        assert Counter(request.session[2:] for request in half) == Counter(request.session for request in one)
        assert {request.prefix[:4] for request in half} == {half[0].prefix[:4]}, "they still share their own beginning"


SOURCES = st.lists(
    st.builds(
        SyntheticRequests,
        lengths=st.sampled_from((AZURE_CONVERSATION, DEEPSEEK_R1)),
        count=st.integers(0, 20),
        seed=st.integers(0, 9),
        arrivals=st.builds(Poisson, st.floats(0.1, 10)),
    ),
    min_size=2,
    max_size=4,
)


@given(SOURCES)
@examples(40)
def test_every_request_is_there_once_and_in_order(sources: list[Source]) -> None:
    requests = list(Joined(tuple(sources)))
    assert all(earlier.arrival_s <= later.arrival_s for earlier, later in pairwise(requests))
    assert Counter(requests) == Counter(request for source in sources for request in source)


def test_damage_is_counted_in_all_files(tmp_path: Path) -> None:
    good = published_files.put(tmp_path, "good.csv", published_files.AZURE_2023)
    bad = published_files.put(tmp_path, "bad.csv", published_files.AZURE_2023 + "never,1,1\n")
    source = Joined((TimedFile(good, AZURE), TimedFile(bad, AZURE, Care(skip_damaged=True))))
    assert len(list(source)) == 6
    counts = counts_of(Labelled(source, "file"))
    assert counts is not None
    assert (counts.rows, counts.requests, counts.damaged) == (7, 6, 1) and "bad.csv, line 5" in counts.first_damage
    assert counts_of(Joined((HAND, HAND))) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Labelled(HAND, "two words"), "hand: class is 'two words', should be 1 to 64 letters, digits"),
        (lambda: Labelled(HAND, ""), "hand: class is ''"),
        (lambda: Labelled(HAND, ttft_s=0.0), r"hand: ttft is 0\.0, should be above 0"),
        (lambda: Labelled(HAND, tpot_s=float("inf")), "hand: tpot is inf, should be above 0"),
        (lambda: Looped(HAND, 0), "hand: concurrency is 0, should be 1 or more"),
        (lambda: ClosedLoop(1.5), "concurrency is 1.5, should be a whole number, 1 or more"),  # type: ignore[arg-type]
        (lambda: Joined((HAND,)), "1 sources are joined, should be 2 or more"),
    ],
)
def test_impossible_ones_are_refused(make: type, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        make()
