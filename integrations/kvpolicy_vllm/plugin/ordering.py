"""The order of service in vLLM: queues by rank, the running list sorted by rank, and room made before a step.

Only for orders other than vLLM's own. vLLM is left at its first-come-first-served policy, under which the last of the
running requests loses its blocks, and is given queues of its own public interface.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from kvpolicy.order import (
    Choice,
    Holding,
    Lookout,
    Order,
    Progress,
    Ranks,
    Space,
    Taken,
    View,
    decodes_first,
    make_room,
)
from kvpolicy.request_marks import Marks
from kvpolicy_vllm.plugin.admission import Admission
from kvpolicy_vllm.plugin.block_tables import BlockTables
from kvpolicy_vllm.plugin.loaded_requests import lacks_slot
from kvpolicy_vllm.plugin.ranked_queues import RankedQueues
from kvpolicy_vllm.plugin.table_admission import TableAdmission

ENDED_BY_ITSELF = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
READY = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
Answer = TypeVar("Answer")
MAX_MOVED = 8
"""More requests than that are put in order by sorting all."""


def by_arrival(request: Any) -> tuple[float, str]:
    """Sorts requests as they came."""
    return request.arrival_time, request.request_id


class Ordering:
    """Ranks, queues and displacement of one scheduler. Satisfies :class:`kvpolicy.order.Engine`.

    ``price``: see :attr:`kvpolicy.order.View.price`; of a running request. ``complain`` is called with what failed,
    while the exception is handled. ``marks`` gives what a request is allowed to be. ``tables``: None where one block
    table holds every token's block.
    """

    def __init__(
        self,
        order: Order,
        scheduler: Any,
        clock: Callable[[], float],
        price: Callable[[Any], float | None],
        complain: Callable[[str], None],
        marks: Callable[[Any], Marks] = lambda request: Marks(priority=request.priority),
        tables: BlockTables | None = None,
    ) -> None:
        self.order = order
        self._marks = marks
        self._complain = complain
        self._gates = order.gates
        self._holds = order.holds
        self.ranks: Ranks[Any] = Ranks(order, self._progress_of, self._most_tokens(scheduler), self._output_tokens_of)
        self.on_choice: Callable[[Choice, Callable[[int], str]], None] = lambda choice, id_of: None
        """Takes every choice of victims, before they are displaced, with the ids of requests by their numbers."""
        self.records_choices: Callable[[], bool] = lambda: False
        """Whether ``on_choice`` is to be called: the candidates of a choice are priced only for it."""
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
        self._admission = Admission(scheduler) if tables is None else TableAdmission(scheduler)
        self._block_size = int(scheduler.block_size) if tables is None else min(tables.block_sizes)
        self._holding_back = Holding(order)
        self._held: list[Any] = []
        """Running requests that sit this step out."""
        self._by_phase = False
        """Whether those that decode stand before prompts in this step."""
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
        self.queues = RankedQueues(scheduler, self.ranks.key, self._arrived, self._admits, self._is_gated)

    @staticmethod
    def _most_tokens(scheduler: Any) -> int:
        """Most output tokens of one request in one step."""
        return 1 + int(getattr(scheduler, "num_spec_tokens", 0) or 0)

    def view(self) -> View:
        scheduler = self._scheduler
        device_blocks = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
        return View(
            self._now_s, self._block_size, device_blocks, self.ranks.state, self._price_of, len(self.ranks),
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
        self._arrival_of[session] = self.arrived_at(session)
        self.ranks.next_turn(session, self._step, self.view())
        self.queues.renew([session])
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

    def take_over(self, running: Sequence[Any], queued: Mapping[str, Sequence[Any]]) -> None:
        """Rank requests that came before this order: those that run, and those that waited, by the attribute of the
        scheduler's queue. Between two steps."""
        scheduler, before = self._scheduler, self.arrived_at
        offset_s = self._clock() - time.time()
        self.arrived_at = lambda request: min(self._clock(), request.arrival_time + offset_s)
        try:
            for request in sorted(running, key=by_arrival):
                self._arrived(request)
                self.ranks.admitted(request, self._step, self.view())
            for name, requests in queued.items():
                for request in sorted(requests, key=by_arrival):
                    getattr(scheduler, name).add_request(request)
        finally:
            self.arrived_at = before
        scheduler.running.sort(key=self.ranks.key)

    # ---- around a step ----

    def step_begins(self, throttled: bool = False) -> list[Any]:
        """Renew the ranks that may have changed; return the running requests to displace, none where the engine is
        paused, or computes no prompts in this step. ``throttled``: see :meth:`Admission.defers_prefills`."""
        scheduler = self._scheduler
        self._step += 1
        self._now_s = self._clock()
        self._admission.step_begins()
        if len(self.ranks) > len(self._scheduler.requests):  # some were aborted
            self.forget_ended()
        if self.ranks.next_step <= self._step or self.ranks.next_s <= self._now_s:
            self._renew()
        if scheduler.pause_state != PauseState.UNPAUSED or not self._looks():
            return []
        if self._admission.defers_prefills(throttled):
            return []
        self.lookout.begins()
        taken = self._guarded(
            "make_room",
            Taken(missed=True),
            lambda: make_room(self.order, self, self.view(), records=self.records_choices()),
        )
        self.lookout.looked(taken, self._step)
        if taken.victims:
            self.count("displaced", len(taken.victims))
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
        held = self._guarded("hold", set[int](), self._chosen_to_sit_out)
        self._held = [self._by_number[number] for number in held]
        for request in self._held:
            scheduler.running.remove(request)
        return self._held

    def _chosen_to_sit_out(self) -> set[int]:
        """Numbers of the running requests that sit this step out."""
        running = self._scheduler.running
        # vLLM counts the adapters of those that it schedules: another one might take the slot meanwhile.
        exempt = {self._number_of[request] for request in running if request.lora_request}
        return self._holding_back.held([*map(self.ranks.progress, running)], self.view(), exempt)

    def put_decodes_first(self) -> None:
        """Let those that decode have the step's tokens before prompts, where nobody is preempted for that."""
        scheduler = self._scheduler
        prefills = scheduler._inflight_prefills
        if not prefills:
            return
        admission, budget = self._admission, scheduler.max_num_scheduled_tokens
        anew = self._guarded(
            "decodes_first",
            None,
            lambda: decodes_first(scheduler.running, prefills, admission.fits, budget, admission.min_chunk_tokens),
        )
        if anew is not None:
            scheduler.running[:] = anew
            self._by_phase = True

    def release(self) -> None:
        """Put the running list back in the order of service, with those that sat the step out."""
        if self._held or self._by_phase:
            running = self._scheduler.running
            running.extend(self._held)
            running.sort(key=self.ranks.key)
            self._held, self._by_phase = [], False

    def _renew(self) -> None:
        changed = self.ranks.due(self._step, self.view(), self.lookout.stopped_at)
        if changed is None:
            return
        if self.ranks.matters:
            self.lookout.happened()
        self.queues.renew(changed)
        if changed:
            self._sort_running(changed)

    def settle(self, output: Any) -> None:
        """Rank the requests that this step admitted."""
        admitted = [request.req_id for request in output.scheduled_new_reqs]
        admitted += output.scheduled_cached_reqs.resumed_req_ids
        self._admitting = output.num_scheduled_tokens
        requests = [self._scheduler.requests[name] for name in admitted]
        for request in requests:
            self.ranks.admitted(request, self._step, self.view())
        self._admitting = {}
        if self._let_in:
            self._count_missed()
        if requests:
            self._sort_running(requests)

    def _count_missed(self) -> None:
        """Displace nobody for some steps where somebody did not come in, for whatever reason of vLLM's: the next
        victims would be taken in vain, too."""
        missed = sum(request.status in READY for request in self._let_in)
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
        if begins:
            self._admission.step_begins()

    def _is_gated(self) -> bool:
        """Whether the order may refuse anybody now: only beside running requests, in a step."""
        return bool(self._gates and self._scheduling and self._scheduler.running)

    def _admits(self, request: Any) -> bool:
        def admitted() -> bool:
            progress = self.ranks.progress(request)
            return self.order.admits(progress, self.free_blocks() - self.need_blocks(progress), self.view())

        return self._guarded("admits", True, admitted)

    def _guarded(self, what: str, otherwise: Answer, ask: Callable[[], Answer]) -> Answer:
        """The answer, or ``otherwise`` where that fails: a server goes on without."""
        try:
            return ask()
        # The boundary between what an order asks for and a server: whatever fails here, requests are served.
        except Exception:  # noqa: BLE001
            self._complain(what)
            return otherwise

    def _looks(self) -> bool:
        """Whether to look for room in this step: somebody waits who goes before a running request."""
        running = self._scheduler.running
        if not (self.order.displaces_by_rank and running and self.lookout.is_due(self._step)):
            return False
        return self.queues.go_before(self.ranks.key(running[-1])[0])

    # ---- what making room asks ----

    def heads(self) -> Iterator[Progress]:
        worst = self.ranks.key(self._scheduler.running[-1])[0]
        adapters = self._scheduler.loaded_requests.full_adapters()
        for queue in self.queues:
            for request in queue:
                if not self._is_ready_itself(request):
                    if self.ranks.key(request)[0] < worst:
                        self.lookout.passed_over(request)
                    elif queue is self.queues.waiting:
                        break
                elif not lacks_slot(request, adapters):
                    yield self.ranks.progress(request)
                    self._admission.comes_in()  # or nobody would be asked for the next one

    def last_running(self) -> Iterator[Progress]:
        for request in reversed(self._scheduler.running):
            if self._may_lose(request):
                yield self.ranks.progress(request)

    def free_blocks(self) -> int:
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def held_blocks(self, running: Progress) -> int:
        return self._admission.held_blocks(self._by_number[running.number])

    def need_blocks(self, waiting: Progress) -> int:
        """Blocks that must be free for vLLM to admit it."""
        admission, request = self._admission, self._by_number[waiting.number]
        self._hit_ids = frozenset()
        if request.num_computed_tokens > 0:
            return admission.need_blocks_besides(request, admission.held_blocks(request))
        hits, local_tokens = admission.local_hits(request)
        self._hit_ids = admission.ids_of(hits)
        loads = self._scheduler.kvpolicy.loadable_tokens(request, local_tokens)
        return admission.need_blocks(request, hits, local_tokens, loads)

    def spare_blocks(self) -> int:
        return self._admission.watermark_blocks()

    def freed_blocks(self, running: Progress, waiting: Progress) -> int:
        return self._admission.freed_blocks(self._by_number[running.number], self._hit_ids)

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
        return not (self._admission.lacks_encoder_room(request) or self._waits_for_files(request))

    def _waits_for_files(self, request: Any) -> bool:
        """Whether its prompt is on its way from files to host memory, so that vLLM does not admit it."""
        prompts = self._scheduler.kvpolicy.prompts
        if prompts is None or prompts.files is None or request.num_computed_tokens > 0:
            return False
        return bool(prompts.waits_for_files(request, self._admission.local_hits(request)[1]))

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

    def _output_tokens_of(self, request: Any) -> int:
        tokens: int = request.num_output_tokens
        return tokens if self._admitting else tokens + request.num_output_placeholders

    def _progress_of(self, request: Any, rank: tuple[float, ...], admitted_at_tokens: int) -> Progress:
        output_tokens = self._output_tokens_of(request)
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
            hints=marks.hints,
        )
