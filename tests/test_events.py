"""The central records: derived sizes, rows, and the constructor that skips the slow way."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

import pytest

from kvpolicy.events import Cost, Preemption, as_row, copy_pieces, copy_was_used, fast_constructor, situation_of
from tests.synthetic import situation


@pytest.mark.parametrize(
    ("block_bytes", "segment_bytes", "pieces"), [(4096, 1024, 4), (4096, 3000, 1), (4096, 8192, 1), (4096, 0, 4096)]
)
def test_pieces_of_a_block(block_bytes: int, segment_bytes: int, pieces: int) -> None:
    assert copy_pieces(block_bytes, segment_bytes) == pieces


def test_a_swap_copies_all_held_blocks() -> None:
    victim = replace(situation(), held_blocks=5, block_bytes=4096, segment_bytes=1024)
    assert (victim.copy_bytes, victim.copy_segments) == (5 * 4096, 5 * 4)


@pytest.mark.parametrize(
    ("executed", "loaded_tokens", "recomputed_tokens", "used"),
    [("recompute", 0, 500, True), ("swap", 32, 8, True), ("swap", 0, 1, True), ("swap", 0, 2, False)],
)
def test_a_swap_without_a_load_says_nothing_of_either_option(
    executed: str, loaded_tokens: int, recomputed_tokens: int, used: bool
) -> None:
    assert copy_was_used(executed, loaded_tokens, recomputed_tokens) is used  # type: ignore[arg-type]


def test_a_situation_comes_back_from_its_row() -> None:
    victim = situation(700, 32, 3)
    assert situation_of(as_row(victim) | {"chosen": 1}) == victim
    assert list(as_row(victim)) == [field.name for field in fields(Preemption)]


def test_the_fast_constructor_makes_the_same_frozen_record() -> None:
    make_cost = fast_constructor(Cost)
    cost = make_cost(1.0, 0.25, 0.5, 0.25, 3.0, low_s=0.5, high_s=2.0)
    assert type(cost) is Cost
    assert cost == Cost(1.0, 0.25, 0.5, 0.25, 3.0, 0.5, 2.0)
    with pytest.raises(FrozenInstanceError):
        cost.engine_s = 2.0
    with pytest.raises(TypeError, match="high_s"):
        make_cost(1.0, 0.25, 0.5, 0.25, 3.0, 0.5)
