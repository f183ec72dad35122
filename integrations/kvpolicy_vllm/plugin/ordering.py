"""The order of service in vLLM: queues by rank, the running list sorted by rank, and room made before a step.

Only for orders other than vLLM's own. vLLM is left at its first-come-first-served policy, under which the last of the
running requests loses its blocks, and is given queues of its own public interface.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import RequestStatus

from kvpolicy.order import (
    Choice,
    Holding,
    Lookout,
    Order,
    OrderedQueue,
    Progress,
    Ranks,
    Space,
    Taken,
    View,
    make_room,
)  # fmt: skip
from kvpolicy.request_marks import Marks
from kvpolicy_vllm.plugin.admission import Admission
from kvpolicy_vllm.plugin.loaded_requests import lacks_slot

ENDED_BY_ITSELF = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
READY = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
MAX_MOVED = 8
"""More requests than that are put in order by sorting all."""


class RankedQueue(RequestQueue):
    """Waiting requests by rank. ``admits``: asked for the first one whether it may be admitted now.

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


class Ordering:
    """Ranks, queues and displacement of one scheduler. Satisfies :class:`kvpolicy.order.Engine`.

    ``price``: see :attr:`kvpolicy.order.View.price`; of a running request. ``complain`` is called with what failed,
    while the exception is handled. ``marks`` gives what a request is allowed to be.
    """

    def __init__(
        self,
        order: Order,
        scheduler: Any,
        clock: Callable[[], float],
        price: Callable[[Any], float | None],
        complain: Callable[[str], None],
        marks: Callable[[Any], Marks] = lambda request: Marks(priority=request.priority),
    ) -> None:
        self.order = order
        self._marks = marks
        self._complain = complain
        self._gates = order.gates
        self._holds = order.holds
        self.ranks: Ranks[Any] = Ranks(order, self._progress_of, self._most_tokens(scheduler))
        self.displaced = 0
        """Requests displaced so far."""
        self.missed = 0
        """Requests for which others were displaced and which did not come in."""
        self.on_choice: Callable[[Choice, Callable[[int], str]], None] | None = None
        """Takes every choice of victims, before they are displaced, with the ids of requests by their numbers; None
        where choices are not recorded."""
        self.count: Callable[[str, float], None] = lambda name, amount: None
        """Adds to a counter of the engine's metrics."""
        self.arrived_at: Callable[[Any], float] = lambda request: clock()
        """When a request arrived, by the controller's clock."""
        self._scheduler = scheduler
        self._clock = clock
        self._price = price
        self._step = 0
        self._now_s = clock()
        self.lookout: Lookout[Any] = Lookout(self._is_ready_itself)
        self._hit_ids: frozenset[int] = frozenset()
        """Blocks in the prefix cache of the request whose need was asked for last."""
        self._admission = Admission(scheduler)
        self._holding_back = Holding(order)
        self._held: list[Any] = []
        """Running requests that sit this step out."""
        self._let_in: list[Any] = []
        """Requests for which others were displaced in this step."""
        self._numbers = count()
        self._number_of: dict[Any, int] = {}
        self._by_number: dict[int, Any] = {}
        self._arrival_of: dict[Any, float] = {}
        self._marks_of: dict[Any, Marks] = {}
        self._scheduling = False
        self._admitting: Mapping[str, int] = {}
        """Tokens that the step which is being settled computes: what it brings to those it admitted does not count yet.
        """
        self._waiting: OrderedQueue[Any] = OrderedQueue(self.ranks.key)
        self._holding: OrderedQueue[Any] = OrderedQueue(self.ranks.key)
        # From vLLM 0.31 on requests that hold blocks have a queue of their own. Before, those that were passed over are
        # in it, too.
        holding = "kv_holding_waiting" if hasattr(scheduler, "kv_holding_waiting") else "skipped_waiting"
        self._replaced = {name: getattr(scheduler, name) for name in ("waiting", holding)}
        """vLLM's own queues."""
        if holding == "kv_holding_waiting":
            scheduler.waiting = RankedQueue(self._waiting, self._arrived, self._admits)
            scheduler.kv_holding_waiting = RankedQueue(self._holding, self._arrived, lambda request: True)
        else:
            scheduler.waiting = RankedQueue(self._waiting, self._arrived, self._admits_of_both)
            scheduler.skipped_waiting = RankedQueue(self._holding, self._arrived, self._admits_of_both)

    def give_back_queues(self) -> None:
        """Another order serves from now on. Nobody may wait."""
        for name, queue in self._replaced.items():
            setattr(self._scheduler, name, queue)

    @staticmethod
    def _most_tokens(scheduler: Any) -> int:
        """Most output tokens of one request in one step."""
        return 1 + int(getattr(scheduler, "num_spec_tokens", 0) or 0)

    def view(self) -> View:
        scheduler = self._scheduler
        device_blocks = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
        return View(
            self._now_s, scheduler.block_size, device_blocks, self.ranks.state, self._price_of, len(self.ranks),
            self._served_s_of,
        )  # fmt: skip

    # ---- what happens to requests ----

    def _arrived(self, request: Any) -> None:
        if request in self._number_of:
            return
        number = self._number_of[request] = next(self._numbers)
        self._by_number[number] = request
        self._arrival_of[request] = self.arrived_at(request)
        self._marks_of[request] = self._marks(request)
        self._now_s = self._clock()
        self.ranks.arrived(request, self._step, self.view())
        self.lookout.happened()

    def preempted(self, request: Any) -> None:
        """The request is about to be preempted, and then to be queued."""
        self.ranks.preempted(request, self._step, self.view())
        self.lookout.happened()

    def next_turn(self, session: Any) -> None:
        """Streaming input has come for a request that ran: it waits from now on, and its counts begin anew."""
        self._now_s = self._clock()
        self.ranks.preempted(session, self._step, self.view())
        self._requeue([session])
        self.lookout.happened()

    def forget_ended(self, step: Iterable[str] = ()) -> None:
        """Forget the requests that have ended, in the order of the step that ended them: an order learns from one after
        the other."""
        requests = self._scheduler.requests
        ended = [request for request in self._number_of if requests.get(request.request_id) is not request]
        places = {name: place for place, name in enumerate(step)}
        for request in sorted(ended, key=lambda request: places.get(request.request_id, len(places))):
            self.ranks.removed(request, by_itself=request.status in ENDED_BY_ITSELF)
            del self._by_number[self._number_of.pop(request)]
            del self._arrival_of[request]
            del self._marks_of[request]
            self.lookout.happened()

    # ---- around a step ----

    def step_begins(self, throttled: bool = False) -> list[Any]:
        """Renew the ranks that may have changed; return the running requests to displace, none where the engine is
        paused, or computes no prompts in this step. ``throttled``: see :meth:`Admission.defers_prefills`."""
        scheduler = self._scheduler
        self._step += 1
        self._now_s = self._clock()
        if len(self.ranks) > len(self._scheduler.requests):  # some were aborted
            self.forget_ended()
        if self.ranks.next_step <= self._step or self.ranks.next_s <= self._now_s:
            self._renew()
        if scheduler.pause_state != PauseState.UNPAUSED or not self._looks():
            return []
        if self._admission.defers_prefills(throttled):
            return []
        self.lookout.begins()
        try:
            taken = make_room(self.order, self, self.view(), records=self.on_choice is not None)
        # The boundary between an order and a server: nobody is displaced in this step, then.
        except Exception:  # noqa: BLE001
            self._complain("make_room")
            taken = Taken(missed=True)
        self.lookout.looked(taken, self._step)
        if taken.victims:
            self.displaced += len(taken.victims)
            self.count("displaced", len(taken.victims))
        if self.on_choice is not None:
            for choice in taken.choices:
                self.on_choice(choice, self._id_of)
        self._let_in = [self._by_number[waiting.number] for waiting in taken.let_in]
        return [self._by_number[victim.number] for victim in taken.victims]

    def _id_of(self, number: int) -> str:
        return str(self._by_number[number].request_id)

    def hold(self) -> list[Any]:
        """Take the requests that sit this step out off the running list; they keep their blocks."""
        scheduler = self._scheduler
        if not self._holds or scheduler.pause_state != PauseState.UNPAUSED:
            return []
        try:
            held = self._holding_back.held([*map(self.ranks.progress, scheduler.running)], self.view())
        # The boundary between an order and a server: nobody is held in this step, then.
        except Exception:  # noqa: BLE001
            self._complain("hold")
            return []
        # vLLM counts the adapters of those that it schedules: another one might take the slot meanwhile.
        self._held = [one for one in map(self._by_number.__getitem__, held) if not one.lora_request]
        for request in self._held:
            scheduler.running.remove(request)
        return self._held

    def release(self) -> None:
        """Put those that sat the step out back on the running list."""
        self._scheduler.running.extend(self._held)
        self._held = []

    def _renew(self) -> None:
        changed = self.ranks.due(self._step, self.view())
        if changed is None:
            return
        self.lookout.happened()
        self._requeue(changed)
        if changed:
            self._sort_running(changed)

    def _requeue(self, changed: Iterable[Any]) -> None:
        """Put waiting requests where their present ranks belong."""
        for request in changed:
            for queue in (self._waiting, self._holding):
                if request in queue:
                    queue.append(request)

    def settle(self, output: Any, held: Sequence[Any] = ()) -> None:
        """Rank the requests that this step admitted, and put those that it ``held`` back where they were."""
        admitted = [request.req_id for request in output.scheduled_new_reqs]
        admitted += output.scheduled_cached_reqs.resumed_req_ids
        self._admitting = output.num_scheduled_tokens
        requests = [self._scheduler.requests[name] for name in admitted]
        for request in requests:
            self.ranks.admitted(request, self._step, self.view())
        self._admitting = {}
        if self._let_in:
            self._count_missed()
        if requests or held:
            self._sort_running([*requests, *held])

    def _count_missed(self) -> None:
        """Displace nobody for some steps where somebody did not come in, for whatever reason of vLLM's: the next
        victims would be taken in vain, too."""
        missed = sum(request.status in READY for request in self._let_in)
        self.missed += missed
        if missed:
            self.count("displaced_in_vain", missed)
        self._let_in = []
        self.lookout.came_in(not missed, self._step)

    def _sort_running(self, changed: Sequence[Any]) -> None:
        """Put the running requests among ``changed`` where their present ranks belong; the others are in order."""
        running, key = self._scheduler.running, self.ranks.key
        if len(changed) > MAX_MOVED:
            running.sort(key=key)
            return
        moved = [request for request in changed if request.status == RequestStatus.RUNNING and request in running]
        for request in moved:
            running.remove(request)
        for request in moved:
            insort(running, request, key=key)

    def scheduling(self, begins: bool) -> None:
        """vLLM begins, or has ended, to schedule a step: only meanwhile does a queue hide whom the order does not
        admit."""
        self._scheduling = begins

    def _admits(self, request: Any) -> bool:
        if not (self._gates and self._scheduling and self._scheduler.running):
            return True
        try:
            progress = self.ranks.progress(request)
            free = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            return self.order.admits(progress, free - self.need_blocks(progress), self.view())
        # The boundary between an order and a server: whoever fits is admitted, then.
        except Exception:  # noqa: BLE001
            self._complain("admits")
            return True

    def _admits_of_both(self, request: Any) -> bool:
        """Whether whoever goes first in both queues may be admitted now. One that holds blocks always may; vLLM is
        offered those that were loaded before all others."""
        if not (self._gates and self._scheduling and self._scheduler.running):
            return True
        if self._scheduler.loaded_requests.in_front(self._holding) is not None:
            return True
        first = self.first_of(queue.first() for queue in (self._holding, self._waiting) if len(queue))
        holds_blocks = first.status == RequestStatus.WAITING_FOR_REMOTE_KVS or first.num_computed_tokens > 0
        return holds_blocks or self._admits(first)

    def _looks(self) -> bool:
        """Whether to look for room in this step: somebody waits who goes before a running request."""
        running = self._scheduler.running
        if not (self.order.displaces_by_rank and running and self.lookout.is_due(self._step)):
            return False
        worst = self.ranks.key(running[-1])[0]
        return any(len(queue) and self.ranks.key(queue.first())[0] < worst for queue in (self._holding, self._waiting))

    def first_queue(self, *queues: RankedQueue) -> RankedQueue | None:
        """Of the queues that are not empty the one whose first request goes first; None where all are empty.

        vLLM has just been told that one of them is not. An order that now answers otherwise is not heeded.
        """
        full = [queue for queue in queues if queue] or [queue for queue in queues if len(queue)]
        return min(full, key=lambda queue: self.ranks.key(queue.peek_request()), default=None)

    def first_of(self, requests: Iterable[Any]) -> Any:
        """The first of some requests in the order of service."""
        return min(requests, key=self.ranks.key)

    # ---- what making room asks ----

    def heads(self) -> Iterator[Progress]:
        worst = self.ranks.key(self._scheduler.running[-1])[0]
        adapters = self._scheduler.loaded_requests.full_adapters()
        for queue in (self._holding, self._waiting):
            for request in queue:
                if not self._is_ready_itself(request):
                    if self.ranks.key(request)[0] < worst:
                        self.lookout.passed_over(request)
                    elif queue is self._waiting:
                        break
                elif not lacks_slot(request, adapters):
                    yield self.ranks.progress(request)

    def last_running(self) -> Iterator[Progress]:
        for request in reversed(self._scheduler.running):
            if self._may_lose(request):
                yield self.ranks.progress(request)

    def free_blocks(self) -> int:
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def held_blocks(self, running: Progress) -> int:
        request = self._by_number[running.number]
        return len(self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[0])

    def need_blocks(self, waiting: Progress) -> int:
        """Blocks that must be free for vLLM to admit it."""
        scheduler, request = self._scheduler, self._by_number[waiting.number]
        self._hit_ids = frozenset()
        if request.num_computed_tokens > 0:
            held = len(scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[0])
            return self._admission.need_blocks_besides(request, held)
        hits, local_tokens = self._local_hits(request)
        self._hit_ids = frozenset(block.block_id for block in hits)
        loads = scheduler.kvpolicy.loadable_tokens(request, local_tokens)
        return self._admission.need_blocks(request, hits, local_tokens, loads)

    def freed_blocks(self, running: Progress, waiting: Progress) -> int:
        request = self._by_number[running.number]
        blocks = self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[0]
        return sum(block.ref_cnt == 1 and block.block_id not in self._hit_ids for block in blocks)

    def _local_hits(self, request: Any) -> tuple[Any, int]:
        """Blocks and tokens of the request that are in the prefix cache. Without the statistics that vLLM counts when
        it asks itself."""
        manager = self._scheduler.kv_cache_manager
        if not manager.enable_caching or request.skip_reading_prefix_cache:
            return (), 0
        blocks, tokens = manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[:2]
        return blocks[0], tokens

    def space(self) -> Space:
        return self._admission.space()

    def _is_ready_itself(self, request: Any) -> bool:
        """Whether the request could be admitted in this step, memory, places and what others hold apart."""
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return bool(request.request_id in self._scheduler.finished_recving_kv_req_ids)
        if request.status not in READY:
            return False
        if getattr(request, "num_stale_output_tokens", 0) and not getattr(request, "drop_stale_output", False):
            return False
        return not self._admission.lacks_encoder_room(request)

    def _may_lose(self, request: Any) -> bool:
        """Whether a running request may be displaced. One whose last token is in flight ends by itself."""
        if self._admission.is_ending(request):
            return False
        freed = getattr(self._scheduler, "_request_blocks_can_be_freed", None)
        return freed is None or bool(freed(request))

    def _served_s_of(self, request: Progress) -> float:
        return self._now_s - self.ranks.admitted_s(self._by_number[request.number])

    def _price_of(self, request: Progress) -> float | None:
        return self._price(self._by_number[request.number])

    def _progress_of(self, request: Any, rank: tuple[float, ...], admitted_at_tokens: int) -> Progress:
        output_tokens = request.num_output_tokens + (0 if self._admitting else request.num_output_placeholders)
        marks = self._marks_of[request]
        return Progress(
            self._number_of[request],
            self._arrival_of[request],
            marks.priority,
            request.num_prompt_tokens,
            output_tokens,
            request.max_tokens,
            request.num_computed_tokens - self._admitting.get(request.request_id, 0),
            output_tokens - admitted_at_tokens,
            request.num_preemptions,
            rank,
            marks.ttft_s,
            marks.tpot_s,
            marks.class_name,
        )
