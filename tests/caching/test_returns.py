"""Rates of return, worked by hand, and what is counted."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvpolicy.caching import returns as module
from kvpolicy.caching.returns import FIT_EVERY, LEVELS, STARTS, Returns, Visit, best_rate


def test_the_rate_is_that_of_the_best_age_to_stop_at() -> None:
    """All return in level 3 and none before: waiting for it from level 2 on is better than from level 0 on."""
    shares = [0.0] * LEVELS
    shares[3] = 1.0
    rates = [best_rate(shares, level) for level in range(LEVELS)]
    length = STARTS[4] - STARTS[3]
    assert rates[3] == pytest.approx(1 / (length / 2))
    assert rates[0] == pytest.approx(1 / (STARTS[3] + length / 2)) and rates[2] > rates[0]
    assert rates[4] == 0.0


def test_returns_are_counted_at_the_age_at_which_they_happen() -> None:
    """Blocks of class a return after ten prompts, in level 1; those of class b never."""
    returns = Returns()
    visits: list[Visit] = []
    for prompt in range(40 * FIT_EVERY):
        if prompt >= 10:
            returns.returned(visits[prompt - 10], "a")
        visits.append(returns.visit({"a": 1, "b": 1}))
    fresh = visits[-1]
    assert 1 / 14 < returns.rate(fresh, "a") < 1 / 8
    assert returns.rate(fresh, "b") < 0.01 * returns.rate(fresh, "a")
    old = visits[-20]
    assert old.level > 1 and returns.rate(old, "b") < returns.rate(fresh, "a")


def test_what_has_returned_before_is_no_part_of_what_reaches_an_age() -> None:
    """Half the shares in each of two levels, worked by hand: keeping a block through both is worth less per prompt."""
    shares = [0.5, 0.5] + [0.0] * (LEVELS - 2)
    first, second = STARTS[1], STARTS[2] - STARTS[1]
    through_one = 0.5 / (0.75 * first)
    through_both = (0.5 + 0.25) / (0.75 * first + 0.5 * 0.75 * second)
    assert best_rate(shares, 0) == pytest.approx(max(through_one, through_both))
    assert best_rate(shares, 1) == pytest.approx(0.5 / (0.75 * second))


def test_blocks_that_are_back_do_not_grow_old() -> None:
    """Nine in ten return after ten prompts, the others after a hundred: those that are left return for certain."""
    returns = Returns()
    visits: list[Visit] = []
    for prompt in range(40 * FIT_EVERY):
        if prompt >= 10:
            for _ in range(9):
                returns.returned(visits[prompt - 10], "a")
        if prompt >= 100:
            returns.returned(visits[prompt - 100], "a")
        visits.append(returns.visit({"a": 10}))
    left = visits[-80]
    assert left.blocks == {"a": 1}
    assert returns.rate(left, "a") > 1 / 80


def test_a_visit_is_of_the_last_level_that_its_age_reaches() -> None:
    returns, ages = Returns(), range(int(STARTS[-1]) + 2)
    visits = [returns.visit({"a": 1}) for _ in ages]
    for age in ages:
        assert visits[-1 - age].level == max(level for level in range(LEVELS) if STARTS[level] <= age)
    assert len(returns._aging) <= STARTS[-1], "those of the last level are not held for ever"


def test_rates_are_those_of_the_last_evaluation_whenever_they_are_asked_for() -> None:
    """Of two that count the same, one is asked before returns come that the other has seen when it is asked."""
    early, late = Returns(), Returns()
    for returns in (early, late):
        visits = [returns.visit({"a": 4}) for _ in range(2 * FIT_EVERY)]
    levels = range(LEVELS)
    rates = [early._rates["a"][level] for level in levels]
    for visit in visits:
        late.returned(visit, "a", 4)
        late.join(visit, "a")
    assert [late._rates["a"][level] for level in levels] == rates
    for _ in range(FIT_EVERY):
        late.visit({"a": 4})
    assert [late._rates["a"][level] for level in levels] != rates


def test_before_anything_is_counted_the_rate_falls_with_age() -> None:
    """Whatever the lengths of levels are: what was used last stays."""
    nothing = Returns()
    visit = Visit(0, {})
    rates = []
    for visit.level in range(LEVELS):
        rates.append(nothing.rate(visit, "a"))
    assert all(younger > older > 0.0 for younger, older in pairwise(rates))


def test_the_first_counts_count_at_once() -> None:
    """After twelve prompts, ten of which had what the second before them had."""
    returns, visits = Returns(), list[Visit]()
    for prompt in range(12):
        if prompt >= 2:
            returns.returned(visits[prompt - 2], "a", 4)
        visits.append(returns.visit({"a": 4, "b": 4}))
    assert returns.rate(visits[-1], "a") > 2 * returns.rate(visits[-1], "b")


def test_later_prompts_change_rates_at_every_64th(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = list[int]()
    monkeypatch.setattr(Returns, "_fit", lambda self: fits.append(self._prompts))
    returns = Returns()
    for _ in range(1000):
        returns.visit({})
    gaps = [later - earlier for earlier, later in pairwise(fits)]
    assert fits[:8] == [1, 2, 3, 4, 5, 6, 7, 8] and gaps == sorted(gaps) and {*gaps[-8:]} == {FIT_EVERY}


def test_with_many_counts_it_does_not_matter_what_was_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of all return after ten prompts. The other prior has the same share at every age, so that its rate rises at
    first."""
    rates = []
    for prior in (module.PRIOR, (module.PRIOR_SHARE,) * LEVELS):
        monkeypatch.setattr(module, "PRIOR", prior)
        returns, visits = Returns(), list[Visit]()
        for prompt in range(40 * FIT_EVERY):
            if prompt >= 10:
                returns.returned(visits[prompt - 10], "a", 20)
            visits.append(returns.visit({"a": 40}))
        rates.append([returns.rate(visits[-1 - age], "a") for age in (0, 5, 9)])
    assert rates[0] == pytest.approx(rates[1], rel=0.001)


def test_no_more_blocks_return_than_reach_an_age() -> None:
    """Blocks of an old visit count as having reached the last level: without that the share of all classes that return
    there would be more than 1, and so would what a rate is made of."""
    returns = Returns()
    for _ in range(4 * FIT_EVERY):
        old = returns.old_visit("a")
        returns.returned(old, "a")
        returns.visit({"b": 1})
    last = LEVELS - 1
    assert returns._reached["a"][last] == returns._returned["a"][last] == 4 * FIT_EVERY
    highest = best_rate([*[0.0] * last, 1.0], last)
    assert 0.0 < returns._average[last] <= highest and 0.0 < returns.rate(old, "a") <= highest


def test_a_block_that_leaves_a_visit_has_not_reached_its_level() -> None:
    returns = Returns()
    old = returns.old_visit("a")
    returns.leave(old, "a")
    assert sum(returns._reached["a"]) == 0.0 and not any(old.blocks.values())


def test_the_share_of_all_classes_is_at_most_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was counted."""
    monkeypatch.setattr(module, "_totals", lambda table: [100.0 if table is returns._returned else 1.0] * LEVELS)
    returns = Returns()
    returns.visit({"a": 1})
    assert [*returns._average._find_shares()] == [1.0] * LEVELS
