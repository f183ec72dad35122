"""The feature vector: worked by hand, and never anything but finite numbers of 0 or above."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy import cost
from kvpolicy.events import copy_pieces, situation_of
from kvpolicy.features import FEATURES, GROWING, Features, features_of, lacking_blocks, short_blocks, with_hits
from kvpolicy.trace import read
from tests.synthetic import options_for, situation

ROOT = Path(__file__).resolve().parent.parent


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


def test_only_what_is_expected_to_be_lost_is_computed_or_moved() -> None:
    """100 tokens in 4 blocks of 32: 1.5 survive, of which one is shared; 2.25 are copied out. Blocks in 4 pieces."""
    victim = situation(
        100, 32, block_bytes=16384, segment_bytes=4096, shared_blocks=1, hit_blocks=1.5, save_blocks=2.25
    )
    recompute, swap = (features_of(victim, option) for option in options_for(victim))
    assert (recompute.computed_tokens, recompute.recomputed_tokens) == (100, 52)
    assert recompute.recomputed_pairs == sum(range(49, 101))
    assert (swap.save_bytes, swap.load_bytes) == (2.25 * 16384, 2.5 * 16384)
    assert (swap.save_segments, swap.load_segments) == (9, 10)


@pytest.mark.parametrize(("hit", "tokens", "loaded"), [(0.0, 36, 2), (2.0, 36, 2), (3.5, 0, 0.5), (9.0, 0, 0)])
def test_shared_blocks_survive_and_nothing_more_than_all(hit: float, tokens: float, loaded: float) -> None:
    """100 tokens in 4 blocks of 32, two shared; three and a half blocks hold more than the tokens."""
    victim = situation(100, 32, shared_blocks=2, hit_blocks=hit)
    recompute, swap = (features_of(victim, option) for option in options_for(victim))
    assert (recompute.recomputed_tokens, swap.load_bytes) == (tokens, loaded * victim.block_bytes)


@pytest.mark.parametrize("name", ["hit_blocks", "save_blocks"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_expected_blocks_that_are_no_number_are_refused_or_make_no_difference(name: str, value: float) -> None:
    """A number of surviving blocks below the shared ones, or above all, is bounded by them."""
    one = situation(**{name: value})
    if name == "hit_blocks" and value == value:
        assert features_of(one, options_for(one)[0]).recomputed_tokens == (0 if value > 0 else one.computed_tokens)
    else:
        with pytest.raises(ValueError, match="recomputed_tokens" if name == "hit_blocks" else "save_bytes"):
            features_of(one, options_for(one)[name == "save_blocks"])


SHIPPED_COSTS_S = {
    "cpu-llama-native": (
        ((0.04429839244681213, 0.03319327757467922, 0.055115206135536506),
         (0.003652482980590144, 0.0012330195474630225, 0.0119560142911591)),
        ((0.017001620740307043, 0.012739503293037599, 0.02115308885904434),
         (0.0017956719533688296, 0.000606189989412938, 0.005877941020068072)),
    ),
    "cpu-llama-simulated-link": (
        ((0.04193455989202687, 0.028067482203589376, 0.05386179161245206),
         (0.03066133824725612, 0.022440366777524787, 0.05768481023553059)),
        ((0.01731837124163388, 0.01159146722587002, 0.022244146720169156),
         (0.017011813714381225, 0.012450576560721509, 0.0320052320600878)),
    ),
}  # fmt: skip
"""Costs that the shipped models predicted for the first and the last decision of their traces before situations had
``hit_blocks`` and ``save_blocks``: engine_s, low_s and high_s of a recompute and of a swap."""


@pytest.mark.parametrize("name", SHIPPED_COSTS_S)
def test_shipped_traces_and_models_keep_their_numbers(name: str) -> None:
    """Those traces lack the expected blocks: features are what they were when all but shared blocks were lost."""
    trace = read(ROOT / "traces" / name)
    rows = sorted(trace.rows("decisions"), key=lambda row: (row["core"], row["decision_id"]))
    assert len(rows) > 400
    for one in map(situation_of, rows):
        tokens, cached = one.computed_tokens, min(one.shared_blocks * one.block_size, one.computed_tokens)
        pieces, loaded = copy_pieces(one.block_bytes, one.segment_bytes), one.held_blocks - one.shared_blocks
        queued = (one.segment_bytes, one.queued_save_bytes, one.queued_load_bytes)
        others = (one.running_requests, one.batch_tokens, one.free_blocks, one.waiting_requests)
        recompute, swap = (features_of(one, option) for option in options_for(one))
        pairs = (tokens * (tokens + 1) - cached * (cached + 1)) / 2
        assert recompute == (tokens, tokens - cached, pairs, 0, 0, 0, 0, 0, 0, 0, *others)
        copied = (one.held_blocks * one.block_bytes, loaded * one.block_bytes)
        assert swap == (tokens, 0, 0, *copied, one.held_blocks * pieces, loaded * pieces, *queued, *others)
    model = cost.load(name)
    for row, expected in zip((rows[0], rows[-1]), SHIPPED_COSTS_S[name], strict=True):
        costs = model.predict(situation_of(row), options_for(situation_of(row)))
        for predicted, seconds in zip(costs, expected, strict=True):
            assert (predicted.engine_s, predicted.low_s, predicted.high_s) == pytest.approx(seconds, rel=1e-13)


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


def test_what_was_found_takes_the_place_of_what_was_expected() -> None:
    """100 tokens in 4 blocks of 32, of which one is shared, and half of the others were expected to survive."""
    victim = situation(100, 32, shared_blocks=1, hit_blocks=2.5)
    for hit_tokens, lost_tokens, loaded_blocks in ((96, 4, 1), (40, 60, 2.75), (0, 100, 4)):
        found = with_hits(victim, hit_tokens)
        recompute, swap = (features_of(found, option) for option in options_for(found))
        assert (recompute.recomputed_tokens, swap.load_bytes / victim.block_bytes) == (lost_tokens, loaded_blocks)


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
