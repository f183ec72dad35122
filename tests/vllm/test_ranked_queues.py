"""vLLM's queues by rank, in both layouts: the order, whom they hide, and what is vLLM's again afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import RequestStatus

from kvpolicy_vllm.plugin.ranked_queues import RankedQueue, RankedQueues

LAYOUTS = {"up to 0.30": "skipped_waiting", "from 0.31": "kv_holding_waiting"}
"""vLLM's name of the queue of those that hold blocks."""
either = pytest.mark.parametrize("holding_name", LAYOUTS.values(), ids=LAYOUTS)


@dataclass(eq=False)
class Asked:
    """A request, with the rank that a test gives it."""

    rank: float
    admitted: bool = True
    """Whether the order admits it."""
    num_computed_tokens: int = 0
    status: RequestStatus = RequestStatus.WAITING


@dataclass(eq=False)
class Loads:
    """The requests that were loaded, of which one is offered before all others."""

    ready: Asked | None = None
    searched: list[Any] = field(default_factory=list)

    def in_front(self, queue: Any) -> Asked | None:
        self.searched.append(queue)
        return self.ready


class Stock:
    """What the queues know of vLLM's scheduler."""

    def __init__(self, holding_name: str) -> None:
        self.waiting, self.skipped_waiting = FCFSRequestQueue(), FCFSRequestQueue()
        if holding_name == "kv_holding_waiting":
            self.kv_holding_waiting = FCFSRequestQueue()
        self.own = dict(vars(self))
        self.loaded_requests = Loads()


class Made:
    """Queues over a scheduler; ``gated`` as in a step in which the order may refuse."""

    def __init__(self, holding_name: str, gated: bool = True) -> None:
        self.scheduler, self.gated = Stock(holding_name), gated
        self.arrived: list[Asked] = []
        self.asked: list[Asked] = []
        self.queues = RankedQueues(
            self.scheduler, lambda one: ((one.rank,), 0.0, id(one)), self.arrived.append, self.admits,
            lambda: self.gated,
        )  # fmt: skip
        self.waiting, self.holding = (
            cast(RankedQueue, vars(self.scheduler)[name]) for name in ("waiting", holding_name)
        )

    def admits(self, request: Asked) -> bool:
        self.asked.append(request)
        return request.admitted


def emptied(queue: RankedQueue) -> list[float]:
    return [queue.pop_request().rank for _ in range(len(queue))]


@either
def test_whoever_has_the_lowest_rank_comes_first_however_it_was_queued(holding_name: str) -> None:
    made = Made(holding_name)
    first, second, third, fourth = (Asked(rank) for rank in (1, 2, 3, 4))
    for queue in (made.waiting, made.holding):
        queue.add_request(third)
        queue.prepend_request(fourth)
        queue.prepend_requests([second, first])
        assert (len(queue), queue.peek_request(), list(queue)) == (4, first, [first, second, third, fourth])
        queue.remove_request(second)
        queue.remove_requests([third, second])
        assert emptied(queue) == [1, 4] and not queue
    assert made.arrived == 2 * [third, fourth, second, first]


@either
def test_a_rank_that_changed_counts_once_it_is_renewed(holding_name: str) -> None:
    made = Made(holding_name)
    waits, holds, other = Asked(5), Asked(6), Asked(3)
    made.waiting.add_request(waits)
    made.holding.add_request(holds)
    assert made.queues.first_of([waits, other, holds]) is other
    assert [list(queue) for queue in made.queues] == [[holds], [waits]]
    assert made.queues.go_before((5.5,)) and not made.queues.go_before((5,))
    holds.rank = 1
    made.queues.renew([holds, other])
    assert made.queues.go_before((1.5,)) and not made.queues.go_before((1,))
    assert [len(queue) for queue in made.queues] == [1, 1], "who does not wait is not queued"


@either
def test_the_queue_whose_first_goes_first_is_offered(holding_name: str) -> None:
    made = Made(holding_name, gated=False)
    assert made.queues.first_queue(made.waiting, made.holding) is None
    made.waiting.add_request(Asked(2))
    assert made.queues.first_queue(made.waiting, made.holding) is made.waiting
    made.holding.add_request(Asked(1))
    assert made.queues.first_queue(made.waiting, made.holding) is made.holding


@either
def test_a_queue_says_that_it_is_empty_while_its_first_is_not_admitted(holding_name: str) -> None:
    made = Made(holding_name)
    refused, later = Asked(1, admitted=False), Asked(2)
    made.waiting.add_request(refused)
    made.waiting.add_request(later)
    assert not made.waiting and len(made.waiting) == 2, "later ones do not overtake it"
    assert made.queues.first_queue(made.waiting, made.holding) is made.waiting, "vLLM is offered one in any case"
    made.gated = False
    made.asked.clear()
    assert made.waiting and not made.asked, "outside a step nobody is asked about"
    made.gated, refused.admitted = True, True
    assert made.waiting


def test_whoever_holds_blocks_is_not_asked_about_where_it_has_a_queue_of_its_own() -> None:
    made = Made("kv_holding_waiting")
    made.holding.add_request(Asked(1, admitted=False))
    made.waiting.add_request(Asked(2))
    assert made.holding and made.waiting
    assert [one.rank for one in made.asked] == [2] and not made.scheduler.loaded_requests.searched
    assert isinstance(made.scheduler.skipped_waiting, FCFSRequestQueue), "not the plugin's"


def test_where_one_queue_holds_both_kinds_the_first_of_both_queues_decides() -> None:
    """A request that was passed over is refused as a new one is, and hides the other queue too."""
    made = Made("skipped_waiting")
    passed_over, newcomer = Asked(1, admitted=False), Asked(2)
    made.holding.add_request(passed_over)
    made.waiting.add_request(newcomer)
    assert not made.holding and not made.waiting
    assert {*made.asked} == {passed_over}
    passed_over.rank = 3
    made.queues.renew([passed_over])
    assert made.holding and made.waiting, "the newcomer goes first now"


@pytest.mark.parametrize(
    "holds",
    [{"num_computed_tokens": 16}, {"status": RequestStatus.WAITING_FOR_REMOTE_KVS}],
    ids=["loaded", "being loaded"],
)
def test_where_one_queue_holds_both_kinds_those_with_blocks_always_may_come(holds: dict[str, Any]) -> None:
    made = Made("skipped_waiting")
    made.holding.add_request(Asked(1, admitted=False, **holds))
    assert made.holding and not made.asked


def test_where_one_queue_holds_both_kinds_a_loaded_request_is_offered_before_a_refused_one() -> None:
    made = Made("skipped_waiting")
    made.waiting.add_request(Asked(1, admitted=False))
    made.holding.add_request(loaded := Asked(2))
    assert not made.waiting
    made.scheduler.loaded_requests.ready = loaded
    assert made.waiting and made.holding
    assert {*map(id, made.scheduler.loaded_requests.searched)} == {id(made.queues.holding)}


@either
def test_vllm_has_its_own_queues_again(holding_name: str) -> None:
    made = Made(holding_name)
    own = made.scheduler.own
    replaced = {name for name, queue in own.items() if getattr(made.scheduler, name) is not queue}
    assert replaced == {"waiting", holding_name}
    made.queues.give_back()
    assert all(getattr(made.scheduler, name) is queue for name, queue in own.items())
