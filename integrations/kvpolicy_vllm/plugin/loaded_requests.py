"""Requests on their way back by a load: they hold blocks, and their places among the running are kept for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.request import RequestStatus


class Returning:
    """Who is being loaded, or was loaded and is not running yet. One per scheduler.

    A victim that is being loaded is not among the running, so vLLM would give its place to a newcomer where
    ``max_num_seqs`` binds; the victim then waits, holding its blocks, until somebody ends. While loads are under way
    the scheduler is therefore shown a lower limit.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        # vLLM 0.31 and later have a limit of its own for admissions.
        self._limit = "max_num_active_reqs" if hasattr(scheduler, "max_num_active_reqs") else "max_num_running_reqs"
        self.requests: dict[str, Any] = {}
        self.configured: int | None = None
        """The limit as it was configured, while the scheduler is shown a lower one."""
        self._passed_over: set[str] = set()
        """Whom vLLM has seen in this step and could not admit, for want of a LoRA slot for one."""

    def load_begins(self, request: Any) -> None:
        """Called while the scheduler admits: the request has its blocks and waits for their content."""
        self.requests[request.request_id] = request
        self._lower(1)

    def hold_places(self) -> None:
        """Before the scheduler runs: a place is held for everybody who is still being loaded. Nothing to do where
        ``requests`` is empty.

        For whoever is ready no place is held: vLLM admits it first, and it takes the place itself; but where no slot
        is free for its LoRA adapter vLLM passes it over, and goes on to newcomers.
        """
        self.requests = {name: request for name, request in self.requests.items() if _holds_blocks(request)}
        self._passed_over.clear()
        full = self._full_adapters()
        self._lower(sum(not self._is_ready(one) or _lacks_slot(one, full) for one in self.requests.values()))

    def give_places(self) -> None:
        """After the scheduler ran: the limit is as configured. Nothing to do where ``configured`` is None."""
        setattr(self._scheduler, self._limit, self.configured)
        self.configured = None

    def in_front(self, queue: Any) -> FrontOf | None:
        """``queue``, which holds them, with the one to be admitted first at its front; None where nobody is ready."""
        ready = [
            request
            for name, request in self.requests.items()
            if name not in self._passed_over and self._is_ready(request)
        ]
        if not ready:
            return None
        # By rank where ranks decide, as vLLM's own queues; else in the order in which the loads were begun.
        first = min(ready) if self._scheduler.policy.value == "priority" else ready[0]
        return FrontOf(queue, first, self._passed_over)

    def _full_adapters(self) -> frozenset[int] | None:
        """The adapters of those who run, where there is no slot for another one; None where there is."""
        config = getattr(self._scheduler, "lora_config", None)
        if config is None or not self.requests:
            return None
        used = frozenset(one.lora_request.lora_int_id for one in self._scheduler.running if one.lora_request)
        return used if len(used) >= config.max_loras else None

    def _is_ready(self, request: Any) -> bool:
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            # Of a failed load vLLM takes the blocks back only when it comes by here.
            return request.request_id in self._scheduler.finished_recving_kv_req_ids
        return _holds_blocks(request)

    def _lower(self, places: int) -> None:
        if places:
            present = getattr(self._scheduler, self._limit)
            self.configured = present if self.configured is None else self.configured
            limit = present - places
            # Not below those who run: vLLM asserts that, and 0.24 compares by equality.
            setattr(self._scheduler, self._limit, max(limit, len(self._scheduler.running)))


def _holds_blocks(request: Any) -> bool:
    if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        return True
    return bool(request.status == RequestStatus.PREEMPTED and request.num_computed_tokens > 0)


def _lacks_slot(request: Any, full: frozenset[int] | None) -> bool:
    """``full``: the adapters that take all slots; None where one is free."""
    return full is not None and bool(request.lora_request) and request.lora_request.lora_int_id not in full


@dataclass(frozen=True, slots=True)
class FrontOf:
    """A queue as it would be with ``request``, which is in it, at its front; as far as vLLM's scan of it goes."""

    queue: Any
    request: Any
    seen: set[str]
    """Takes the request's name once it is popped: admitted or passed over, it is not to be offered again."""

    def peek_request(self) -> Any:
        return self.request

    def pop_request(self) -> Any:
        self.seen.add(self.request.request_id)
        self.queue.remove_request(self.request)
        return self.request
