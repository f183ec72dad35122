"""Requests that are being loaded back: they hold blocks, and their places among the running requests are reserved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from vllm.v1.request import RequestStatus

from kvpolicy.load_growth import LoadGrowth
from kvpolicy_vllm.plugin.block_tables import BlockTables

MAX_IDLE_STEPS = 4
"""Steps in which nothing is computed and nobody runs or is being loaded, before one of those that were loaded gives
its blocks back."""


class LoadedRequests:
    """Requests that are being loaded, or were loaded and are not running yet. One per scheduler.

    A victim that is being loaded is not among the running requests. Where ``max_num_seqs`` binds, vLLM would give its
    place to a new request, and the victim would wait, holding its blocks, until a request ends. While loads are under
    way the scheduler therefore sees a lower limit. ``tables``: None where one block table holds every token's block.
    """

    def __init__(self, scheduler: Any, tables: BlockTables | None = None) -> None:
        self._scheduler = scheduler
        # vLLM 0.31 and later have a separate limit for admissions.
        self._limit = "max_num_active_reqs" if hasattr(scheduler, "max_num_active_reqs") else "max_num_running_reqs"
        self.requests: dict[str, Any] = {}
        self.configured: int | None = None
        """The configured limit while the scheduler sees a lower one; None otherwise."""
        self.growth = LoadGrowth(int(scheduler.block_size) if tables is None else tables.growth_tokens(scheduler))
        self._began: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Number of steps at which each load under way began."""
        self._idle_steps = 0
        self._passed_over: set[str] = set()
        """Requests that vLLM has been offered in this step, admitted or passed over, as for want of a LoRA slot."""

    def load_begins(self, request: Any) -> None:
        """Called while the scheduler admits: the request has its blocks and waits for their content."""
        self.requests[request.request_id] = request
        self._began[request] = self.growth.steps
        self._lower(1)

    def load_ended(self, request: Any) -> None:
        """Called while the scheduler admits: the request's load has succeeded."""
        began = self._began.pop(request, None)
        if began is not None:
            self.growth.ended(began)

    def hold_places(self) -> None:
        """Reserve a place for every request that is still being loaded, before the scheduler runs. Need not be called
        where ``requests`` is empty.

        A request that is ready needs no reservation: vLLM admits it first, and it takes the place itself. But where no
        slot is free for its LoRA adapter, vLLM passes it over and goes on to new requests.
        """
        self._free_failed()
        self.requests = {name: request for name, request in self.requests.items() if _holds_blocks(request)}
        self._passed_over.clear()
        taken_slots = self.full_adapters() if self.requests else None
        self._lower(
            sum(
                not self._is_ready(returning) or lacks_slot(returning, taken_slots)
                for returning in self.requests.values()
            )
        )

    def _free_failed(self) -> None:
        """Free the blocks of loads that have failed. vLLM does so when it visits the request for admission. Where no
        request runs and one before it lacks these very blocks, it never does."""
        scheduler = self._scheduler
        for name in scheduler.failed_recving_kv_req_ids & scheduler.finished_recving_kv_req_ids & self.requests.keys():
            if self.requests[name].num_computed_tokens == 0:
                scheduler.discard_load(self.requests[name])

    def settle(self, scheduled_tokens: int) -> None:
        """The scheduler ran, and this many tokens are computed. Need not be called where ``requests`` is empty.

        Where several were loaded, all of memory is theirs, and the first one lacks a block, vLLM goes on to none of the
        others, which could run: with nobody running it would stay so. The last one then gives its blocks back.
        """
        holders = [request for request in self.requests.values() if _holds_blocks(request)]
        waits = not (scheduled_tokens or self._scheduler.running) and all(map(self._is_ready, holders))
        if not waits or len(holders) < 2:
            self._idle_steps = 0
            return
        self._idle_steps += 1
        if self._idle_steps > MAX_IDLE_STEPS:
            self._idle_steps = 0
            others = [request for request in holders if request is not self._first(holders)]
            self._scheduler.give_up_loaded(others[-1])

    def keep_places(self, count: int) -> None:
        """Reserve places for running requests that sit this step out, before the scheduler runs."""
        self._lower(count)

    def give_places(self) -> None:
        """Restore the configured limit after the scheduler ran. Must not be called where ``configured`` is None."""
        setattr(self._scheduler, self._limit, self.configured)
        self.configured = None

    def places_held(self) -> int:
        """Places of the batch that requests still being loaded have, before the scheduler runs."""
        return sum(_holds_blocks(request) and not self._is_ready(request) for request in self.requests.values())

    def in_front(self, queue: Any) -> FrontOf | None:
        """``queue``, which holds the requests, with the one to admit first at its front; None where none is ready."""
        ready = [
            request
            for name, request in self.requests.items()
            if name not in self._passed_over and self._is_ready(request)
        ]
        if not ready:
            return None
        return FrontOf(queue, self._first(ready), self._passed_over)

    def _first(self, ready: Sequence[Any]) -> Any:
        """By priority where that is the policy, as in vLLM's own queues; else in the order in which loads began."""
        if self._scheduler.ordering is not None:
            return self._scheduler.ordering.queues.first_of(ready)
        return min(ready) if self._scheduler.policy.value == "priority" else ready[0]

    def full_adapters(self) -> frozenset[int] | None:
        """Adapters of the running requests where they take all LoRA slots; None where a slot is free."""
        config = getattr(self._scheduler, "lora_config", None)
        if config is None:
            return None
        used = frozenset(
            request.lora_request.lora_int_id for request in self._scheduler.running if request.lora_request
        )
        return used if len(used) >= config.max_loras else None

    def _is_ready(self, request: Any) -> bool:
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            # vLLM frees the blocks of a failed load only when it visits the request for admission.
            return request.request_id in self._scheduler.finished_recving_kv_req_ids
        return _holds_blocks(request)

    def _lower(self, places: int) -> None:
        if places:
            present = getattr(self._scheduler, self._limit)
            self.configured = present if self.configured is None else self.configured
            limit = present - places
            # Not below the number of running requests: vLLM asserts that, and 0.24 compares by equality.
            setattr(self._scheduler, self._limit, max(limit, len(self._scheduler.running)))


def _holds_blocks(request: Any) -> bool:
    if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        return True
    # A new request that was loaded with what others left waits as it did before, with blocks.
    waits = request.status in (RequestStatus.PREEMPTED, RequestStatus.WAITING)
    return bool(waits and request.num_computed_tokens > 0)


def lacks_slot(request: Any, taken_slots: frozenset[int] | None) -> bool:
    """Whether no LoRA slot is free for the request. ``taken_slots``: see :meth:`LoadedRequests.full_adapters`."""
    return (
        taken_slots is not None and bool(request.lora_request) and request.lora_request.lora_int_id not in taken_slots
    )


@dataclass(frozen=True, slots=True)
class FrontOf:
    """View of a queue with ``request``, one of its elements, in front; has the methods that vLLM's scan needs."""

    queue: Any
    request: Any
    seen: set[str]
    """The request's id is added when it is popped: it must not be offered again, admitted or passed over."""

    def peek_request(self) -> Any:
        return self.request

    def pop_request(self) -> Any:
        self.seen.add(self.request.request_id)
        self.queue.remove_request(self.request)
        return self.request
