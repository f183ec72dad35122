"""The feature vector: worked by hand, and never anything but finite numbers of 0 or above."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.events import copy_pieces
from kvpolicy.features import FEATURES, GROWING, Features, features_of, lacking_blocks, short_blocks
from tests.synthetic import options_for, situation


def test_worked_by_hand() -> None:
    """100 tokens in 4 blocks of 32, one shared; 16 KiB blocks in 4 pieces."""
    victim = situation(
        100, 32, running_requests=2, block_bytes=16384, segment_bytes=4096, shared_blocks=1, free_blocks=7
    )
    victim = replace(victim, queued_save_bytes=5, queued_load_bytes=6, batch_tokens=640, waiting_requests=9)
    recompute, swap = (features_of(victim, option) for option in options_for(victim))
    # 68 tokens are lost: those at positions 32 to 99, each attending to itself and all before it.
    assert recompute == Features(100, 68, sum(range(33, 101)), 0, 0, 0, 0, 0, 0, 0, 2, 640, 7, 9)
    assert swap == Features(100, 0, 0, 4 * 16384, 3 * 16384, 16, 12, 4096, 5, 6, 2, 640, 7, 9)


def test_what_all_share_costs_nothing_to_recompute() -> None:
    victim = situation(100, 32, shared_blocks=4)
    assert features_of(victim, options_for(victim)[0]).recomputed_tokens == 0
    assert features_of(victim, options_for(victim)[1]).load_bytes == 0


@given(tokens=st.integers(1, 10**6), more=st.integers(1, 10**5), shared=st.integers(0, 50))
def test_growing_features_grow_with_length_and_the_others_stay(tokens: int, more: int, shared: int) -> None:
    short = situation(tokens, shared_blocks=min(shared, -(-tokens // 32)))
    long = situation(tokens + more, shared_blocks=short.shared_blocks)
    for which in (0, 1):
        before, after = (features_of(one, options_for(one)[which]) for one in (short, long))
        for name in FEATURES:
            was, now = getattr(before, name), getattr(after, name)
            assert now >= was if name in GROWING else now == was


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1])
def test_a_feature_that_is_no_number_is_refused_by_name(value: float) -> None:
    one = replace(situation(), batch_tokens=value)  # type: ignore[arg-type]  # what a broken engine might report
    with pytest.raises(ValueError, match="batch_tokens"):
        features_of(one, options_for(one)[0])


@pytest.mark.parametrize(
    ("computed", "ahead", "held", "lacking"),
    [(31, 1, 1, 0), (32, 1, 1, 1), (32, 1, 2, 0), (40, 100, 2, 3), (0, 1, 3, -2)],
)
def test_lacking_blocks_worked_by_hand(computed: int, ahead: int, held: int, lacking: int) -> None:
    """Blocks of 32."""
    assert lacking_blocks(computed, ahead, held, 32) == lacking


def test_the_first_that_lacks_more_than_is_free_is_short() -> None:
    assert short_blocks([0, 1, 3, 9], free_blocks=1) == 2
    assert short_blocks([0, 1, -2], free_blocks=1) == 0 and short_blocks([], free_blocks=0) == 0


def test_nobody_behind_the_one_that_is_short_is_looked_at() -> None:
    seen = iter([0, 3, 5])
    assert short_blocks(seen, free_blocks=0) == 3 and next(seen) == 5


@pytest.mark.parametrize(("block", "segment", "pieces"), [(100, 25, 4), (100, 30, 3), (100, 400, 1), (100, 0, 100)])
def test_pieces_of_a_block(block: int, segment: int, pieces: int) -> None:
    assert copy_pieces(block, segment) == pieces
