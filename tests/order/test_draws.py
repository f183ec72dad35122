"""Victims left to chance: the recorded probability is that of the draw, and equal runs draw alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from math import sqrt
from typing import Any

import pytest

from kvpolicy.order import Progress, View, load
from kvpolicy.order.base import MAX_SHOWN
from kvpolicy.order.draws import WithDraws
from kvpolicy.order.wrapper import Wrapper
from kvpolicy.simulator import Server
from kvpolicy.trace import Trace
from tests.order.made import ByLevel, progress, view
from tests.simulator.worlds import LINEAR, random_workload, run

RUNNING = [progress(number, rank=(rank,), output_tokens=10) for number, rank in ((1, 1), (2, 2), (3, 2), (4, 2))]
ORDER = WithDraws("drawn", ByLevel(), 0.3)


def numbers(victims: Sequence[Progress]) -> tuple[int, ...]:
    return tuple(victim.number for victim in victims)


def test_the_highest_ranks_stay_first_and_equals_are_in_any_order() -> None:
    always = WithDraws("always", ByLevel(), 1.0)
    seen = {numbers(always.victims(progress(9, output_tokens=n), RUNNING, view())) for n in range(200)}
    assert seen == {(*first, 1) for first in permutations((2, 3, 4))}


@pytest.mark.parametrize("taken", [1, 2, 3, 4])
def test_what_is_recorded_is_how_often_it_is_taken(taken: int) -> None:
    draws = 6000
    counts: Counter[tuple[int, ...]] = Counter()
    expected: dict[tuple[int, ...], float] = {}
    for n in range(draws):
        waiting = progress(9, output_tokens=n)
        victims = ORDER.victims(waiting, RUNNING, view())[:taken]
        counts[numbers(victims)] += 1
        expected[numbers(victims)] = ORDER.probability(waiting, victims, RUNNING, view())
    assert sum(expected.values()) == pytest.approx(1.0)
    for victims, chance in expected.items():
        assert abs(counts[victims] / draws - chance) < 4 * sqrt(chance * (1 - chance) / draws) + 1e-9, victims


def test_what_cannot_be_taken_has_no_chance() -> None:
    first, second = RUNNING[0], RUNNING[1]
    assert ORDER.probability(progress(9), [first], RUNNING, view()) == 0.0
    assert ORDER.probability(progress(9), [second, first], RUNNING, view()) == 0.0
    assert ORDER.probability(progress(9), [*reversed(RUNNING), second], RUNNING, view()) == 0.0


def test_equal_choices_are_drawn_alike_and_the_others_are_not() -> None:
    waiting = progress(9)
    assert numbers(ORDER.victims(waiting, RUNNING, view())) == numbers(ORDER.victims(waiting, RUNNING, view(7.0)))
    later = [[replace(one, output_tokens=n) for one in RUNNING] for n in range(40)]
    assert len({numbers(ORDER.victims(waiting, running, view())) for running in later}) > 1


@pytest.mark.parametrize("part", ["number", "output_tokens", "preemptions"])
def test_every_part_of_what_is_known_of_the_newcomer_sets_the_draw(part: str) -> None:
    changes: list[dict[str, Any]] = [{part: value} for value in range(40)]
    newcomers = [replace(progress(9), **change) for change in changes]
    drawn = {numbers(WithDraws("always", ByLevel(), 1.0).victims(one, RUNNING, view())) for one in newcomers}
    assert len(drawn) > 1


def test_who_runs_besides_sets_the_draw() -> None:
    """Those of another rank too: whose numbers alone differ, the draw differs."""
    besides = [[progress(number, rank=(0,)), *RUNNING] for number in range(100, 140)]
    order = WithDraws("always", ByLevel(), 1.0)
    assert len({numbers(order.victims(progress(9), running, view()))[:3] for running in besides}) > 1


def test_more_are_shown_than_are_taken() -> None:
    assert ORDER.max_candidates == MAX_SHOWN > ORDER.max_victims


def test_nothing_is_drawn_unless_it_is_asked_for() -> None:
    assert not isinstance(load("mlfq:explore=0"), WithDraws)
    order = load("mlfq:base=8,victims=cheapest,explore=.25,worth=price")
    assert isinstance(order, Wrapper) and isinstance(order.base, WithDraws) and order.base.share == 0.25
    assert load("urgent/mlfq:explore=.5").probability(progress(9), RUNNING[-1:], RUNNING, layered()) == pytest.approx(
        0.5 + 0.5 / 3
    )


def layered() -> View:
    return view(state=(None, None))


def trace_of(spec: str) -> Trace:
    server = Server(16, 1 << 16, 60, 300, token_budget=256, max_running=24, order=load(spec))
    return run(random_workload(1, 60, 200.0), server, "always-swap", LINEAR)[1]


def test_a_run_records_what_was_left_to_chance() -> None:
    chances = {row["probability"] for row in trace_of("mlfq:base=8,explore=.5").rows("displacements")}
    assert max(chances) <= 1.0 and 0.0 < min(chances) < 0.5
    assert {row["probability"] for row in trace_of("mlfq:base=8").rows("displacements")} == {1.0}
    assert trace_of("mlfq:base=8,explore=.5").digest() == trace_of("mlfq:base=8,explore=.5").digest()
