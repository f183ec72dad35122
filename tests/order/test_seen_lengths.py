"""Lengths seen so far: levels, the mean still to come, and the index, against values computed by hand."""

from __future__ import annotations

import pytest

from kvpolicy.order.seen_lengths import BOUNDS, LEVELS, PRIOR, Lengths, level_of


def learned(*lengths: int) -> Lengths:
    found = Lengths()
    for tokens in lengths:
        found = found.seen(tokens)
    return found


def test_levels_rise_by_a_quarter() -> None:
    assert [level_of(tokens) for tokens in (0, 1, 1.25, 1.5, 1.6)] == [0, 0, 1, 1, 2]
    assert all(level_of(BOUNDS[level]) == level for level in range(LEVELS))
    assert level_of(1e12) == LEVELS - 1


def test_what_is_seen_counts_more_than_what_was_seen_before() -> None:
    before = Lengths()
    after = before.seen(100)
    assert before.weights == (PRIOR,) * LEVELS, "a state is frozen"
    assert after.weights[level_of(100)] == pytest.approx(1.0 + 0.999 * PRIOR)
    assert after.weights[0] == pytest.approx(0.999 * PRIOR)


def test_the_mean_still_to_come() -> None:
    state = learned(*[100] * 3000)
    assert state.remaining(0, 10**4) == pytest.approx(100, rel=0.25)
    assert state.remaining(0, 40) == pytest.approx(40, rel=0.05), "nothing lasts longer than its limit"
    assert state.remaining(100, 100) == 1.0
    assert state.remaining(60, 100) < state.remaining(20, 100)
    both = learned(*[10, 1000] * 300)
    assert both.remaining(20, 10**5) > both.remaining(0, 10**5), "who has got beyond the short ones is a long one"


@pytest.mark.parametrize("limit", [1, 3, 8, 41, 90, 100, 1000, 10**7])
def test_what_is_ahead_does_not_depend_on_what_was_asked_before(limit: int) -> None:
    """Tables are made for any limit, and cut by it."""
    asked = learned(*range(1, 300, 7))
    for other in (2, 50, 10**6):
        asked.remaining(7, other)
    fresh = learned(*range(1, 300, 7))
    assert asked.remaining(7, limit) == fresh.remaining(7, limit)
    assert asked.index(10, 7, limit) == fresh.index(10, 7, limit)
    assert asked == fresh and 1.0 <= fresh.remaining(7, limit) <= max(1, limit - 7)


def test_the_index_of_a_request_that_ends_with_its_next_token() -> None:
    """P = 1 over a horizon of one step, in which half a token more than the prompt is held."""
    assert Lengths().index(10, 0, 1) == pytest.approx(1 / 10.5)
    assert Lengths().index(100, 7, 8) == pytest.approx(1 / 107.5)


def test_the_index_is_the_best_ratio_over_horizons() -> None:
    """Half end after 1 token, half much later: the short horizon is the better one."""
    state = learned(*[1, 5000] * 400)
    near = 0.5 / (10 + 0.5)
    assert state.index(10, 0, 10**4) == pytest.approx(near, rel=0.3)
    assert state.index(10, 2, 10**4) < near / 1000, "later only the long horizon is left"
    assert state.index(1000, 0, 10**4) < state.index(10, 0, 10**4), "memory counts"
