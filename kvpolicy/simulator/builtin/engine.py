"""One run of the built-in simulator in virtual time."""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import pairwise
from math import inf
from operator import attrgetter

from kvpolicy.events import Cause
from kvpolicy.latency import NO_SLO, Slo
from kvpolicy.order import Choice, is_stock
from kvpolicy.simulator.base import NULL_BLOCK, DecisionObserver, load_of
from kvpolicy.simulator.builtin import costs
from kvpolicy.simulator.builtin.arrival_queue import ArrivalQueue, refuse_unservable
from kvpolicy.simulator.builtin.blocks import in_step_order, pool_for, shared_keys
from kvpolicy.simulator.builtin.fast_path import FastPath
from kvpolicy.simulator.builtin.live_request import CopyJob, LiveRequest, Status, Step
from kvpolicy.simulator.builtin.lower_tiers import FileReads, MakeCaching, host_pool
from kvpolicy.simulator.builtin.ordering import Ordering
from kvpolicy.simulator.builtin.preemption import Preemptions
from kvpolicy.simulator.builtin.room_needs import is_ready
from kvpolicy.simulator.builtin.scheduler import Scheduler, Victims
from kvpolicy.simulator.builtin.trace_writer import TraceWriter
from kvpolicy.simulator.link_queues import LinkQueues
from kvpolicy.simulator.sinks import Identity
from kvpolicy.simulator.summary import SummaryBuilder

COMPUTED = attrgetter("computed")


class Engine:
    """One run, step by step. ``identity``: all that it follows from; the others: see
    :class:`kvpolicy.simulator.Builtin`."""

    def __init__(
        self,
        identity: Identity,
        trace_writer: TraceWriter,
        victims: Victims,
        leap: bool,
        on_decision: DecisionObserver | None = None,
        load_share: float = 1.0,
        slo: Slo = NO_SLO,
        caching: MakeCaching | None = None,
    ) -> None:
        self.server = server = identity.server
        self.times = times = identity.times
        self.trace_writer = trace_writer
        self.tallied = SummaryBuilder(server, times, slo)
        self.now_s = 0.0
        self.arrivals = ArrivalQueue(identity.requests, partial(refuse_unservable, server))
        decided = Preemptions(server, identity.policy, identity.seed, trace_writer, self.tallied, on_decision)
        self.preemptions, pool = decided, pool_for(server.device_blocks, server.block_size, server.prefix_caching)
        self.copies, files = host_pool(server, decided.block_price, pool, lambda: self.now_s, caching)
        self.reads = FileReads(server, files, pool, self.copies)
        self.link: LinkQueues[CopyJob] = LinkQueues(server, times)
        stock = is_stock(server.order, server.scheduling)
        self.ordering = None if stock else Ordering(server.order, server, self._price, self._is_ready)
        """None where vLLM's own order serves."""
        if self.ordering is not None and trace_writer.enabled:
            self.ordering.on_choice = partial(self._note_choice, self.ordering, server.order.label)
        self.scheduler = Scheduler(
            server, pool, self.copies, victims, self._preempting, self._admitted, self.ordering, self.reads.delays
        )
        worth = partial(decided.worth_storing, scheduler=self.scheduler, copies=self.copies)
        self.copies.store_only_where(worth_saving=partial(worth, saved=True), worth_keeping=worth)
        if files is not None:
            files.worth_writing, files.worth_saving = worth, partial(worth, saved=True)
        self.copies.loads = partial(decided.loads, scheduler=self.scheduler, copies=self.copies)
        self.copies.loads_hit = partial(decided.loads_hit, scheduler=self.scheduler, copies=self.copies)
        self.reads.worth = partial(decided.reads, scheduler=self.scheduler, copies=self.copies)
        self.copies.load_share = load_share
        self.present = 0
        """Requests that have arrived and not finished."""
        self.steps_in_flight: deque[Step] = deque()
        self.fast_path = FastPath(server, self.scheduler)
        self._leaps = leap
        self._asynchronous = server.asynchronous
        self._step = Step(-1)
        self._steps = 0
        self._device_free_s = 0.0

    def run(self) -> None:
        """Serve all requests."""
        while True:
            self.arrive()
            if self.present:
                if self._leaps and self.leap():
                    continue
                self.steps_in_flight.append(self.begin_step())
                if self._asynchronous and len(self.steps_in_flight) < 2:
                    continue
            elif not self.steps_in_flight:
                if self.arrivals.next_s is None:
                    self.preemptions.close()
                    return
                self.now_s = max(self.now_s, self.arrivals.next_s)
                continue
            self.end_step(self.steps_in_flight.popleft())

    # ---- arrivals ----

    def arrive(self) -> None:
        if self.reads.begin_at(self.now_s):
            self.scheduler.blocked = False
        next_s = self.arrivals.next_s
        if next_s is None or next_s > self.now_s:
            return
        if self.ordering is not None:
            self.ordering.step, self.ordering.now_s = self._steps, self.now_s
        for arrival_s, number, request in self.arrivals.until(self.now_s):
            keys = shared_keys(request, self.server.block_size) if self.server.prefix_caching else ()
            tally = self.tallied.tally_of(request.class_name)
            live = LiveRequest(number, request, arrival_s, keys, tally=tally)
            self.copies.asked(live)
            self.scheduler.arrive(live)
            self.present += 1

    # ---- a step begins ----

    def begin_step(self) -> Step:
        """Schedule a step at the current time and launch it."""
        step = self._step = Step(self._steps)
        self.preemptions.step_begins(self._steps, len(self.scheduler.running))
        self._steps += 1
        ordered_anew = self.ordering is not None and self._order_anew(self.ordering, step)
        if ordered_anew or not self._leaps or not self.fast_path.schedule(step, self.steps_in_flight):
            if not ordered_anew:
                self.fast_path.dissolve_batch(self.steps_in_flight)
            self.scheduler.schedule(step)
            self.fast_path.after_plain_step()
        self.compose(step)
        self.launch(step)
        return step

    def _order_anew(self, ordering: Ordering, step: Step) -> bool:
        """Renew the ranks that may have changed; return whether to schedule by the plain scheduler, which alone
        displaces requests."""
        ordering.step, ordering.now_s = step.number, self.now_s
        if not ordering.is_due and not ordering.looks(self.scheduler.running) and not ordering.order.holds:
            return False
        self.fast_path.dissolve_batch(self.steps_in_flight)
        self.scheduler.renew_ranks()
        return True

    def compose(self, step: Step) -> None:
        """Count what the step computes and what of it is repeated. Computed tokens already include the step."""
        if step.scheduled:
            step.compose(step.scheduled.values(), map(COMPUTED, step.scheduled))
            if self.preemptions.ledger.lost:
                self.preemptions.count(step)
        if step.batch_requests:
            step.scheduled_tokens += step.batch_requests
            step.scheduled_requests += step.batch_requests
            step.decode_requests += step.batch_requests
            step.kv_read_tokens += step.batch_read_tokens

    def launch(self, step: Step) -> None:
        """Set when the step begins and ends, with the copies that it brings."""
        evicted = self.scheduler.pool.evicted
        if evicted:
            if self.copies.lost(in_step_order(evicted)):  # a waiting request may find more in host memory, or less
                self.scheduler.blocked = False
            evicted.clear()
        if self.copies.waiting:
            step.to_save, step.to_load = self.copies.take()
            step.saves, step.loads = len(step.to_save), len(step.to_load)
            self.preemptions.jobs_taken(self.copies)
        self.note_occupancy(step)
        begins_s = max(self.now_s, self._device_free_s)
        computes_s = step.computes_s = costs.seconds(self.times, load_of(step))
        step.began_s = begins_s
        if step.saves or step.loads or self.link.running:
            saves = [(job, job.count) for job in step.to_save]
            loads = [(job, job.count) for job in step.to_load]
            step.end_s = self.link.step(saves, loads, begins_s, computes_s)
        else:
            step.end_s = begins_s + computes_s
        if not step.scheduled_tokens and not step.lost and step.end_s <= self.now_s:
            step.end_s = self._next_event_s(begins_s)
        self._device_free_s = step.end_s

    def note_occupancy(self, step: Step) -> None:
        """Note running and waiting requests and used memory in the step."""
        step.running_requests, step.waiting_requests = len(self.scheduler.running), self.scheduler.waiting_requests
        step.used_blocks = self.server.device_blocks - self.scheduler.pool.free + NULL_BLOCK

    def _next_event_s(self, now_s: float) -> float:
        """When the next event comes to an engine that can compute nothing."""
        if not (events_s := self._events_s()):
            raise RuntimeError(f"at {now_s} s {self.present} requests wait and nothing can ever be scheduled")
        return max(now_s, min(events_s))

    def _events_s(self) -> list[float]:
        """When the next copy and the next read end, and the next request arrives, as far as these are known."""
        return [at_s for at_s in (self.link.next_end_s(), self.arrivals.next_s, self.reads.next_s) if at_s is not None]

    # ---- a step ends ----

    def end_step(self, step: Step) -> None:
        """Take the step's output."""
        self.now_s = max(self.now_s, step.end_s)
        self._take_tokens(step)
        if step.repeated or self.link.running:
            costs.charge(step, self.link.running, self.times)
        if self.link.running:
            self._take_copies()
        self.preemptions.back(step, self.now_s)
        self.preemptions.record_outcomes()
        if step.scheduled_tokens:
            load = load_of(step)
            rest = costs.without(load, step.repeated) if step.repeated else load
            self.tallied.work.step(load, rest, step.computes_s, step.end_s - step.began_s, step.repeated)
        self._count_step(step)
        self.fast_path.batch.last_s = self.now_s

    def _take_tokens(self, step: Step) -> None:
        leaving = self._take_batch(step) if step.batch_requests else []
        tokens = step.batch_requests
        for live, new in step.scheduled.items():
            live.in_flight -= new
            stale = live.stale > 0
            if stale:
                live.stale -= new
                self.scheduler.blocked = False
            if live.status is Status.FINISHED or live not in step.sampling:
                continue
            self.take_token(live, stale)
            tokens += 1
            if live.outputs == live.request.output_tokens:
                leaving.append(live)
                self.finish(live)
        if tokens:
            self.tallied.output.add(self.now_s, tokens)
            if self.tallied.several:
                self.tallied.note_classes(self.now_s)
        self._remove(leaving)

    def _take_batch(self, step: Step) -> list[LiveRequest]:
        """Give every request of the decode batch its token; return those that got their last one."""
        batch = self.fast_path.batch
        gap_s = self.now_s - batch.last_s
        if step.batch_others:
            batch.count_gaps([gap_s], step.batch_requests, step.batch_others)
        else:
            batch.tally.itl.add(gap_s, step.batch_requests)
            batch.tally.tokens += step.batch_requests
        batch.gaps.add(self.now_s, gap_s)
        finished = step.finished
        if self._asynchronous:  # left out of the next step, which is already scheduled
            finished = self.steps_in_flight[0].finished if self.steps_in_flight else []
        for live in finished:
            self._take_last(live)
        return finished

    def _take_last(self, live: LiveRequest) -> None:
        """Give a request of the decode batch its last token."""
        live.outputs = live.request.output_tokens
        live.placeholders = live.in_flight = 0
        live.longest_gap_s = max(live.longest_gap_s, self.now_s - live.last_s)
        live.last_s = self.now_s
        self.scheduler.pool.cache(live, live.computed)
        self.finish(live)

    def take_token(self, live: LiveRequest, stale: bool) -> None:
        live.outputs += 1
        live.tally.tokens += 1
        if live.first_s is None:
            live.first_s = self.now_s
        else:
            gap_s = self.now_s - live.last_s
            live.tally.itl.add(gap_s)
            live.longest_gap_s = max(live.longest_gap_s, gap_s)
        live.last_s = self.now_s
        if self.server.asynchronous:
            live.placeholders -= not stale
            if live.status is Status.RUNNING:
                self.scheduler.pool.cache(live, live.computed - live.placeholders)

    def _remove(self, leaving: list[LiveRequest]) -> None:
        for live in leaving:
            if live in self.scheduler.running:
                self.scheduler.running.remove(live)
            else:  # preempted while its last token was in flight
                self.scheduler.waiting.remove(live)

    def finish(self, live: LiveRequest) -> None:
        """Count a request whose last token is out, and let those arrive that waited for its end."""
        self.scheduler.finish(live)
        self.preemptions.finished(live, self.copies, self.now_s)
        self.trace_writer.request(live)
        assert live.first_s is not None
        request = live.request
        live.tally.finished(
            live.arrival_s, live.first_s, live.last_s, live.outputs, live.longest_gap_s, request.ttft_s, request.tpot_s,
            request.prompt_tokens,
        )  # fmt: skip
        self.present -= 1
        self.arrivals.finished(live.number, request, self.now_s)

    def _take_copies(self) -> None:
        for job, transfer in self.link.ended(self.now_s):
            self.tallied.moved_bytes += transfer.bytes
            self.trace_writer.transfer(job, transfer, self._step.number)
            self.preemptions.copied(job)
            if transfer.direction == "save":
                self.copies.saved(job, transfer.end_s - transfer.start_s)
                continue
            copy = job.copy
            assert copy is not None
            self.copies.loaded(job)
            opened = self.preemptions.ledger.open_preemption(copy.live)
            if opened is not None:
                opened.loaded_tokens = copy.load_tokens
                opened.mixed |= copy.account is None  # then its cost is that of neither option
            copy.live.loaded += copy.load_tokens
            self.scheduler.loaded.add(copy.live)
            self.scheduler.blocked = False

    def _count_step(self, step: Step) -> None:
        if step.scheduled_tokens or step.lost or step.saves or self.present:
            self.tallied.steps += 1
            self.tallied.recomputed_tokens += step.recomputed_tokens
            if self.tallied.beyond is not None and step.scheduled_tokens:
                self.tallied.beyond.add(load_of(step))
            self.trace_writer.step(step)

    # ---- many steps at once ----

    def leap(self) -> bool:
        """Take all coming steps in which nothing but decoding happens at once; False where there are none."""
        if len(self.steps_in_flight) != self._asynchronous or (self.link.running and self.server.link.slowdown):
            return False
        max_steps = self.fast_path.leap_steps(self.steps_in_flight, self.copies)
        if max_steps < 2:
            return False
        events_s = self._events_s()
        if self.ordering is not None:
            if self.ordering.order.holds:
                return False
            if self.ordering.ranks.next_s <= self.now_s:
                return False
            max_steps = int(min(max_steps, self.ordering.quiet_steps(self._steps, self.scheduler.running)))
            if max_steps < 2:
                return False
            events_s.append(self.ordering.ranks.next_s)
        began_s, next_s = max(self.now_s, self._device_free_s), min(events_s, default=inf)
        ends_s = self.fast_path.ends_s(self.times, max_steps, began_s, next_s)
        self._take_steps(ends_s)
        return True

    def _take_steps(self, ends_s: list[float]) -> None:
        """Take the decode steps that end at ``ends_s``; see :meth:`FastPath.ends_s`."""
        batch = self.fast_path.batch
        last_s, members = batch.last_s, len(batch)
        tokens, computes_s, busy_s = 0, 0.0, 0.0
        ended_s, gaps_s = [], []
        for began_s, end_s in pairwise(ends_s):
            self.steps_in_flight.append(self._batch_step(began_s, end_s))
            step = self.steps_in_flight.popleft()
            ended_s.append(step.end_s)
            gaps_s.append(step.end_s - last_s)
            self._count_step(step)
            tokens += step.batch_requests
            computes_s += step.computes_s
            busy_s += step.end_s - step.began_s
            last_s = step.end_s
        self.preemptions.step_begins(self._steps - 1, len(self.scheduler.running))
        self.now_s = batch.last_s = last_s
        batch.gaps.add(last_s, max(gaps_s))
        batch.count_gaps(gaps_s, members, batch.others.items())
        self.tallied.output.extend(ended_s, members)
        if self.tallied.several:
            batch.note_outputs(ended_s, members)
        self.tallied.work.decoded(tokens, computes_s, busy_s)
        self._device_free_s = ends_s[-1]
        if self.link.running:
            self._take_copies()
            self.preemptions.record_outcomes()
        if not self._asynchronous:
            finished = batch.pop_finished(self.scheduler.pool)
            for live in finished:
                self._take_last(live)
            self._remove(finished)

    def _batch_step(self, began_s: float, end_s: float) -> Step:
        batch = self.fast_path.batch
        count, read_tokens = len(batch), batch.read_tokens + len(batch)
        step = self._step = Step(
            self._steps,
            began_s,
            count,
            count,
            count,
            read_tokens,
            batch_requests=count,
            batch_read_tokens=read_tokens,
            computes_s=end_s - began_s,
            end_s=end_s,
        )
        if batch.others:
            step.batch_others = tuple(batch.others.items())
        self._steps += 1
        self.scheduler.growth.steps += 1
        batch.step(self.scheduler.pool)
        self.note_occupancy(step)
        return step

    # ---- called by the scheduler ----

    def _preempting(self, live: LiveRequest, cause: Cause) -> None:
        self.preemptions.preempting(live, self.scheduler, self.copies, self._step, self.now_s, cause)

    def _price(self, live: LiveRequest) -> float | None:
        return self.preemptions.price(live, self.scheduler, self.copies, self.now_s)

    def _note_choice(self, ordering: Ordering, order: str, choice: Choice) -> None:
        self.trace_writer.displacement(choice, ordering.by_number, self._step.number, self.now_s, order)

    def _is_ready(self, live: LiveRequest) -> bool:
        return is_ready(live, self.scheduler.loaded)

    def _admitted(self, live: LiveRequest, load_tokens: int) -> None:
        if load_tokens:
            self.copies.begin_load(live, live.computed - load_tokens, load_tokens)
        elif live.copy is not None:
            self.preemptions.not_loaded(live, self.copies)
        self.preemptions.admitted(live)
        opened = self.preemptions.ledger.open_preemption(live)
        if opened is not None and opened.admitted_s is None:
            opened.admitted_s = self.now_s
            self.preemptions.survival.admitted(opened.preemption_id)
