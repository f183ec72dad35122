"""Scaled workloads keep order, keep who shares what with whom, and say what they cannot keep."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.workload import (
    AZURE_CONVERSATION,
    Conversations,
    Faster,
    First,
    Looped,
    Poisson,
    Request,
    Resized,
    Source,
    Starting,
    SyntheticRequests,
    Think,
    Window,
    Workload,
    WorkloadError,
    at_rate,
    counts_of,
)

HAND = Workload(
    "hand",
    (
        Request(0.0, 100, 10),
        Request(4.0, 1100, 20, (0, 1, 2), 512),
        Request(6.0, 1024, 30, (0, 1), 512),
        Request(10.0, 600, 1, (0,), 512),
    ),
    3,
    "by hand",
)

TALK = Workload(
    "talk",
    (
        Request(0.0, 5, 1, session="a"),
        Request(1.0, 5, 1, session="b"),
        Request(3.0, 9, 1, session="a", think_s=3.0),
        Request(4.0, 9, 1, session="a", think_s=1.0),
    ),
    0,
)


def shared_tokens(one: Request, other: Request) -> int:
    """Leading tokens of both prompts that are the same, by their ids."""
    blocks = next(
        (n for n, (a, b) in enumerate(zip(one.prefix, other.prefix, strict=False)) if a != b),
        min(len(one.prefix), len(other.prefix)),
    )
    return min(blocks * one.prefix_block_tokens, one.prompt_tokens, other.prompt_tokens) if blocks else 0


def test_faster_divides_all_times() -> None:
    assert [request.arrival_s for request in Faster(HAND, 2.0)] == [0.0, 2.0, 3.0, 5.0]
    assert [request.think_s for request in Faster(TALK, 2.0)] == [None, None, 1.5, 0.5]
    assert Faster(HAND, 2.0).name == "hand,speed=2"
    assert (Faster(HAND, 2.0).seed, Faster(HAND, 2.0).source) == (3, "by hand")


def test_at_rate_is_gaps_over_time() -> None:
    """Three gaps in 10 s are 0.3/s; at 1.5/s they take 2 s."""
    assert [request.arrival_s for request in at_rate(HAND, 1.5)] == pytest.approx([0.0, 0.8, 1.2, 2.0])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (HAND.first(1), "1 requests, none later than the first"),
        (Workload("none", (), 0), "0 requests"),
        (TALK, "a closed loop has no rate of its own"),
        (Looped(HAND, 2), "a closed loop has no rate of its own"),
    ],
)
def test_workloads_without_a_rate_are_refused(source: Source, reason: str) -> None:
    with pytest.raises(WorkloadError, match=reason):
        at_rate(source, 1.0)


def test_half_of_everything_by_hand() -> None:
    assert list(Resized(HAND, 0.5, 0.5)) == [
        Request(0.0, 50, 5),
        Request(4.0, 550, 10, (0, 1, 2), 256),
        Request(6.0, 512, 15, (0, 1), 256),
        # 512 named tokens become 256, the 88 others 44.
        Request(10.0, 300, 1, (0,), 256),
    ]


def test_outputs_alone_leave_prompts_and_sharing() -> None:
    for old, new in zip(HAND, Resized(HAND, output_factor=3.0), strict=True):
        assert (new.prompt_tokens, new.prefix, new.prefix_block_tokens) == (
            old.prompt_tokens,
            old.prefix,
            old.prefix_block_tokens,
        )
        assert new.output_tokens == 3 * old.output_tokens


REQUESTS = st.lists(
    st.builds(
        lambda blocks, rest, more, output, fork: Request(
            0.0,
            max(1, (blocks - 1) * 64 + rest + more),
            output,
            tuple(range(min(fork, blocks))) + tuple(1000 * fork + block for block in range(fork, blocks)),
            64,
        ),
        st.integers(1, 9),
        st.integers(1, 64),
        st.just(0),
        st.integers(1, 500),
        st.integers(0, 9),
    ),
    min_size=2,
    max_size=6,
)


@given(REQUESTS, st.integers(1, 256), st.integers(2, 400))
def test_sharing_scales_with_the_lengths(requests: list[Request], block: int, context: int) -> None:
    """Whole shared blocks stay whole shared blocks, partial ones stay partial, and nothing new is shared."""
    factor = block / 64
    source = Workload("made", tuple(requests), 0)
    scaled = list(Resized(source, factor, factor))
    for old, new in zip(requests, scaled, strict=True):
        assert new.prefix_block_tokens == block
        assert -(-new.prompt_tokens // block) == len(new.prefix) == len(old.prefix)
        assert abs(new.prompt_tokens - old.prompt_tokens * factor) < 1
        assert min(new.prompt_tokens, new.output_tokens) >= 1
    for number in range(len(requests)):
        for other in range(number):
            before = shared_tokens(requests[number], requests[other])
            after = shared_tokens(scaled[number], scaled[other])
            assert abs(after - before * factor) < 1
            assert (after == 0) == (before == 0)
    cut = list(Resized(source, factor, factor, context))
    for whole, request in zip(scaled, cut, strict=True):
        assert request.total_tokens == min(whole.total_tokens, context)
        assert request.output_tokens == min(whole.output_tokens, context - 1)
        assert request.prefix == whole.prefix[: -(-request.prompt_tokens // block)]


@given(st.integers(0, 1000), st.sampled_from((0.25, 0.5, 1.0, 1.5, 2.0)))
def test_scaled_conversations_still_repeat_their_history(seed: int, factor: float) -> None:
    talk = Conversations(AZURE_CONVERSATION, 1, seed, 4.0, Think(1.0), block_tokens=16)
    scaled = list(Resized(talk, factor, factor))
    for earlier, later in pairwise(scaled):
        assert later.prefix[: len(earlier.prefix)] == earlier.prefix
        assert later.prompt_tokens >= earlier.total_tokens
        assert len(earlier.prefix) == -(-earlier.total_tokens // earlier.prefix_block_tokens)


def test_a_factor_that_breaks_blocks_is_refused() -> None:
    assert next(iter(Resized(HAND.arriving((0, 0, 0, 0)), 0.3, 0.3))).prompt_tokens == 30
    small = Workload("small", (Request(0.0, 20, 1, (1, 2), 16),), 0)
    with pytest.raises(
        WorkloadError, match=r"blocks of 16 tokens, .* factor of 0\.3 makes no whole .*; 0\.25 and 0\.3125"
    ):
        list(Resized(small, 0.3))


def test_a_context_cuts_prompts_first() -> None:
    cut = list(Resized(HAND, context_tokens=25))
    assert [(request.prompt_tokens, request.output_tokens) for request in cut] == [(15, 10), (5, 20), (1, 24), (24, 1)]
    assert [request.prefix for request in cut] == [(), (0,), (0,), (0,)]


def test_a_window_counts_from_its_start() -> None:
    assert [request.arrival_s for request in Window(HAND, 4.0, 10.0)] == [0.0, 2.0]
    assert [request.arrival_s for request in Window(HAND, 4.0)] == [0.0, 2.0, 6.0]


def test_a_session_cut_by_a_window_begins_without_a_pause() -> None:
    results = [(request.session, request.arrival_s, request.think_s) for request in Window(TALK, 1.0)]
    assert results == [("b", 0.0, None), ("a", 2.0, None), ("a", 3.0, 1.0)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Faster(HAND, 0.0),
        lambda: at_rate(HAND, math.inf),
        lambda: Resized(HAND, 0.0),
        lambda: Resized(HAND, context_tokens=1),
        lambda: Window(HAND, 5.0, 5.0),
        lambda: Window(HAND, -1.0),
        lambda: First(HAND, -1),
    ],
)
def test_impossible_scales_are_refused(make: type) -> None:
    with pytest.raises(WorkloadError, match="hand: "):
        make()


@dataclass
class Endless:
    """Counts how many requests were asked of it."""

    asked: int = 0
    name: str = "endless"
    source: str = ""
    seed: int = 0

    def __iter__(self) -> Iterator[Request]:
        for number in count():
            self.asked += 1
            yield Request(float(number), 512, 8, (number,), 512)


@pytest.mark.parametrize(
    ("scale", "ahead"),
    [
        (lambda source: Faster(source, 2.0), 0),
        (lambda source: Resized(source, 0.5, 0.5, 300), 0),
        (lambda source: Window(source, 10.0), 10),
        (lambda source: First(source, 1000), 0),
    ],
)
def test_scaling_reads_no_further_than_asked(scale: type, ahead: int) -> None:
    endless = Endless()
    assert len(list(islice(scale(endless), 100))) == 100
    assert endless.asked == 100 + ahead


def test_a_window_and_a_first_end_by_themselves() -> None:
    endless = Endless()
    assert len(list(First(Window(endless, 0.0, 50.0), 20))) == 20
    assert endless.asked == 20
    assert len(list(Window(endless, 0.0, 50.0))) == 50


def test_scaled_sources_travel_to_other_processes() -> None:
    source = First(
        Resized(Window(Faster(SyntheticRequests(AZURE_CONVERSATION, 50, 1, Poisson(2.0)), 2.0), 1.0), 0.5, 0.5, 99), 9
    )
    assert list(pickle.loads(pickle.dumps(source))) == list(source)
    talk = Conversations(AZURE_CONVERSATION, 5, 0, 2.0, Think(1.0), Starting(Poisson(1.0)))
    assert list(pickle.loads(pickle.dumps(talk))) == list(talk)


def test_only_files_have_counts() -> None:
    assert counts_of(First(HAND, 1)) is None
