"""The scheduler side's mind: sees a preemption, asks the policy, follows what becomes of it.

Nothing here may stop a request or change a token. Whatever goes wrong in deciding, the request is recomputed, as vLLM
alone would have done, and the reason is counted.
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvpolicy import policy as policies
from kvpolicy.attribution.ledger import Ledger, OpenPreemption, Step
from kvpolicy.events import Cause, Decision, Kind, Outcome, Preemption, copy_was_used
from kvpolicy.trace import decision_row
from kvpolicy_vllm.plugin.accounts import Accounts
from kvpolicy_vllm.plugin.copies import CopyBook, Settled
from kvpolicy_vllm.plugin.copy_health import CopyHealth
from kvpolicy_vllm.plugin.deciding import Judge
from kvpolicy_vllm.plugin.jobs import StepJobs, Transfer
from kvpolicy_vllm.plugin.journal import Journal, header_of
from kvpolicy_vllm.plugin.metrics import Tally
from kvpolicy_vllm.plugin.recording import Recorder, Recording
from kvpolicy_vllm.plugin.settings import Settings
from kvpolicy_vllm.plugin.situation import RunningView, engine_spec, model_loader, page_bytes, situation_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


class Controller:
    """One per engine core, owned by the connector, driven by the scheduler and the connector.

    ``policy`` and ``recording`` take the place of what the settings name, in a simulation.
    """

    def __init__(
        self,
        settings: Settings,
        vllm_config: VllmConfig,
        kv_cache: KVCacheConfig,
        slots: int,
        block_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        policy: policies.Policy | None = None,
        recording: Recording | None = None,
    ) -> None:
        self.settings = settings
        self.tally = Tally()
        self.clock = clock
        self.core = f"core-{uuid.uuid4().hex[:12]}"
        self.copies = CopyBook(slots, vllm_config.parallel_config.world_size, block_bytes)
        self.health = CopyHealth()
        self.ledger: Ledger[OpenPreemption] = Ledger()
        self._segment_bytes = page_bytes(kv_cache)
        self._scheduler: Any = None
        self._running_view: RunningView | None = None
        """Of the step that is being scheduled; made at its first preemption."""
        self._step: Step[OpenPreemption] = Step(-1, clock())
        self._steps = 0
        self._scheduling = False
        self._between_steps: list[str] = []
        """Preemptions since the last step was scheduled: a reset's, which belong to the next one."""
        self._in_flight: dict[int, Step[OpenPreemption]] = {}
        self._preemptions = 0
        self._salt = uuid.uuid4().bytes
        # Decisions to swap whose save is not yet done: (situation, decision, identity).
        self._undecided: dict[int, tuple[Preemption, Decision, dict[str, Any]]] = {}
        self._complained: set[str] = set()
        self._shown: tuple[int, ...] = ()
        rank = getattr(vllm_config.parallel_config, "data_parallel_index", 0)
        engine = engine_spec(vllm_config, kv_cache, block_bytes, settings)
        draw_seed = self._draw_seed(rank)
        self.judge = Judge(settings, engine, model_loader(vllm_config, engine), rank, draw_seed, policy)
        if recording is None and settings.trace is not None:
            header = header_of(settings, engine, self.core, self.judge.policy.label, kv_cache.num_blocks, slots)
            header = replace(header, draw_seed=draw_seed)
            recording = Recorder(settings.trace / self.core, header)
        self.journal = None if recording is None else Journal(recording, self.anonymous)
        self.accounts = Accounts(self.tally, self.journal)
        self.accounts.measure_by(self.judge.step_time)
        # An engine inside a script's own process is not shut down by every vLLM: what it recorded would end with it.
        self._keep = weakref.finalize(self, _keep, recording, self.judge)
        self._set_gauges()
        self._show_policy(1)

    # ---- for tools that drive an engine ----

    def pin(self, kind: Kind | None, labels: Mapping[str, Any] | None = None) -> None:
        """Execute ``kind`` at every following preemption and record it with ``labels``; None: ask the policy."""
        self.judge.pin(kind, dict(labels or {}))

    def adopt(self, name: str) -> None:
        """Decide by another policy from now on. Raises as at start-up where it cannot be loaded or does not fit."""
        self._show_policy(0)
        try:
            self.judge.adopt(name)
        finally:
            self._show_policy(1)
        self.accounts.measure_by(self.judge.step_time)

    @property
    def next_step(self) -> int:
        """The number that the next step will have in table ``steps``."""
        return self._steps

    def leave_out(self, seconds: float) -> None:
        """Time since the last step that a tool took for itself: it is no part of the next one."""
        self.accounts.leave_out(seconds)

    def stats(self) -> dict[str, float]:
        """Counters and gauges since the start, by ``name|label=value``."""
        self._set_gauges()
        return self.tally.totals | self.tally.gauges

    @property
    def recorder(self) -> Any:
        """The trace's recorder, or None where nothing is recorded."""
        return None if self.journal is None else self.journal.recorder

    @property
    def unsettled(self) -> bool:
        """Whether an idle or paused engine should go on stepping: a load is under way, or something is to be told."""
        return self.tally.urgent or self.copies.loading > 0

    # ---- from the scheduler ----

    def step_begins(self, scheduler: Any) -> None:
        self._scheduler, self._running_view = scheduler, None
        self._step = Step(self._steps, self.clock(), lost=self._between_steps)
        self._steps += 1
        self._scheduling, self._between_steps = True, []

    def preempting(self, request: Any, cause: Cause) -> None:
        """A request is about to lose its blocks: decide, and queue the save where it is to be swapped."""
        if cause == "reset":
            self.forget_saved()
        self._preemptions += 1
        preemption_id = f"{self.core}-{self._preemptions}"
        kind: Kind = "recompute"
        try:
            kind = self._decide(request, cause, preemption_id)
        # The one boundary between a policy and a server: whatever is wrong with deciding, vLLM's own way is safe.
        except Exception:  # noqa: BLE001
            self._running_view = None
            self._fell_back("error")
            self._complain("deciding failed; recomputing (counted as fallback 'error')")
            self.tally.add("preemptions", intended="recompute", executed="recompute", cause=cause)
        (self._step.lost if self._scheduling else self._between_steps).append(preemption_id)
        opened = OpenPreemption(
            preemption_id, request.request_id, kind, request.num_computed_tokens, self.clock(), self._step_number
        )
        superseded = self.ledger.of(request.request_id)
        earlier = self.ledger.preempted(opened)
        if superseded is not None and earlier is not None:
            self._closed(superseded, earlier)

    def step_scheduled(self, output: Any) -> None:
        """After ``schedule()``: computed tokens are advanced, jobs are taken."""
        self._scheduling, self._running_view = False, None
        scheduled = output.num_scheduled_tokens
        step, scheduler = self._step, self._scheduler
        for request_id in [name for name in self.ledger.lost if name in scheduled]:
            end = scheduler.requests[request_id].num_computed_tokens
            self.ledger.count(step, request_id, end - scheduled[request_id], end)
        if step.repeated:
            self.tally.add("recomputed_tokens", step.recomputed_tokens)
        self.accounts.scheduled(step, scheduled, scheduler)
        self._in_flight[id(output)] = step

    def step_done(self, output: Any) -> None:
        """After ``update_from_output()``."""
        step = self._in_flight.pop(id(output), None)
        if step is None:
            return
        now = self.clock()
        for opened in step.back:
            self._check_use(opened)
            outcome = opened.close("resumed", now)
            self.tally.add("resumed", executed=opened.executed)
            self.tally.add("victim_delay_microseconds", outcome.victim_delay_s * 1e6, executed=opened.executed)
            self.tally.add("wait_blocks_microseconds", outcome.wait_blocks_s * 1e6, executed=opened.executed)
            self._closed(opened, outcome)
        self._account(step, output, now)
        if self.journal is not None:
            self._count_dropped()
        if self._scheduler.get_num_unfinished_requests() == 0:
            # A server may be ended now, and vLLM's default does not let it close.
            self.judge.keep_soon()
            if self.journal is not None:
                self.journal.recorder.flush_soon()
        self._set_gauges()

    def _account(self, step: Step[OpenPreemption], output: Any, now: float) -> None:
        try:
            for cost in self.accounts.done(step, output, self._scheduler, now):
                self.judge.learn(cost)
                self.accounts.observed()
        # As with deciding: whatever is wrong with measuring and learning, serving goes on.
        except Exception:  # noqa: BLE001
            self._complain("a preemption's cost could not be measured or learned from (counted as measuring_failed)")
            if not self.accounts.begin_afresh():
                self._complain("measuring failed too often in a row: no more costs are measured and learned from")

    def _closed(self, opened: OpenPreemption, outcome: Outcome) -> None:
        if opened.mixed:
            self.judge.forget(outcome.preemption_id)
        else:
            self.judge.closed(outcome)
        self.accounts.closed(opened, outcome)

    def _check_use(self, opened: OpenPreemption) -> None:
        """A swap whose copy was not loaded, because that failed or vLLM would not, was a recompute in the end."""
        if not copy_was_used(opened.executed, opened.loaded_tokens, opened.recomputed_tokens):
            self._fell_back("not_loaded")
            opened.executed, opened.mixed = "recompute", True

    def forget_saved(self) -> None:
        """Everything saved or queued is stale, as after a change of weights."""
        for copy_id in list(self._undecided):
            self._settle_early(copy_id)
        self.copies.forget_all()
        self._set_gauges()

    # ---- from the connector ----

    def arrived(self, request: Any) -> None:
        if self.journal is not None:
            self.journal.arrived(request, self.clock())

    def loadable_tokens(self, request: Any, local_tokens: int) -> int:
        """Tokens to load beyond the local hit. Asked at every admission attempt; changes nothing."""
        if request.skip_reading_prefix_cache:
            return 0
        return self.copies.loadable_tokens(request.request_id, self._restorable_tokens(request), local_tokens)

    def _restorable_tokens(self, request: Any) -> int:
        """Tokens that a load can bring ``request`` to, 0 without a copy. The last one known is computed, to sample the
        next."""
        copy = self.copies.of(request.request_id)
        tokens = 0 if copy is None else min(copy.tokens, int(request.num_tokens) - 1)
        if self._captures_routed_experts:  # vLLM would load nothing where a block is not whole
            tokens -= tokens % self._block_size
        return tokens

    def admitted(self, request: Any, block_ids: list[int], load_tokens: int) -> None:
        """The request has blocks again; ``load_tokens`` of them are to be loaded (0: none)."""
        request_id = request.request_id
        copy = self.copies.of(request_id)
        opened = self.ledger.of(request_id)
        if load_tokens > 0 and copy is not None:
            total = self._restorable_tokens(request)
            first = (total - load_tokens) // self._block_size
            last = -(-total // self._block_size)
            self.copies.begin_load(request_id, first, tuple(block_ids[first:last]), load_tokens)
            self._scheduler.returning.load_begins(request)
        elif copy is not None and copy.load_tokens == 0:
            # It fits what is cached locally, or vLLM would not load: the copy has served.
            self._forget(request_id)
        if opened is not None and opened.admitted_s is None:
            opened.admitted_s = self.clock()

    def take_jobs(self, idle: bool) -> StepJobs:
        jobs = self.copies.take_jobs(self._step.number, idle)
        self._step.saves, self._step.loads = len(jobs.saves), len(jobs.loads)
        self.accounts.copies_begin(jobs, self.copies)
        return jobs

    def transferred(self, done: Iterable[Transfer]) -> None:
        """Workers finished copies."""
        for settled in self.copies.acknowledge(done):
            self._count_transfer(settled)
            if settled.direction == "save":
                self._saved(settled)
                continue
            if settled.copy.copy_id in self._undecided:  # nobody waits for what ranks have still to say of the save
                self._settle_early(settled.copy.copy_id)
            if settled.ok and not settled.copy.orphan:
                self.tally.add("loaded_tokens", settled.copy.load_tokens)
                if self.journal is not None:
                    self.journal.loaded(settled.copy.request_id, settled.copy.load_tokens)
                opened = self.ledger.of(settled.copy.request_id)
                if opened is not None:
                    opened.loaded_tokens = settled.copy.load_tokens
            elif not settled.ok and not settled.copy.orphan:
                self._fell_back("load_failed")
                opened = self.ledger.of(settled.copy.request_id)
                if opened is not None:
                    opened.executed, opened.mixed = "recompute", True
        self._set_gauges()

    def finished(self, request: Any) -> None:
        """The request ended, well or not."""
        self._forget(request.request_id)
        opened = self.ledger.of(request.request_id)
        outcome = self.ledger.gone(request.request_id, self.clock())
        if opened is not None and outcome is not None:
            self._closed(opened, outcome)
        if self.journal is not None:
            self.journal.finished(request, self.clock())
        self._set_gauges()

    def close(self) -> None:
        """Once; whatever is still to be written is."""
        if not self._keep.alive:
            return
        if self.journal is not None:
            self._write_undecided()
        self._keep()
        if self.journal is not None:
            self._count_dropped()

    # ---- deciding ----

    def _decide(self, request: Any, cause: Cause, preemption_id: str) -> Kind:
        if self._running_view is None:
            self._running_view = RunningView(self._scheduler, request)
        situation = situation_of(
            request, self._scheduler, self._running_view, cause, self.copies, self._segment_bytes, self.clock()
        )
        why_not = policies.why_no_swap(situation, self._refused(request, situation))
        options = policies.feasible_options(situation, swap_possible=not why_not)
        decision = self.judge.decide(situation, options)
        executed, reason = self._executable(decision, situation, why_not)
        decision = replace(decision, executed=executed, reason=reason)
        self.judge.executing(preemption_id, situation, decision)
        identity = self._identity(request, preemption_id)
        if executed == "swap":
            self._save(request, situation, decision, identity)
        else:
            self._count(decision, cause)
            self._write(situation, decision, identity)
        return executed

    def _refused(self, request: Any, situation: Preemption) -> str:
        """A request that must not or cannot be loaded is recomputed, and so is everybody while copies fail."""
        if request.skip_reading_prefix_cache or getattr(request, "resumable", False):
            return "not_loadable"
        return "copies_failing" if self.health.suspended(situation.time_s) else ""

    def _executable(self, decision: Decision, situation: Preemption, why_not: str) -> tuple[Kind, str]:
        if why_not:
            return "recompute", why_not
        if self.settings.shadow and decision.intended == "swap":
            return "recompute", "shadow"
        return decision.intended, ""

    def _save(self, request: Any, situation: Preemption, decision: Decision, identity: dict[str, Any]) -> None:
        blocks = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
        needed = tuple(blocks[: situation.held_blocks])
        self._forget(request.request_id)
        copy = self.copies.save(request.request_id, identity["preemption_id"], situation.computed_tokens, needed)
        self._undecided[copy.copy_id] = (situation, decision, identity)

    def _saved(self, settled: Settled) -> None:
        """A save is done or has failed on all ranks: only now it is known what was executed."""
        waiting = self._undecided.pop(settled.copy.copy_id, None)
        if waiting is None:  # forgotten while it was being loaded, before all ranks had confirmed the save
            return
        situation, decision, identity = waiting
        if not settled.ok:
            decision = replace(decision, executed="recompute", reason="save_failed")
            opened = self.ledger.of(settled.copy.request_id)
            if opened is not None and opened.preemption_id == identity["preemption_id"]:
                opened.executed, opened.mixed = "recompute", True
        self._count(decision, situation.cause)
        self._write(situation, decision, identity)

    def _write_undecided(self) -> None:
        for situation, decision, identity in self._undecided.values():
            self._count(decision, situation.cause)
            self._write(situation, decision, identity)
        self._undecided.clear()

    # ---- counting and recording ----

    def _identity(self, request: Any, preemption_id: str) -> dict[str, Any]:
        return {
            "preemption_id": preemption_id,
            "decision_id": f"{preemption_id}-0",
            "request": self.anonymous(request.request_id),
            "generation": request.num_preemptions,
            "step": self._step_number,
            "overflow_id": f"{self.core}-{self._step_number}",
        } | dict(self.judge.labels)

    def anonymous(self, request_id: str) -> str:
        """A request's name in traces: a keyed hash, so that nobody can be found out by it."""
        return hashlib.blake2b(request_id.encode(), key=self._salt, digest_size=8).hexdigest()

    def _count(self, decision: Decision, cause: Cause) -> None:
        assert decision.executed is not None
        self.tally.add("preemptions", intended=decision.intended, executed=decision.executed, cause=cause)
        if decision.reason:
            self._fell_back(decision.reason)
        for option, cost in zip(decision.options, decision.costs, strict=False):
            if option.kind == decision.executed:
                self.tally.add("predicted_cost_microseconds", cost.engine_s * 1e6, executed=decision.executed)
        if any(cost.extrapolated for cost in decision.costs):
            self.tally.add("extrapolated")

    def _write(self, situation: Preemption, decision: Decision, identity: dict[str, Any]) -> None:
        if self.journal is not None:
            self.journal.recorder.add("decisions", decision_row(situation, decision, **identity))

    def _count_transfer(self, settled: Settled) -> None:
        self._segment_bytes = settled.transfers[0].segment_bytes
        slowest = max(settled.transfers, key=lambda transfer: transfer.end_s - transfer.start_s)
        moved = sum(transfer.bytes for transfer in settled.transfers if transfer.ok)
        self.tally.add("copy_bytes", moved, direction=settled.direction)
        self.tally.add("copy_microseconds", (slowest.end_s - slowest.start_s) * 1e6, direction=settled.direction)
        self.accounts.copied(settled, slowest, moved, self._step.number)
        if settled.ok:
            self.health.succeeded(settled.direction)
        else:
            first = next(transfer for transfer in settled.transfers if not transfer.ok)
            what = f"{first.direction} of copy {first.copy_id} failed: {first.error}"
            self.health.failed(settled.direction, what, self.clock())

    def _fell_back(self, reason: str) -> None:
        self.tally.add("fallbacks", reason=reason)

    def _complain(self, what: str) -> None:
        if what not in self._complained:
            self._complained.add(what)
            logger.exception("kvpolicy: %s (told once)", what)

    def _count_dropped(self) -> None:
        assert self.journal is not None
        known = self.tally.totals.get("records_dropped", 0)
        if self.journal.recorder.dropped > known:
            self.tally.add("records_dropped", self.journal.recorder.dropped - known)

    def _set_gauges(self) -> None:
        shown = (self.copies.pool.used, self.copies.pool.total, len(self.ledger))
        if shown == self._shown:  # as in nearly every step
            return
        self._shown = shown
        for name, value in zip(("host_slots_used", "host_slots_total", "open_preemptions"), shown, strict=True):
            self.tally.set(name, value)

    # ---- forgetting ----

    def _forget(self, request_id: str) -> None:
        copy = self.copies.forget(request_id)
        if copy is not None and copy.copy_id in self._undecided:
            self._settle_early(copy.copy_id)

    def _settle_early(self, copy_id: int) -> None:
        """A copy was forgotten or its load ended before its save was confirmed: the decision stands as executed."""
        situation, decision, identity = self._undecided.pop(copy_id)
        self._count(decision, situation.cause)
        self._write(situation, decision, identity)
        self.accounts.copies_lost([identity["preemption_id"]])

    # ---- at start-up, and what the engine is ----

    def _draw_seed(self, rank: int) -> int:
        """Seed of the policy's draws: another one for each engine core and each start, so that no two logs share
        their coins. Recorded in the trace's header."""
        text = f"{self.settings.seed}/{rank}/{self.core}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")

    @property
    def _captures_routed_experts(self) -> bool:
        """vLLM 0.33, with ``--enable-return-routed-experts``; earlier versions are refused with it."""
        return getattr(self._scheduler, "aux_output_connector", None) is not None

    @property
    def _step_number(self) -> int:
        """The step a preemption now belongs to."""
        return self._step.number if self._scheduling else self._steps

    @property
    def _block_size(self) -> int:
        return int(self._scheduler.block_size)

    def _show_policy(self, value: int) -> None:
        self.tally.set("cost_model", value, policy=self.judge.policy.label, digest=self.judge.digest)


def _keep(recording: Recording | None, judge: Judge) -> None:
    if recording is not None:
        recording.close()
    judge.close()
