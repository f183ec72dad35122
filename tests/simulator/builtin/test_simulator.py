"""What a run does to the process around it."""

from __future__ import annotations

import gc

import pytest

from kvpolicy.simulator.builtin.simulator import OBJECTS_PER_COLLECTION, rare_collection


@pytest.mark.parametrize("before", [(700, 10, 10), (2 * OBJECTS_PER_COLLECTION, 10, 10), (0, 10, 10)])
def test_cycles_are_looked_for_less_often_during_a_run_and_as_before_after_it(before: tuple[int, int, int]) -> None:
    """No more often than before, and not at all where that was switched off; also after a run that failed."""
    was = gc.get_threshold()
    during = []

    def fail() -> None:
        with rare_collection():
            during.append(gc.get_threshold()[0])
            raise RuntimeError("stopped")

    try:
        gc.set_threshold(*before)
        with pytest.raises(RuntimeError, match="stopped"):
            fail()
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*was)
    assert during == [max(before[0], OBJECTS_PER_COLLECTION) if before[0] else 0]
