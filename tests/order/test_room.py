"""Making room, by hand: whom it takes, and when nobody."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvpolicy.order import BackOff, Order, OrderError, Progress, Space, Taken, View, make_room
from kvpolicy.order.base import MAX_SHOWN
from kvpolicy.order.room import MAX_ASKED, MAX_BACK_OFF, MAX_HEADS
from tests.order.made import ByLevel, progress, view


@dataclass
class Engine:
    """Requests with the blocks that they need or hold."""

    waits: dict[Progress, int] = field(default_factory=dict)
    runs: dict[Progress, int] = field(default_factory=dict)
    left: Space = field(default_factory=lambda: Space(0, 9, 1000))
    spare: int = 0
    """Of each need."""
    asked: list[str] = field(default_factory=list)
    """What was asked of it, but for heads and needs."""

    def heads(self) -> list[Progress]:
        return sorted(self.waits, key=lambda one: (not one.computed_tokens, one.rank, one.number))

    def last_running(self) -> Iterator[Progress]:
        for one in sorted(self.runs, key=lambda one: (one.rank, one.number), reverse=True):
            self.asked.append(f"running {one.number}")
            yield one

    def free_blocks(self) -> int:
        return self.left.free_blocks

    def held_blocks(self, running: Progress) -> int:
        return self.runs[running]

    def space(self) -> Space:
        self.asked.append("space")
        return replace(self.left)

    def need_blocks(self, waiting: Progress) -> int:
        return self.waits[waiting]

    def spare_blocks(self) -> int:
        return self.spare

    def freed_blocks(self, running: Progress, waiting: Progress) -> int:
        return self.runs[running]


def waits(number: int, rank: int, **values: Any) -> Progress:
    return progress(number, rank=(rank,), **values)


def runs(number: int, rank: int, served_tokens: int = 99, **values: Any) -> Progress:
    return progress(number, rank=(rank,), served_tokens=served_tokens, computed_tokens=50, **values)


def room(engine: Engine, order: Order | None = None, free: int = 0, places: int = 9, budget: int = 1000) -> Taken:
    engine.left = Space(free, places, budget)
    engine.asked.clear()
    return make_room(order or ByLevel(), engine, view())


def numbers(taken: Taken) -> tuple[list[int], list[int], bool]:
    return [one.number for one in taken.victims], [one.number for one in taken.let_in], taken.missed


THREE = {runs(1, 5): 4, runs(2, 6): 4, runs(3, 7): 4}


@pytest.mark.parametrize(
    ("need", "free", "victims"), [(4, 4, []), (5, 4, [3]), (8, 4, [3]), (9, 4, [3, 2]), (12, 0, [3, 2, 1])]
)
def test_as_many_as_are_needed(need: int, free: int, victims: list[int]) -> None:
    engine = Engine({waits(8, 0): need}, THREE)
    assert numbers(room(engine, free=free)) == (victims, [8] if victims else [], False)


def test_all_or_nothing() -> None:
    assert numbers(room(Engine({waits(8, 0): 13}, THREE))) == ([], [], True)


def test_only_those_of_a_higher_rank() -> None:
    assert numbers(room(Engine({waits(8, 6): 4}, THREE))) == ([3], [8], False)
    assert numbers(room(Engine({waits(8, 6): 5}, THREE))) == ([], [], True), "equals do not displace each other"
    assert numbers(room(Engine({waits(8, 7): 4}, THREE))) == ([], [], False)


def test_one_after_the_other_until_one_cannot_be_let_in() -> None:
    engine = Engine({waits(7, 0): 4, waits(8, 1): 4, waits(9, 2): 9}, THREE)
    assert numbers(room(engine)) == ([3, 2], [7, 8], True), "what was found for the others stays"


def test_what_is_left_over_goes_to_the_next() -> None:
    engine = Engine({waits(7, 0): 3, waits(8, 1): 1}, THREE)
    assert numbers(room(engine)) == ([3], [7], False)


def test_the_rank_of_whoever_is_not_let_in_is_told() -> None:
    for waiting, stopped_at in (
        ({waits(8, 0): 13}, (0,)),
        ({waits(7, 0): 4, waits(8, 1): 4, waits(9, 2): 9}, (2,)),
        ({waits(8, 7): 4}, (7,)),
        ({waits(8, 0): 4}, None),
    ):
        assert room(Engine(waiting, THREE)).stopped_at == stopped_at
    assert room(Engine({waits(8, 0): 4}, {runs(1, 5, 0): 4}), ByLevel(quantum_tokens=4)).stopped_at == (0,)


def test_a_quantum_is_served_first() -> None:
    order = ByLevel(quantum_tokens=4)
    early = {runs(1, 5): 4, runs(2, 6, served_tokens=3): 4}
    assert numbers(room(Engine({waits(8, 0): 4}, early), order)) == ([1], [8], False)
    assert numbers(room(Engine({waits(8, 0): 4}, {runs(2, 6, served_tokens=3): 4}), order)) == ([], [], False)
    assert numbers(room(Engine({waits(8, 0): 4}, {runs(2, 6, served_tokens=4): 4}), order)) == ([2], [8], False)


def test_at_most_so_many_victims_a_step() -> None:
    engine = Engine({waits(7, 0): 4, waits(8, 0): 4}, THREE)
    assert numbers(room(engine, ByLevel(max_victims=1))) == ([3], [7], True)
    assert numbers(room(Engine({waits(7, 0): 8}, THREE), ByLevel(max_victims=1))) == ([], [], True)


def test_a_place_is_needed_too() -> None:
    assert numbers(room(Engine({waits(8, 0): 1}, THREE), free=50, places=0)) == ([3], [8], False)
    assert numbers(room(Engine({waits(7, 0): 1, waits(8, 0): 1}, THREE), free=50, places=1)) == ([3], [8], False)


def test_nobody_is_taken_beyond_the_token_budget() -> None:
    engine = Engine({waits(7, 0, prompt_tokens=100): 4, waits(8, 0): 4}, THREE)
    assert numbers(room(engine, budget=100)) == ([3], [7], False)
    assert numbers(room(engine, budget=101)) == ([3, 2], [7, 8], False)
    assert numbers(room(engine, budget=0)) == ([], [], False)


def test_a_loaded_request_that_lacks_a_block_does_not_stop_more_urgent_ones() -> None:
    """vLLM admits it first, whatever its rank: the victims make room for it, too, with a place."""
    loaded = waits(7, 9, computed_tokens=64)
    engine = Engine({loaded: 1, waits(8, 0): 4}, THREE)
    assert numbers(room(engine)) == ([3, 2], [8], False)
    assert numbers(room(engine, free=1)) == ([3], [8], False)
    assert numbers(room(engine, free=50, places=1)) == ([3], [8], False)
    assert numbers(room(Engine({loaded: 1}, THREE))) == ([], [], False)


def test_several_loaded_requests_that_lack_blocks_come_before_all_others() -> None:
    """They take blocks and places, each its own, and once."""
    loaded = {waits(5, 8, computed_tokens=64): 1, waits(6, 9, computed_tokens=64): 2}
    engine = Engine(loaded | {waits(8, 0): 4}, THREE)
    assert numbers(room(engine, free=7)) == ([], [], False)
    assert numbers(room(engine, free=6)) == ([3], [8], False)
    assert numbers(room(engine, free=50, places=3)) == ([], [], False)
    assert numbers(room(engine, free=50, places=2)) == ([3], [8], False)
    engine.waits[waits(9, 1)] = 4
    assert numbers(room(engine, free=11)) == ([], [], False)
    assert numbers(room(engine, free=50, places=4)) == ([], [], False)
    assert numbers(room(engine, free=10)) == ([3], [9], False)


def test_blocks_that_must_be_free_beside_are_counted_once() -> None:
    """Six are four and two beside them, which serve the next one too."""
    five = dict.fromkeys(THREE, 5)
    assert numbers(room(Engine({waits(7, 0): 6, waits(8, 0): 6}, five, spare=2))) == ([3, 2], [7], False)
    assert numbers(room(Engine({waits(7, 0): 6, waits(8, 0): 7}, five, spare=2))) == ([3, 2, 1], [7, 8], False)
    behind_a_load = Engine({waits(7, 9, computed_tokens=64): 3, waits(8, 0): 6}, five, spare=2)
    assert numbers(room(behind_a_load, free=7)) == ([], [], False)
    assert numbers(room(behind_a_load, free=6)) == ([3], [8], False)


def test_a_loaded_request_that_goes_first_displaces() -> None:
    engine = Engine({waits(7, 0, computed_tokens=64): 1}, THREE)
    assert numbers(room(engine)) == ([3], [7], False)


def test_the_order_may_refuse_a_victim_or_a_deal() -> None:
    class Sparing(ByLevel):
        def displaces(self, waiting: Progress, running: Progress, view: View) -> bool:
            return running.number != 3

    class Stingy(ByLevel):
        def worth(self, waiting: Progress, victims: Sequence[Progress], view: View) -> bool:
            return len(victims) < 2

    class FirstVictim(ByLevel):
        def victims(self, waiting: Progress, running: Sequence[Progress], view: View) -> Sequence[Progress]:
            return running

    engine = Engine({waits(8, 0): 4}, THREE)
    assert numbers(room(engine, Sparing())) == ([2], [8], False)
    assert numbers(room(engine, FirstVictim())) == ([1], [8], False)
    assert numbers(room(engine, Stingy())) == ([3], [8], False)
    assert numbers(room(Engine({waits(8, 0): 5}, THREE), Stingy())) == ([], [], True)


def test_so_many_heads_are_looked_at() -> None:
    engine = Engine({waits(100 + number, 0): 1 for number in range(MAX_HEADS)} | {waits(999, 1): 5}, THREE)
    assert numbers(room(engine, free=MAX_HEADS, places=500, budget=10**6)) == ([], [], False)


def test_a_victim_is_taken_once() -> None:
    engine = Engine({waits(7, 0): 4, waits(8, 0): 4, waits(9, 0): 4}, THREE)
    taken = room(engine)
    assert numbers(taken) == ([3, 2, 1], [7, 8, 9], False)


def test_a_look_in_vain_costs_by_what_it_considers() -> None:
    """Three hundred run; whoever does not fit however many are displaced is found out by the last few."""
    many = {runs(number, number // 10): 4 for number in range(300)}
    engine = Engine({waits(999, 0): 33}, many)
    taken = room(engine)
    assert taken.missed and not taken.in_vain
    assert "space" not in engine.asked and len(engine.asked) <= ByLevel().max_victims + 1
    assert len(room(Engine({waits(999, 0): 32}, many)).victims) == 8


def test_a_look_that_finds_nobody_to_let_in_is_told() -> None:
    assert room(Engine({waits(8, 7): 4}, THREE)).in_vain, "nobody goes before a running request"
    assert room(Engine({}, THREE)).in_vain and room(Engine({waits(8, 0): 4}, {})).in_vain
    fits = room(Engine({waits(8, 0): 4}, THREE), free=9)
    assert not fits.in_vain and not fits.missed
    assert not room(Engine({waits(8, 0): 4}, THREE), budget=0).in_vain, "the budget comes back with the next step"


def test_an_order_that_chooses_is_shown_so_many() -> None:
    shown: list[int] = []

    class Choosing(ByLevel):
        def victims(self, waiting: Progress, running: Sequence[Progress], view: View) -> Sequence[Progress]:
            shown[:] = [one.number for one in running]
            return running

    many = {runs(number, 5): 4 for number in range(300)}
    taken = room(Engine({waits(999, 0): 4}, many), Choosing())
    assert shown == list(range(300 - MAX_SHOWN, 300)) and numbers(taken) == ([300 - MAX_SHOWN], [999], False)


def test_an_order_is_asked_about_so_many() -> None:
    asked: list[int] = []

    class Refusing(ByLevel):
        agrees_to = -1

        def displaces(self, waiting: Progress, running: Progress, view: View) -> bool:
            asked.append(running.number)
            return running.number == self.agrees_to

    order, many = Refusing(), {runs(number, 5): 4 for number in range(300)}
    assert numbers(room(Engine({waits(999, 0): 4}, many), order)) == ([], [], True)
    assert asked == list(range(299, 299 - MAX_ASKED, -1))
    Refusing.agrees_to = 300 - MAX_ASKED
    assert numbers(room(Engine({waits(999, 0): 4}, many), order)) == ([300 - MAX_ASKED], [999], False)


def test_whoever_has_just_come_back_is_spared() -> None:
    back = {runs(1, 5): 4, runs(2, 6, cools_until_s=7.0): 4}
    engine = Engine({waits(8, 0): 4}, back)
    assert numbers(make_room(ByLevel(), engine, view(6.9))) == ([1], [8], False)
    assert numbers(make_room(ByLevel(), engine, view(7.0))) == ([2], [8], False)


def test_a_prompt_that_must_be_computed_at_once_needs_the_whole_budget() -> None:
    engine = Engine({waits(8, 0, prompt_tokens=100): 4}, THREE, Space(0, 9, 99, chunked=False))
    assert numbers(make_room(ByLevel(), engine, view())) == ([], [], True)
    engine.left = Space(0, 9, 100, chunked=False)
    assert numbers(make_room(ByLevel(), engine, view())) == ([3], [8], False)


def test_looks_that_let_nobody_in_grow_rare() -> None:
    back_off = BackOff()
    steps = []
    step = 0
    for _ in range(7):
        back_off.missed(step)
        steps.append(back_off.next_step - step)
        step = back_off.next_step
    assert steps == [1, 2, 4, 8, MAX_BACK_OFF, MAX_BACK_OFF, MAX_BACK_OFF]
    back_off.reset()
    assert back_off.next_step == 0
    back_off.missed(50)
    assert back_off.next_step == 51


@pytest.mark.parametrize("answer", [None, [3], [progress(77)], 5])
def test_victims_that_are_none_of_those_shown_are_refused_by_name(answer: Any) -> None:
    class Careless(ByLevel):
        def victims(self, waiting: Progress, running: Sequence[Progress], view: View) -> Any:
            return answer

    with pytest.raises(OrderError, match=r"^order by-level@.*: victims gave .*, should be a list of running requests"):
        room(Engine({waits(8, 0): 4}, THREE), Careless())
