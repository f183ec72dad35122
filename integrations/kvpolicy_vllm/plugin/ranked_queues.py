"""vLLM's queues of waiting requests, by rank: they stand in for its own ones through its public class.

Which queues there are differs between versions of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import RequestStatus

from kvpolicy.order import OrderedQueue
from kvpolicy.order.ranks import Key


class RankedQueue(RequestQueue):
    """Waiting requests by rank. ``admits``: says of the first one whether it may be admitted now.

    vLLM asks whether the queue is empty before it looks at the first request: so where that one is not admitted the
    queue says that it is, as long as vLLM schedules.
    """

    def __init__(self, queue: OrderedQueue[Any], arrived: Callable[[Any], None], admits: Callable[[Any], bool]) -> None:
        self.queue = queue
        self._arrived, self._admits = arrived, admits

    def add_request(self, request: Any) -> None:
        self._arrived(request)
        self.queue.append(request)

    def prepend_request(self, request: Any) -> None:
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Any:
        return self.queue.first()

    def pop_request(self) -> Any:
        return self.queue.pop()

    def remove_request(self, request: Any) -> None:
        self.queue.remove(request)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            if request in self.queue:
                self.queue.remove(request)

    def __bool__(self) -> bool:
        return len(self.queue) > 0 and self._admits(self.queue.first())

    def __len__(self) -> int:
        return len(self.queue)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.queue)


class RankedQueues:
    """The queue of those that wait, and that of those that hold blocks, in one scheduler.

    ``key`` sorts requests; ``arrived`` is called with every request that is queued; ``admits`` says whether one without
    blocks may be admitted now, and ``gated`` whether anybody may be refused now.
    """

    def __init__(
        self,
        scheduler: Any,
        key: Callable[[Any], Key],
        arrived: Callable[[Any], None],
        admits: Callable[[Any], bool],
        gated: Callable[[], bool],
    ) -> None:
        self._scheduler, self._key = scheduler, key
        self._admits, self._gated = admits, gated
        self.waiting: OrderedQueue[Any] = OrderedQueue(key)
        self.holding: OrderedQueue[Any] = OrderedQueue(key)
        # From vLLM 0.31 on requests that hold blocks have a queue of their own. Before, those that were passed over are
        # in it, too.
        apart = hasattr(scheduler, "kv_holding_waiting")
        holding_name = "kv_holding_waiting" if apart else "skipped_waiting"
        self._replaced = {name: getattr(scheduler, name) for name in ("waiting", holding_name)}
        """vLLM's own queues."""
        gate = self._first_may_come if apart else self._first_of_both_may_come
        scheduler.waiting = RankedQueue(self.waiting, arrived, gate)
        holding_gate = (lambda request: True) if apart else gate
        setattr(scheduler, holding_name, RankedQueue(self.holding, arrived, holding_gate))

    def __iter__(self) -> Iterator[OrderedQueue[Any]]:
        return iter((self.holding, self.waiting))

    def give_back(self) -> dict[str, list[Any]]:
        """Let vLLM have its own queues again, which are empty; return who waited in which."""
        waited = {name: list(getattr(self._scheduler, name)) for name in self._replaced}
        for name, queue in self._replaced.items():
            setattr(self._scheduler, name, queue)
        return waited

    def taken_from_vllm(self) -> dict[str, list[Any]]:
        """Those who waited in vLLM's own queues, which are empty from now on."""
        waited = {name: list(queue) for name, queue in self._replaced.items()}
        for name, queue in self._replaced.items():
            queue.remove_requests(waited[name])
        return waited

    def renew(self, changed: Sequence[Any]) -> None:
        """Put those of the requests that wait where their present keys belong."""
        for queue in self:
            queue.renew(changed)

    def go_before(self, rank: tuple[float, ...]) -> bool:
        """Whether anybody waits who has a lower rank."""
        return any(len(queue) and self._key(queue.first())[0] < rank for queue in self)

    def first_queue(self, *queues: RankedQueue) -> RankedQueue | None:
        """Of the queues that are not empty the one whose first request goes first; None where all are empty.

        vLLM has just been told that one of them is not. An order that now answers otherwise is not heeded.
        """
        full = [queue for queue in queues if queue] or [queue for queue in queues if len(queue)]
        return min(full, key=lambda queue: self._key(queue.peek_request()), default=None)

    def first_of(self, requests: Iterable[Any]) -> Any:
        """The first of some requests in the order of service."""
        return min(requests, key=self._key)

    def _first_may_come(self, request: Any) -> bool:
        return not self._gated() or self._admits(request)

    def _first_of_both_may_come(self, request: Any) -> bool:
        """Whether whoever goes first in both queues may be admitted now. One that holds blocks always may; vLLM is
        offered those that were loaded before all others."""
        if not self._gated() or self._scheduler.loaded_requests.in_front(self.holding) is not None:
            return True
        first = self.first_of(queue.first() for queue in self if len(queue))
        holds_blocks = first.status == RequestStatus.WAITING_FOR_REMOTE_KVS or first.num_computed_tokens > 0
        return holds_blocks or self._admits(first)
