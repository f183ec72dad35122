"""The state machine on the scheduler side: has each preemption decided and follows it until it is closed.

    preempted -> decided -> executed: a recompute at once; a swap when its first save is confirmed, has failed or is
                            forgotten, or when it needs none
              -> admitted -> loaded -> closed: resumed, preempted again or gone

Nothing here may stop a request or change a token. If deciding fails, the request is recomputed, as vLLM alone would
have done, and the reason is counted. Counting, recording, measuring and learning are done by observers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvpolicy import policy as policies
from kvpolicy.attribution.ledger import Ledger, OpenPreemption, Step, StepClock
from kvpolicy.events import CACHE_COPY, Cause, Kind, as_taken_out, copy_was_used
from kvpolicy.order import Choice, Fcfs, Guarded, Order, Priority
from kvpolicy.policy import Decider, Policy
from kvpolicy.policy.decision import at_resume
from kvpolicy.request_marks import Classes
from kvpolicy.survival import AllOrNothing, Survival
from kvpolicy_vllm.plugin.block_tables import BlockTables
from kvpolicy_vllm.plugin.cost_meter import CostMeter
from kvpolicy_vllm.plugin.device_blocks import given_away, uncomputed, written_by_step
from kvpolicy_vllm.plugin.host_copies import Copy, CopyBook
from kvpolicy_vllm.plugin.learner import Learner, Memory
from kvpolicy_vllm.plugin.marks import Grant, MarkReader
from kvpolicy_vllm.plugin.messages import StepJobs, Transfer
from kvpolicy_vllm.plugin.observers import Identity, MetricsCounter, Observers, Pending, SurvivalLearner
from kvpolicy_vllm.plugin.prompt_cache import PromptCache
from kvpolicy_vllm.plugin.situation import (
    RunningView,
    contents_of,
    restorable_tokens,
    situation_of,
    why_not_loadable,
)
from kvpolicy_vllm.plugin.stale_requests import StaleRequests
from kvpolicy_vllm.plugin.swaps import Swaps
from kvpolicy_vllm.plugin.trace_writer import RowWriter, TraceRecorder


class Controller:
    """One per engine core, owned by the connector, driven by the scheduler and the connector.

    ``segment_bytes``: contiguous bytes of a block, until a worker reports another value. ``load_policy``: loads a
    policy by name and checks that it fits this engine. ``memory``: keeps what is learned. ``complain``: called with a
    message while an exception is handled.
    """

    def __init__(
        self,
        core: str,
        decider: Decider,
        copies: CopyBook,
        segment_bytes: int,
        clock: Callable[[], float],
        complain: Callable[[str], None],
        load_policy: Callable[[str], Policy],
        memory: Memory | None = None,
    ) -> None:
        self.core, self.decider, self.copies, self.clock = core, decider, copies, clock
        copies.segment_bytes = segment_bytes
        self.ledger: Ledger[OpenPreemption] = Ledger()
        self.metrics = MetricsCounter(copies, self.ledger)
        self.observers = Observers(complain)
        self.survival: Survival = Survival()
        self.stale = StaleRequests()
        self.observers.add(self.metrics, SurvivalLearner(self.survival))
        self.recorder: RowWriter | None = None
        """Takes the trace's rows; None where no trace is recorded."""
        self.beside: Sequence[str] = ()
        """Names of the connectors that serve beside this one, which the scheduler sets."""
        self.order: Order = Fcfs()
        """The order of service, which the scheduler reads when it is made."""
        self.marks = MarkReader(Classes().grant, self.metrics.tally)
        """What requests say of themselves."""
        self.next_step = 0
        """Number of the next step in table ``steps``."""
        self._complain, self.load_policy = complain, load_policy
        self.prompts: PromptCache | None = None
        """None where host memory is for preempted requests only; see :meth:`cache_prompts`."""
        self.tables: BlockTables | None = None
        """None where one block table holds every token's block; see :meth:`keep_tables`."""
        self._labels: Mapping[str, Any] = {}
        self._scheduler: Any = None
        self._running_view: RunningView | None = None
        """View of the running requests in the step being scheduled; made at its first preemption."""
        self._step: Step[OpenPreemption] = Step(-1, clock())
        self._step_clock = StepClock()
        self._in_flight: dict[int, Step[OpenPreemption]] = {}
        self._belongs_to = 0
        """Number of the step that a preemption belongs to; between two steps, as at a reset, the next one."""
        self._lost: list[str] = []
        """Ids of that step's preemptions."""
        self._unlisted_blocks: list[int] = []
        """Device blocks that the step being scheduled takes and its output does not list: those of loads, and those of
        requests that it preempts after all."""
        self._preemptions = 0
        self.swaps = Swaps(copies, self.ledger, self.observers)
        # Some versions of vLLM do not shut down an engine in a script's own process: its records would be lost.
        self._keep = self.observers.close_with(self)
        self._take_charge(memory)

    def keep_tables(self, tables: BlockTables | None) -> None:
        """Save and load by these block tables, and expect of them what survives."""
        self.tables = tables
        if tables is not None:
            self.survival = AllOrNothing()
            self.observers.replace(SurvivalLearner, SurvivalLearner.of(self.survival))

    def cache_prompts(self, key_of: Callable[[Any], bytes]) -> PromptCache:
        """Find prompts in host memory; the copies have a caching policy. ``key_of``: see :class:`PromptCache`."""
        self.prompts = PromptCache(
            self.copies, self.decider, key_of, self.observers, self.metrics.tally, self._complain, self.marks,
            self.stale,
        )  # fmt: skip
        return self.prompts

    def grant_marks(self, grant: Grant) -> None:
        """Let requests be of the classes, and have the deadlines, priorities and hints, that ``grant`` gives them."""
        self.marks.grant_by(grant)

    def record_into(self, recording: RowWriter, anonymous: Callable[[str], str], *sampling: Any) -> None:
        """Record a trace from now on; the arguments are those of :class:`TraceRecorder`."""
        self.recorder, about = recording, (self.core, self.metrics.tally, self.marks.columns, self.copies.ranks)
        self.observers.add(TraceRecorder(recording, anonymous, *about, *sampling))

    # ---- for tools that drive an engine ----

    def pin(self, kind: Kind | None, labels: Mapping[str, Any] | None = None) -> None:
        """Execute ``kind`` at all following preemptions, recorded with ``labels``; None lets the policy decide."""
        self.decider.pin(kind)
        self._labels = dict(labels or {})

    def adopt(self, name: str | Policy) -> None:
        """Switch to another policy, by name or loaded. Raises as at start-up where it cannot be loaded or does not
        fit."""
        former = self.decider.policy
        self.decider.adopt(name if isinstance(name, Policy) else self.load_policy(name))
        self.metrics.show_policy(former, 0)
        self._take_charge(None)

    def show_service(self) -> None:
        """Report the present order, and shadow mode, in the metrics."""
        self.metrics.show_service(self.order.label, self.decider.shadow)

    def _take_charge(self, memory: Memory | None) -> None:
        """Report the present policy in the metrics; measure and learn if it can."""
        policy, tell, tally = self.decider.policy, self.observers.tell, self.metrics.tally
        self.metrics.show_policy(policy, 1)
        step_time = None if policy.cost_model is None else policy.cost_model.step_time
        self.observers.replace(CostMeter, None if step_time is None else CostMeter(step_time, tell, tally))
        self.observers.replace(Learner, Learner(self.decider, memory, tally) if self.decider.learns else None)

    def leave_out(self, seconds: float) -> None:
        """Leave time that a tool spent since the last step out of the next step's duration."""
        self._step_clock.leave_out(seconds)

    def stats(self) -> dict[str, float]:
        """Counters and gauges since the start, by ``name|label=value``."""
        if self.prompts is not None:
            self.prompts.count()
        return self.metrics.stats()

    @property
    def unsettled(self) -> bool:
        """Whether an idle or paused engine should go on stepping: copies are under way, or metrics are unreported. An
        engine that sleeps gives the device's memory up, so no copy may be left then."""
        files = self.prompts is not None and self.prompts.files_under_way
        return self.metrics.urgent or self.copies.under_way or files

    # ---- from the scheduler ----

    def step_begins(self, scheduler: Any) -> None:
        self._scheduler, self._running_view = scheduler, None
        self._step = Step(self.next_step, self.clock(), lost=self._lost)
        self._belongs_to, self.next_step = self.next_step, self.next_step + 1
        if self.prompts is not None:
            self.prompts.step_begins(scheduler, self._belongs_to, self.clock)

    def preempting(self, request: Any, cause: Cause) -> None:
        """A request is about to lose its blocks: decide, and queue a save if it is to be swapped."""
        if cause == "reset":
            self.forget_saved()
        if self.prompts is not None:
            self.prompts.preempted(request)
        if self.stale.names:
            self.stale.loses_blocks(request, self._scheduler)
        self._preemptions += 1
        preemption_id = f"{self.core}-{self._preemptions}"
        self._lost.append(preemption_id)
        kind: Kind = "recompute"
        try:
            kind = self._decide(request, cause, preemption_id)
        # The boundary between a policy and a server: after any error in deciding, vLLM's own recompute is safe.
        except Exception:  # noqa: BLE001
            self._running_view = None
            self.observers.tell("undecided", cause)
            self._complain("deciding failed; recomputing (counted as fallback 'error')")
        tokens, now = request.num_computed_tokens, self.clock()
        opened = OpenPreemption(preemption_id, request.request_id, kind, tokens, now, self._belongs_to)
        superseded = self.ledger.open_preemption(request.request_id)
        outcome = self.ledger.add(opened)
        if superseded is not None and outcome is not None:
            self.observers.tell("closed", superseded, outcome)
        self.observers.tell("preempted", request)

    def step_scheduled(self, output: Any) -> None:
        """After ``schedule()``: computed tokens are advanced and copy jobs are taken."""
        step, self._running_view = self._step, None
        self._belongs_to, self._lost = self.next_step, []
        scheduled, requests = output.num_scheduled_tokens, self._scheduler.requests
        for request_id in [name for name in self.ledger.lost if name in scheduled]:
            end = requests[request_id].num_computed_tokens
            self.ledger.count(step, request_id, end - scheduled[request_id], end)
        if step.repeated:
            self.observers.tell("repeated", step)
        if self.observers.follow_steps:
            self.observers.tell("scheduled", step, output, self._scheduler)
        if step.back or self.observers.follow_steps:
            self._in_flight[id(output)] = step

    def step_done(self, output: Any) -> None:
        """After ``update_from_output()``."""
        step = self._in_flight.pop(id(output), None) if self._in_flight else None
        if step is None:  # not followed: see step_scheduled
            return
        now = self.clock()
        for opened in step.back:
            if not copy_was_used(opened.executed, opened.loaded_tokens, opened.recomputed_tokens):
                self.swaps.recomputed_after_all(opened, "not_loaded")
            self.observers.tell("closed", opened, opened.close("resumed", now))
        if self.observers.follow_steps:
            scheduler = self._scheduler
            busy = scheduler.get_num_unfinished_requests() > 0  # 0 in a pause, too: a server may be ended there
            began_s = self._step_clock.began_s(step, now, busy)
            self.observers.tell("done", step, output, scheduler, began_s, now)
            if not busy:
                self.observers.tell("idle")

    def forget_saved(self) -> None:
        """Everything saved or queued is stale, as after a change of weights, and so is what requests hold."""
        self.swaps.forget_all()
        self.survival.forget()
        if self._scheduler is not None:
            self.stale.reset_begins(self._scheduler)
        if self.prompts is not None:
            self.prompts.forget()

    def reset_ended(self) -> None:
        """vLLM has reset its prefix cache, or has refused to."""
        if self._scheduler is not None:
            self.stale.reset_ends(self._scheduler)

    # ---- from the connector ----

    def arrived(self, request: Any) -> None:
        self.observers.tell("arrived", request, self.clock())
        if self.prompts is not None:
            self.prompts.arrived(request)

    def loadable_tokens(self, request: Any, local_tokens: int) -> int:
        """Tokens to load beyond the local hit; 0 where it is better to compute them again. Called at every admission
        attempt; changes nothing that is recorded."""
        if request.skip_reading_prefix_cache:
            return 0
        total = restorable_tokens(request, self._scheduler, self.copies)
        tokens = self.copies.loadable_tokens(request.request_id, total, local_tokens)
        if tokens:
            return tokens if self._loads(request, total, local_tokens) else 0
        copy = self.copies.of(request.request_id)
        if copy is not None:  # an earlier answer, with less on the device, is not what happens
            copy.asked_at_resume, copy.loads = None, True
        elif self.prompts is not None:
            return self.prompts.loadable_tokens(request, local_tokens)
        return 0

    def _loads(self, request: Any, total_tokens: int, local_tokens: int) -> bool:
        """Whether a request that is about to come back loads what it lacks. The policy is asked anew when the local hit
        or the loads before it change."""
        copies, copy = self.copies, self.copies.of(request.request_id)
        assert copy is not None
        asked = local_tokens, copies.queued_bytes("load")
        if copy.asked_at_resume == asked or copy.situation is None:
            return copy.loads
        copy.asked_at_resume, scheduler = asked, self._scheduler
        try:
            situation = at_resume(
                copy.situation, total_tokens, local_tokens,
                scheduler.kv_cache_manager.block_pool.get_num_free_blocks(), len(scheduler.running),
                copies.queued_bytes("save"), copies.queued_bytes("load"),
                None if self.tables is None else self.tables.load_blocks(scheduler, local_tokens, total_tokens),
            )  # fmt: skip
            copy.loads = self.decider.loads(situation)
        # The boundary between a policy and a server: what was saved can be loaded.
        except Exception:  # noqa: BLE001
            copy.loads = True
            self.metrics.tally.add("resume_undecided")
            self._complain("deciding at resume failed; the copy is loaded (counted as resume_undecided)")
        return copy.loads

    def admitted(self, request: Any, block_ids: Sequence[list[int]], load_tokens: int) -> None:
        """The request has blocks again, of which ``block_ids`` are its tables; ``load_tokens`` tokens are to be loaded
        (0: none)."""
        request_id = request.request_id
        self.stale.admitted(request, self._scheduler)
        copy, opened = self.copies.of(request_id), self.ledger.open_preemption(request_id)
        if load_tokens == 0 and self.beside and self.copies.pool.watched:
            # Blocks that another connector loads into are in no step's output, and not in ``block_ids`` up to 0.25.
            tables = self._scheduler.kv_cache_manager.get_blocks(request_id).blocks
            self._unlisted_blocks += [block.block_id for block in tables[0]]
        if load_tokens > 0 and copy is not None:
            wanted, into = self._to_load(request, copy, block_ids, load_tokens)
            self.copies.begin_load(request_id, wanted, tuple(into), load_tokens)
            self._load_begins(request, into)
        elif copy is None and self.prompts is not None:
            if into := self.prompts.admitted(request, block_ids[0], load_tokens):
                self._load_begins(request, into)
        elif copy is not None and copy.load_tokens == 0:
            # The prefix cache has all its tokens, it is better to compute them, or vLLM does not load.
            self.swaps.forget(request_id)
            if not copy.loads:
                self.swaps.recomputed_after_all(opened, "cheaper_at_resume")
        if opened is not None and opened.admitted_s is None:
            opened.admitted_s = self.clock()
            self.survival.admitted(opened.preemption_id)

    def _load_begins(self, request: Any, into: list[int]) -> None:
        if self.copies.pool.watched:
            self._unlisted_blocks += into
        self._scheduler.loaded_requests.load_begins(request)

    def _to_load(
        self, request: Any, copy: Copy, block_ids: Sequence[list[int]], load_tokens: int
    ) -> tuple[Sequence[int], list[int]]:
        """Indices of the copy's blocks that are loaded, and the device blocks that they go to."""
        total = restorable_tokens(request, self._scheduler, self.copies)
        if self.tables is None:
            size = int(self._scheduler.block_size)
            first, last = (total - load_tokens) // size, -(-total // size)
            return range(first, last), block_ids[0][first:last]
        assert copy.positions is not None, "of several tables every copy has its positions"
        into = self.tables.to_load(self._scheduler, block_ids, total - load_tokens, total)
        index_at = {position: index for index, position in enumerate(copy.positions)}
        return [index_at[position] for position in into], [*into.values()]

    def take_jobs(self, output: Any) -> StepJobs:
        """The workers' jobs in the step that vLLM has just scheduled. ``output``: what it schedules."""
        copies = self.copies
        if copies.pool.watched:
            blocks = self._scheduler.kv_cache_manager.block_pool.blocks
            copies.lost(given_away(output, self._unlisted_blocks, copies.pool, blocks))
            self._unlisted_blocks = []
        written_of = partial(written_by_step, self._scheduler)
        jobs = copies.take_jobs(self._step.number, output.total_num_scheduled_tokens == 0, written_of)
        if copies.begun or copies.given_up:
            self.swaps.step_taken()
        if jobs.overwritten and self.beside:
            jobs = replace(jobs, at_once=True)
        if jobs.saves or jobs.loads:
            self._step.saves, self._step.loads = len(jobs.saves), len(jobs.loads)
            preemptions = {job.copy_id: self.copies.preemption_of(job) for job in (*jobs.saves, *jobs.loads)}
            self.observers.tell("copies_begin", jobs, preemptions)
        return jobs if self.prompts is None else self.prompts.with_files(jobs)

    def transferred(self, done: Iterable[Transfer]) -> None:
        """Process the copies that workers finished."""
        for settled in self.copies.acknowledge(done):
            self.copies.segment_bytes = settled.transfers[0].segment_bytes
            self.copies.health.settled(settled, self.clock())
            self.observers.tell("copied", settled, self._step.number)
            if self.prompts is not None and settled.copy.preemption_id == CACHE_COPY:
                self.prompts.settled(settled, self.ledger)
            else:
                self.swaps.settled(settled)

    def finished(self, request: Any) -> None:
        """The request ended, finished or aborted."""
        self.swaps.forget(request.request_id)
        if self.prompts is not None:
            self.prompts.ended(request)
        self.stale.ended(request, self._scheduler)
        opened, now = self.ledger.open_preemption(request.request_id), self.clock()
        outcome = self.ledger.remove(request.request_id, now)
        if opened is not None and outcome is not None:
            self.observers.tell("closed", opened, outcome)
        self.observers.tell("ended", request, now)
        self.marks.forget(request)

    def close(self) -> None:
        """Write what is still to be written and close the observers. Further calls do nothing."""
        if not self._keep.alive:
            return
        self.swaps.close()
        self._keep()

    # ---- from the order of service ----

    def serve_by(self, order: Order) -> None:
        """Serve by this order, which the scheduler reads when it is made. Whatever goes wrong in it is counted."""
        self.order = order if type(order) in (Fcfs, Priority) else Guarded(order, self.order_failed)

    def order_failed(self, method: str) -> None:
        """Count and log an error in the order of service, while the exception is handled."""
        self.metrics.tally.add("order_failed", method=method)
        self._complain(f"{method}() in order {self.order.name} failed; going on without (counted as order_failed)")

    def displacing(self, order: str, choice: Choice, id_of: Callable[[int], str]) -> None:
        """Requests are about to be displaced. ``order``: the label of the order of service; ``id_of``: a request's id,
        by its number in ``choice``."""
        self.observers.tell("displacing", order, choice, id_of, self._belongs_to, self.clock())

    def price(self, request: Any) -> float | None:
        """Predicted engine seconds of displacing a running request, by the cheaper option; None without predictions."""
        scheduler, now = self._scheduler, self.clock()
        try:
            view, gain = RunningView(scheduler, request, self.tables), self.decider.gain_per_block
            situation = situation_of(request, scheduler, view, "displaced", self.copies, self.survival, now, gain)
            situation = as_taken_out(situation)
            return self.decider.price(situation, policies.why_no_swap(situation, self._refusal(request, now)))
        # The boundary between a policy and a server: victims are chosen without prices, then.
        except Exception:  # noqa: BLE001
            self.metrics.tally.add("unpriced")
            self._complain("predicting the price of a victim failed (counted as unpriced)")
            return None

    # ---- from one state to the next ----

    def _decide(self, request: Any, cause: Cause, preemption_id: str) -> Kind:
        if self.copies.pool.watched:
            self._unlisted_blocks += uncomputed(request, self._scheduler)
        if self._running_view is None:
            self._running_view = RunningView(self._scheduler, request, self.tables)
        view, scheduler, now = self._running_view, self._scheduler, self.clock()
        survival = None if self._labels else self.survival  # a tool that measures evicts what the victim alone held
        gain = self.decider.gain_per_block
        situation = situation_of(request, scheduler, view, cause, self.copies, survival, now, gain)
        decision = self.decider.decide(situation, policies.why_no_swap(situation, self._refusal(request, now)))
        identity = Identity(preemption_id, request.request_id, request.num_preemptions, self._belongs_to, self._labels)
        pending = Pending(situation, decision, identity)
        executed: Kind = "swap" if decision.executed == "swap" else "recompute"
        if executed == "swap":
            self._swap(pending)
        else:
            self.observers.tell("executed", pending)
        self.observers.tell("decided", pending)
        return executed

    def _refusal(self, request: Any, now: float) -> str:
        """Why this engine would not load the request back, as a word for the trace; empty where it would. What was
        computed before a reset is not saved after it."""
        if request.request_id in self.stale.names:
            return "stale"
        return why_not_loadable(request, self._scheduler, self.copies, now, self.tables)

    def _swap(self, pending: Pending) -> None:
        request_id, situation = pending.identity.request_id, pending.situation
        if self.tables is None:
            contents = contents_of(request_id, situation, self._scheduler, self.copies.pool, bool(self._labels))
            self.swaps.begin(pending, contents)
            return
        needed = self.tables.needed(self._scheduler, request_id, situation.computed_tokens)
        self.swaps.begin(pending, [(None, block.block_id) for block in needed.values()], tuple(needed))
