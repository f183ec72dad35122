"""Blocks that a load leaves to the running requests, worked by hand."""

from __future__ import annotations

from kvpolicy.load_growth import LoadGrowth


def after_loads_of(*steps: int) -> LoadGrowth:
    """Having seen loads that lasted so many steps, one after the other."""
    growth = LoadGrowth(block_size=16)
    for lasted in steps:
        began = growth.steps
        growth.steps += lasted
        growth.ended(began)
    return growth


def test_before_a_load_has_ended_only_the_next_block_of_the_loaded_request_counts() -> None:
    assert after_loads_of().blocks(running=100) == 1


def test_every_running_request_takes_a_block_in_sixteen_steps() -> None:
    assert after_loads_of(16).blocks(running=100) == 100 + 1
    assert after_loads_of(8).blocks(running=100) == 50 + 1
    assert after_loads_of(1).blocks(running=1) == 1 + 1, "a part of a block is a block"


def test_where_no_request_runs_a_load_leaves_nothing() -> None:
    assert after_loads_of(1000).blocks(running=0) == 0


def test_about_the_last_eight_loads_count() -> None:
    assert after_loads_of(16, 32).blocks(running=8) == 9 + 1, "an eighth of the way from 16 to 32: 18 steps"
    assert after_loads_of(1600, *[16] * 100).blocks(running=8) == 9 + 1, "long ago, and hardly more than nothing"


def test_a_tool_that_keeps_memory_free_makes_it_unknown_again() -> None:
    growth = after_loads_of(1600)
    growth.forget()
    assert growth.blocks(running=100) == 1
