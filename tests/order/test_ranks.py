"""Ranks by event: when they are asked for, quanta, promotion, and a calendar that stays small."""

from __future__ import annotations

import random
import re
from collections.abc import Hashable
from dataclasses import dataclass
from math import inf, nan
from typing import Any

import numpy as np
import pytest

from kvpolicy.order import Order, OrderError, Progress, Rank, Ranks, View, load
from kvpolicy.order.guard import Guarded
from kvpolicy.order.ranks import FIRST, MAX_VOID
from kvpolicy.order.rules import Mlfq
from kvpolicy.order.wrapper import Wrapper
from kvpolicy.request_marks import NO_HINTS, Hints
from tests.order.made import ByLevel, Requests, view


def made(order: Order, *names: str, per_step: int = 1) -> tuple[Ranks[str], Requests]:
    requests = Requests()
    ranks: Ranks[str] = Ranks(order, requests.look, per_step)
    for name in names:
        ranks.arrived(requests.add(name), 0, view())
    return ranks, requests


def test_by_rank_then_arrival() -> None:
    ranks, requests = made(ByLevel(), "a", "b", "c")
    requests.tokens["a"] = 10
    ranks.preempted("a", 1, view())
    assert sorted("abc", key=ranks.key) == ["b", "c", "a"]
    assert ranks.progress("a").rank == (1,) and len(ranks) == 3


def test_nothing_is_due_where_nobody_runs() -> None:
    ranks, _ = made(ByLevel(), "a")
    assert (ranks.next_step, ranks.next_s) == (inf, inf)
    assert ranks.due(100, view(100.0)) is None


@pytest.mark.parametrize(("per_step", "due"), [(1, 13), (2, 8), (4, 6)])
def test_the_step_at_which_a_level_is_crossed_is_foreseen(per_step: int, due: int) -> None:
    ranks, requests = made(ByLevel(), "a", per_step=per_step)
    ranks.admitted("a", 3, view())
    assert ranks.next_step == due
    requests.tokens["a"] = 9
    assert ranks.due(due, view()) == [], "a token late: asked without a change"
    assert ranks.next_step == due + 1
    requests.tokens["a"] = 10
    assert ranks.due(due + 1, view()) == ["a"] and ranks.key("a")[0] == (1,)


def test_the_end_of_a_quantum_is_due() -> None:
    ranks, requests = made(ByLevel(quantum_tokens=4), "a")
    ranks.admitted("a", 0, view())
    assert ranks.next_step == 4
    requests.tokens["a"] = 4
    assert ranks.due(4, view()) == [] and ranks.next_step == 10


@pytest.mark.parametrize(
    ("stopped_at", "quantum_tokens", "matters"),
    [
        (None, 0, True),  # nobody was stopped: unknown
        ((-1,), 0, False),  # it could be displaced before as well
        ((0,), 0, True),  # it went beside the one that waits, and goes after it now
        ((1,), 0, False),  # it goes beside it now
        ((-1,), 10, True),  # its quantum has ended
        ((1,), 10, False),
    ],
)
def test_a_running_request_that_may_be_displaced_now_matters(
    stopped_at: tuple[float, ...] | None, quantum_tokens: int, matters: bool
) -> None:
    ranks, requests = made(ByLevel(quantum_tokens=quantum_tokens), "a")
    ranks.admitted("a", 0, view())
    requests.tokens["a"] = 10
    assert ranks.due(10, view(), stopped_at) == ["a"] and ranks.key("a")[0] == (1,)
    assert ranks.matters == matters


def test_the_end_of_a_quantum_matters_without_a_change_of_rank() -> None:
    ranks, requests = made(ByLevel(quantum_tokens=4), "a")
    ranks.admitted("a", 0, view())
    requests.tokens["a"] = 4
    assert ranks.due(4, view(), (-1,)) == [] and ranks.matters


@dataclass(frozen=True, repr=False)
class Ages(Order):
    """One rank less for each second that has passed."""

    name: str = "ages"

    def rank(self, request: Progress, view: View) -> Rank:
        return Rank((5 - view.now_s,), until_s=view.now_s + 1)


@pytest.mark.parametrize(("stopped_at", "matters"), [((3,), False), ((4,), True), ((5,), True)])
def test_a_waiting_request_that_does_not_go_after_the_one_that_was_stopped_matters(
    stopped_at: tuple[float, ...], matters: bool
) -> None:
    ranks, _ = made(Ages(), "a")
    assert ranks.due(1, view(1.0), stopped_at) == ["a"] and ranks.key("a")[0] == (4,)
    assert ranks.matters == matters


def test_what_was_foreseen_is_void_once_somebody_is_preempted_or_gone() -> None:
    ranks, _ = made(ByLevel(), "a", "b")
    for name in "ab":
        ranks.admitted(name, 0, view())
    ranks.preempted("a", 1, view())
    ranks.removed("b", by_itself=False)
    assert ranks.next_step == inf and ranks.due(50, view()) is None and len(ranks) == 1
    assert ranks.events == 0, "reading the next event removes those that are void"


def test_a_name_that_comes_again_has_no_events_of_the_one_before() -> None:
    ranks, requests = made(ByLevel(promote_s=5.0), "a")
    ranks.removed("a", by_itself=False)
    ranks.arrived(requests.add("a"), 3, view(3.0))
    assert ranks.due(4, view(5.5)) in (None, []), "its own waiting has just begun"
    assert ranks.key("a")[0] == (0,)


def test_who_ends_by_itself_is_learned_from() -> None:
    ranks, requests = made(ByLevel(), "a", "b")
    requests.tokens |= {"a": 7, "b": 9}
    ranks.removed("b", by_itself=False)
    assert ranks.state is None
    ranks.removed("a", by_itself=True)
    assert ranks.state == 7


# ---- promotion ----


def test_who_waited_too_long_goes_first_for_one_quantum() -> None:
    ranks, requests = made(ByLevel(quantum_tokens=4, promote_s=5.0), "a", "b")
    requests.tokens["b"] = 50
    ranks.preempted("b", 1, view(1.0))
    assert ranks.next_s == 5.0, "a has waited since 0 s"
    ranks.admitted("a", 1, view(1.0))
    assert ranks.next_s == 6.0
    assert ranks.due(9, view(5.9)) is not None and ranks.key("b")[0] == (5,)
    assert ranks.due(10, view(6.0)) == ["b"]
    assert ranks.key("b")[0] == FIRST and min("ab", key=ranks.key) == "b"
    ranks.admitted("b", 11, view(7.0))
    assert ranks.key("b")[0] == FIRST and ranks.next_step <= 15
    requests.tokens["b"] = 53
    ranks.due(14, view(8.0))
    assert ranks.key("b")[0] == FIRST
    requests.tokens["b"] = 54
    assert "b" in (ranks.due(15, view(8.0)) or [])
    assert ranks.key("b")[0] == (5,)


def test_who_is_preempted_during_its_turn_stays_first() -> None:
    ranks, requests = made(ByLevel(quantum_tokens=4, promote_s=5.0), "a")
    ranks.due(1, view(5.0))
    ranks.admitted("a", 2, view(5.0))
    requests.tokens["a"] = 2
    ranks.preempted("a", 4, view(6.0))
    assert ranks.key("a")[0] == FIRST
    ranks.admitted("a", 5, view(6.0))
    requests.tokens["a"] = 5
    ranks.due(9, view(7.0))
    assert ranks.key("a")[0] == FIRST, "three tokens of a whole quantum"


@pytest.mark.parametrize(("quantum", "turn"), [(0, 1), (1, 1), (4, 4)])
def test_a_promotion_ends_after_a_quantum_since_the_admission_and_not_before(quantum: int, turn: int) -> None:
    """What it had got before does not count, and no step before the last one asks."""
    ranks, requests = made(ByLevel(promote_s=5.0, quantum_tokens=quantum), "a")
    requests.tokens["a"] = 23
    ranks.due(1, view(5.0))
    ranks.admitted("a", 2, view(5.0))
    assert ranks.key("a")[0] == FIRST and ranks.next_step == 2 + turn
    requests.tokens["a"] = 23 + turn
    assert ranks.due(2 + turn, view(5.0)) == ["a"] and ranks.key("a")[0] == (2,)
    ranks.preempted("a", 9, view(6.0))
    assert ranks.key("a")[0] == (2,), "it has had its turn"


def test_who_is_preempted_at_the_end_of_its_turn_goes_first_no_more() -> None:
    """Until it has waited for too long once more."""
    ranks, requests = made(ByLevel(quantum_tokens=4, promote_s=5.0), "a")
    ranks.due(1, view(5.0))
    ranks.admitted("a", 2, view(5.0))
    requests.tokens["a"] = 4
    ranks.preempted("a", 6, view(6.0))
    assert ranks.key("a")[0] == (0,) and ranks.next_s == 11.0
    assert ranks.due(7, view(11.0)) == ["a"] and ranks.key("a")[0] == FIRST


def test_without_a_quantum_a_turn_is_a_token() -> None:
    ranks, requests = made(ByLevel(promote_s=5.0), "a")
    ranks.due(1, view(5.0))
    ranks.admitted("a", 2, view(5.0))
    assert ranks.key("a")[0] == FIRST and ranks.next_step == 3
    requests.tokens["a"] = 1
    assert ranks.due(3, view(5.0)) == ["a"] and ranks.key("a")[0] == (0,)


# ---- ranks that are never right, and a calendar that stays small ----


@dataclass(frozen=True, repr=False)
class Odd(Order):
    """Returns the same rank whatever the request."""

    odd: Rank
    name: str = "odd"

    def rank(self, request: Progress, view: View) -> Rank:
        return self.odd


@pytest.mark.parametrize("odd", [Rank((), -inf), Rank((), inf, -5.0), Rank((), 0.0, 0.0), Rank((), inf, -inf)])
def test_a_rank_that_ended_before_it_began_is_asked_for_once_a_step(odd: Rank) -> None:
    ranks, _ = made(Odd(odd), "a")
    ranks.admitted("a", 0, view(1.0))
    for step in range(1, 5):
        assert ranks.due(step, view(1.0 + step)) == []


@pytest.mark.parametrize("until", [{"until_s": 1e9}, {"until_tokens": 1e9}])
def test_the_calendar_does_not_keep_those_that_have_ended(until: Any) -> None:
    """Their events lie far ahead, behind that of one request that stays."""
    order = Odd(Rank((), **until))
    ranks, requests = made(order, "stays")
    ranks.admitted("stays", 0, view())
    for number in range(500):
        name = requests.add(f"r{number}")
        ranks.arrived(name, number, view())
        ranks.admitted(name, number, view())
        ranks.preempted(name, number, view())
        ranks.removed(name, by_itself=True)
        assert ranks.events <= 2 * (2 * len(ranks) + MAX_VOID) + 2
        assert min(ranks.next_step, ranks.next_s) < inf


def test_a_quiet_step_asks_nobody() -> None:
    asked: list[int] = []

    class Asked(ByLevel):
        def rank(self, request: Progress, view: View) -> Rank:
            asked.append(request.number)
            return super().rank(request, view)

    ranks, _ = made(Asked(), *map(str, range(50)))
    for name in map(str, range(50)):
        ranks.admitted(name, 0, view())
    asked.clear()
    for step in range(1, 10):
        assert ranks.next_step > step
        assert ranks.due(step, view(step * 1.0)) is None
    assert not asked


# ---- back again, and ranks that are measures ----


def test_whoever_comes_back_cools_down() -> None:
    """It may not be displaced meanwhile, and the end of it is foreseen, so that room is looked for then."""
    ranks, requests = made(ByLevel(cool_down_s=5.0), "a")
    ranks.admitted("a", 1, view(1.0))
    assert ranks.progress("a").cools_until_s == -inf, "it comes in for the first time"
    ranks.preempted("a", 2, view(2.0))
    requests.set("a", preemptions=1)
    ranks.admitted("a", 3, view(3.0))
    assert ranks.progress("a").cools_until_s == 8.0 and ranks.next_s == 8.0
    assert ranks.due(4, view(8.0)) == [] and ranks.next_s == inf
    ranks.preempted("a", 5, view(9.0))
    assert ranks.progress("a").cools_until_s == -inf


def test_a_rank_that_ends_first_does_not_forget_the_cooling() -> None:
    ranks, requests = made(ByLevel(cool_down_s=50.0), "a")
    requests.set("a", preemptions=1)
    ranks.admitted("a", 1, view(1.0))
    requests.tokens["a"] = 10
    assert ranks.due(11, view(2.0)) == ["a"] and ranks.next_s == 51.0


class Measured(ByLevel):
    """By what is measured, as a user may write it."""

    rank_ratio = 1.25

    def rank(self, request: Progress, view: View) -> Rank:
        return Rank((request.prompt_tokens / 7, -request.prompt_tokens / 7, inf))


def test_measures_are_ranked_by_levels() -> None:
    found = []
    for tokens in (1, 6, 7, 8, 9, 700, 800, 900):
        requests = Requests()
        ranks: Ranks[str] = Ranks(Measured(), requests.look)
        ranks.arrived(requests.add("a", prompt_tokens=tokens), 0, view())
        up, down, last = ranks.key("a")[0]
        assert up == -down and last == inf
        found.append(up)
    assert found == [0, 0, 0, 0, 1, 20, 21, 21]


class Counted(ByLevel):
    """By level, and counts how often it is asked."""

    asked = 0

    def rank(self, request: Progress, view: View) -> Rank:
        Counted.asked += 1
        return super().rank(request, view)

    def rank_group(self, request: Progress) -> Hashable:
        return ()


class Backwards(Counted):
    """Ranks otherwise than the class that groups."""

    def rank(self, request: Progress, view: View) -> Rank:
        return Rank((float(-request.number),), request.output_tokens + 1)


def test_requests_of_equal_groups_and_tokens_share_a_rank_until_the_state_changes() -> None:
    Counted.asked = 0
    ranks, requests = made(Counted(), "a", "b", "c")
    for name in "abc":
        ranks.admitted(name, 0, view())
    assert Counted.asked == 1
    requests.tokens |= {"a": 10, "b": 10, "c": 11}
    assert ranks.due(10, view()) == ["a", "b", "c"] and Counted.asked == 3
    assert {ranks.key(name)[0] for name in "abc"} == {(1,)}
    requests.tokens |= {"a": 20, "b": 20, "c": 20}
    assert sorted(ranks.due(20, view(state="another")) or ()) == ["a", "b", "c"] and Counted.asked == 4
    ranks.preempted("a", 20, view(state="a third"))
    assert Counted.asked == 5


def test_who_ranks_otherwise_than_the_class_that_groups_is_asked_for_each_request() -> None:
    ranks, _ = made(Backwards(), "a", "b")
    assert [ranks.key(name)[0] for name in "ab"] == [(0,), (-1,)]


class Halves(Mlfq):
    """Ranks by a part of an order that ships, of which it changes no rank."""

    def rank(self, request: Progress, view: View) -> Rank:
        return Rank((self.level(request),), request.output_tokens + 1)

    def rank_group(self, request: Progress) -> Hashable:
        return ()

    def level(self, request: Progress) -> float:
        return 0.0


class Numbered(Halves):
    def level(self, request: Progress) -> float:
        return -request.number


def test_who_changes_what_the_rank_of_its_base_calls_is_asked_for_each_request() -> None:
    ranks, _ = made(Numbered("numbered"), "a", "b")
    assert [ranks.key(name)[0] for name in "ab"] == [(0,), (-1,)]
    assert Halves("halves").groups_ranks and not Numbered("numbered").groups_ranks


def test_a_rank_that_ends_at_a_time_is_not_shared() -> None:
    class Timed(Counted):
        def rank(self, request: Progress, view: View) -> Rank:
            return Rank((view.now_s,), request.output_tokens + 1, view.now_s + 1)

        def rank_group(self, request: Progress) -> Hashable:
            return ()

    requests = Requests()
    ranks: Ranks[str] = Ranks(Timed(), requests.look)
    ranks.arrived(requests.add("a"), 0, view(1.0))
    ranks.arrived(requests.add("b"), 0, view(2.0))
    assert [ranks.key(name)[0] for name in "ab"] == [(1.0,), (2.0,)]


def test_an_order_that_groups_nothing_is_asked_without_a_look_for_its_groups() -> None:
    looks: dict[str, int] = {}
    for order in (ByLevel(), Counted()):
        requests = Requests()

        def look(
            request: str, rank: tuple[float, ...], at: int, name: str = type(order).__name__, known: Requests = requests
        ) -> Progress:
            looks[name] = looks.get(name, 0) + 1
            return known.look(request, rank, at)

        ranks: Ranks[str] = Ranks(order, look, output_tokens=lambda request: 0)
        ranks.arrived(requests.add("a"), 0, view())
    assert looks == {"ByLevel": 2, "Counted": 3}


@pytest.mark.parametrize(
    ("spec", "groups"),
    [
        ("mlfq:base=4,victims=least-computed", True), ("mlfq:base=4,explore=.1,worth=price", True),
        ("urgent/mlfq:base=4", True), ("urgent/deadline", False), ("deadline:victims=least-computed", False),
        ("fcfs", False),
    ],
)  # fmt: skip
def test_rules_and_layers_group_where_what_they_rank_by_does(spec: str, groups: bool) -> None:
    order = load(spec)
    assert order.groups_ranks == groups == Guarded(order, pytest.fail).groups_ranks


def test_the_next_turn_of_a_session_is_ranked_as_an_arrival() -> None:
    ranks, requests = made(load("deadline:ttft=0,tpot=.1"), "a")
    ranks.admitted("a", 1, view(5.0))
    assert ranks.key("a") == ((inf,), 0.0, 0), "its first turn is lost"
    requests.set("a", arrival_s=9.9)
    ranks.next_turn("a", 2, view(10.0))
    assert ranks.key("a") == ((-1,), 9.9, 0)


def test_a_rank_without_an_end_is_not_shared() -> None:
    """A server answers so for an order that fails: each request has the rank that it had."""

    class Fails(Counted):
        broken = False

        def rank(self, request: Progress, view: View) -> Rank:
            if self.broken:
                raise ValueError("broken")
            return Rank((request.priority,), request.output_tokens + 1)

        def rank_group(self, request: Progress) -> Hashable:
            return ()

    order = Fails()
    requests = Requests()
    ranks: Ranks[str] = Ranks(Guarded(order, lambda method: None), requests.look)
    ranks.arrived(requests.add("a", priority=1), 0, view())
    ranks.arrived(requests.add("b", priority=2), 0, view(state="so that it is asked"))
    Fails.broken = True
    for name in "ab":
        ranks.preempted(name, 1, view(state=name))
    for name in "ab":
        ranks.preempted(name, 2, view(state="b"))
    assert [ranks.key(name)[0] for name in "ab"] == [(1,), (2,)]


@pytest.mark.parametrize(
    "spec",
    [
        "mlfq:base=3",
        "las:quantum=4",
        "srpt:limit",
        "srpt:lengths",
        "gittins:quantum=3",
        "urgent/mlfq:base=2",
        "classes:chat+batch/las:quantum=3",
        "urgent:quantum=3",
        "hints/las:quantum=3",
    ],
)
def test_shared_ranks_are_those_that_each_request_would_get(spec: str) -> None:
    """Over drawn requests and steps, beside ranks asked for one by one."""
    rng = random.Random(spec)
    order = load(spec)
    shared, alone = Ranks[str](order, (requests := Requests()).look), Ranks[str](Ungrouped(spec, order), requests.look)
    names = [f"r{number}" for number in range(30)]
    for name in names:
        requests.add(
            name, priority=rng.randrange(2), prompt_tokens=rng.choice((5, 50)), max_output_tokens=rng.choice((40, 90)),
            class_name=rng.choice(("chat", "batch", "other")),
            hints=rng.choice((NO_HINTS, Hints(keep_s=60.0), Hints(once=True))),
        )  # fmt: skip
        for ranks in (shared, alone):
            ranks.arrived(name, 0, view(state=ranks.state))
            ranks.admitted(name, 0, view(state=ranks.state))
    for step in range(1, 60):
        for name in names:
            requests.tokens[name] += rng.random() < 0.9
        changed = [ranks.due(step, view(float(step), ranks.state)) for ranks in (shared, alone)]
        assert changed[0] == changed[1], step
        assert [*map(shared.key, names)] == [*map(alone.key, names)], step
        if step % 7 == 0:
            ended = names.pop(rng.randrange(len(names)))
            for ranks in (shared, alone):
                ranks.removed(ended, by_itself=True)


class Ungrouped(Wrapper):
    """The same order, asked for every request."""

    def rank_group(self, request: Progress) -> Hashable:
        return None


@pytest.mark.parametrize(
    "answer", [10, Rank((nan,)), Rank((1.0, "a")), Rank((1.0,), nan), Rank((1.0,), None), Rank(5), Rank([1.0])]
)  # fmt: skip
def test_what_is_no_rank_is_refused_by_name(answer: Any) -> None:
    class Bare(ByLevel):
        def rank(self, request: Progress, view: View) -> Any:
            return answer

    with pytest.raises(OrderError, match=rf"^order by-level@.*: rank gave {re.escape(repr(answer))}, should be a kvp"):
        made(Bare(), "a")


@pytest.mark.parametrize("value", [(), (inf, -inf), (1, 0.5), (np.float64(2.0),), (True,)])
def test_numbers_of_any_kind_rank(value: Any) -> None:
    class Bare(ByLevel):
        def rank(self, request: Progress, view: View) -> Any:
            return Rank(value)

    ranks, _ = made(Bare(), "a")
    assert ranks.key("a")[0] == value
