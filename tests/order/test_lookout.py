"""When room is looked for: rarely where nobody can be let in, at once where something changes."""

from __future__ import annotations

from kvpolicy.order import Lookout, Taken
from kvpolicy.order.lookout import MAX_UNREADY
from tests.order.made import progress

MISSED, IN_VAIN = Taken(missed=True), Taken(in_vain=True)


def looks(lookout: Lookout[str], taken: Taken, steps: int) -> list[int]:
    """Steps in which room is looked for, and ``taken`` found."""
    found = []
    for step in range(steps):
        if lookout.is_due(step):
            found.append(step)
            lookout.begins()
            lookout.looked(taken, step)
    return found


def test_looks_grow_rare_whatever_made_them_vain() -> None:
    for taken in (MISSED, IN_VAIN):
        assert looks(Lookout[str](lambda name: False), taken, 60) == [0, 1, 3, 7, 15, 31, 47]


def test_they_do_not_where_somebody_came_in() -> None:
    for taken in (Taken(), Taken((progress(1),), (progress(2),), missed=True)):
        assert looks(Lookout[str](lambda name: False), taken, 9) == list(range(9))


def test_what_happens_brings_the_next_look() -> None:
    lookout: Lookout[str] = Lookout(lambda name: False)
    looks(lookout, MISSED, 16)
    assert not lookout.is_due(17) and lookout.next_step == 31
    lookout.happened()
    assert lookout.is_due(17)


def test_it_is_remembered_who_was_stopped_in_the_last_look() -> None:
    lookout: Lookout[str] = Lookout(lambda name: False)
    lookout.looked(Taken(missed=True, stopped_at=(3,)), 0)
    assert lookout.stopped_at == (3,)
    lookout.looked(Taken((progress(1),), (progress(2),)), 1)
    assert lookout.stopped_at is None


def test_whoever_becomes_ready_brings_the_next_look() -> None:
    ready: set[str] = set()
    lookout: Lookout[str] = Lookout(ready.__contains__)
    looks(lookout, IN_VAIN, 16)
    lookout.passed_over("compiles")
    assert not lookout.is_due(17)
    ready.add("compiles")
    assert lookout.is_due(17)
    lookout.begins()
    lookout.looked(IN_VAIN, 17)
    assert not lookout.is_due(18), "forgotten once looked at"


def test_so_many_are_looked_after() -> None:
    asked: list[int] = []
    lookout: Lookout[int] = Lookout(lambda number: bool(asked.append(number)))
    lookout.looked(MISSED, 0)
    for number in range(MAX_UNREADY + 10):
        lookout.passed_over(number)
    assert not lookout.is_due(0) and len(asked) == MAX_UNREADY


def test_after_a_miss_nothing_brings_a_look_before_its_time() -> None:
    lookout: Lookout[str] = Lookout(lambda name: True)
    lookout.came_in(False, 5)
    lookout.came_in(False, 6)
    lookout.passed_over("ready")
    lookout.happened()
    assert not lookout.is_due(7) and lookout.is_due(8)
    lookout.came_in(True, 8)
    assert lookout.is_due(0)
