"""Preemptions of a run: the situation, the policy's decision, and the cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from kvpolicy import policy as policies
from kvpolicy.attribution.ledger import Ledger
from kvpolicy.cost.block_price import RENEWED_STEPS, Beside, block_price
from kvpolicy.events import Cause, Outcome, Preemption, as_taken_out
from kvpolicy.features import lacking_blocks, short_blocks
from kvpolicy.policy import Decider, Feedback, Policy
from kvpolicy.policy.decision import at_resume
from kvpolicy.simulator.base import NULL_BLOCK, DecisionObserver, Server
from kvpolicy.simulator.builtin.host_copies import HostPool
from kvpolicy.simulator.builtin.live_request import Account, CopyJob, LiveRequest, Step
from kvpolicy.simulator.builtin.scheduler import Scheduler
from kvpolicy.simulator.builtin.trace_writer import TraceWriter
from kvpolicy.simulator.summary import SummaryBuilder
from kvpolicy.survival import Survival


class Preemptions:
    """Decides on the preemptions of a run and follows each until its outcome is recorded."""

    def __init__(
        self,
        server: Server,
        policy: Policy,
        seed: int,
        trace_writer: TraceWriter,
        tallied: SummaryBuilder,
        on_decision: DecisionObserver | None = None,
    ) -> None:
        self._server = server
        self._decider = Decider(policy, random.Random(seed))
        self._trace_writer = trace_writer
        self._tallied = tallied
        self._on_decision = on_decision
        self.ledger: Ledger[Account] = Ledger()
        self.survival = Survival()
        self._count = 0
        self._closing: list[Account] = []
        self._worth: dict[tuple[int, bool, float], bool] = {}
        """What :meth:`worth_storing` was asked, and the answer; as all of these until :data:`RENEWED_STEPS` are over.
        """
        self._hits: dict[LiveRequest, tuple[tuple[int, int, int], bool]] = {}
        """Of waiting requests: what was asked about a hit last (see :meth:`loads_hit`), and the answer."""
        self._block_price: Callable[[int], float] | None = None
        self._window, self._beside = 0, Beside()

    def step_begins(self, number: int, running: int) -> None:
        """Predict costs of what is cached anew now and then, when a server does. ``running``: requests that run, in
        this step and in those since the last call."""
        window = number // RENEWED_STEPS
        if window != self._window:
            for _ in range(min(window - self._window, 2)):  # further ones change nothing
                self._beside.renew()
                self._beside.add(running)
            self._window, self._worth, self._hits, self._block_price = window, {}, {}, None
        self._beside.add(running)

    def block_price(self, index: int) -> float:
        """What a block saves that is loaded, by its index in a prompt, by the policy's predictions and what it has
        learned."""
        if self._block_price is None:
            server, predict = self._server, self._decider.predict
            self._block_price = block_price(
                predict, server.block_size, server.block_bytes, server.segment_bytes, self._beside.most
            )
        return self._block_price(index)

    def worth_storing(
        self, blocks: int, read_s: float = 0.0, *, scheduler: Scheduler, copies: HostPool, saved: bool = False
    ) -> bool:
        """Whether a request would load so many leading blocks, if nothing else were under way. ``read_s``: seconds that
        it waits first, for files. ``saved``: whether they have to be saved to host memory before."""
        asked = blocks, saved, read_s
        known = self._worth.get(asked)
        if known is None:
            situation = hit_situation(None, blocks * self._server.block_size, 0, scheduler, copies, self._server)
            if saved:
                situation = replace(situation, save_blocks=float(blocks))
            known = self._worth[asked] = self._decider.loads_hit(situation, read_s)
        return known

    def preempting(
        self, live: LiveRequest, scheduler: Scheduler, copies: HostPool, step: Step, now_s: float, cause: Cause
    ) -> None:
        """Decide for a request that has left the running list and still holds its blocks; queue a save for a swap."""
        self._count += 1
        preemption_id = f"{self._trace_writer.core}-{self._count}"
        situation = self._situation_of(live, scheduler, copies, now_s, cause)
        decision = self._decider.decide(situation, policies.why_no_swap(situation))
        if self._on_decision is not None:
            self._on_decision(decision)
        self._tallied.work.preempted(preemption_id, situation, decision)
        option = next(candidate for candidate in decision.options if candidate.kind == decision.executed)
        account = Account(
            preemption_id=preemption_id,
            request=live,
            executed=option.kind,
            tokens=live.computed,
            preempted_s=now_s,
            first_step=step.number,
            situation=situation,
            decision=decision,
            option=option,
            generation=live.preemptions,
        )
        if option.kind == "swap":
            self.forget(live, copies)
            gain = policies.gain_per_block(situation, decision.options, decision.costs)
            copies.keep(live, account, scheduler.pool.contents(live, situation.held_blocks), gain)
        else:
            self._settle(account)
        self.survival.preempted(preemption_id, situation)
        step.lost.append(preemption_id)
        earlier = self.ledger.open_preemption(live)
        self._close(earlier, self.ledger.add(account))

    def price(self, live: LiveRequest, scheduler: Scheduler, copies: HostPool, now_s: float) -> float | None:
        """Predicted engine seconds of displacing a running request, by the cheaper option; None without predictions."""
        situation = as_taken_out(self._situation_of(live, scheduler, copies, now_s, "displaced"))
        return self._decider.price(situation, policies.why_no_swap(situation))

    def _situation_of(
        self, live: LiveRequest, scheduler: Scheduler, copies: HostPool, now_s: float, cause: Cause
    ) -> Preemption:
        gain = self._decider.gain_per_block
        return situation_of(live, scheduler, copies, self._server, self.survival, now_s, cause, gain)

    def _settle(self, account: Account) -> None:
        """Count and record the decision, once what is executed is final."""
        if not account.recorded:
            account.recorded = True
            self._tallied.preemptions[account.executed] += 1
            self._trace_writer.decision(account)

    def copied(self, job: CopyJob) -> None:
        """A save or load is complete: what its preemption executed is final, as in a server."""
        if job.account is not None:
            self._settle(job.account)

    def loads(self, live: LiveRequest, total_tokens: int, local: int, scheduler: Scheduler, copies: HostPool) -> bool:
        """Whether the request, which is about to come back, loads what it lacks. Asked anew when its local hit or the
        loads before it change."""
        copy = live.copy
        assert copy is not None and copy.account is not None
        asked = local, copies.queued_bytes("load")
        if copy.asked_at_resume != asked:
            situation = at_resume(
                copy.account.situation, total_tokens, local, scheduler.pool.free, len(scheduler.running),
                copies.queued_bytes("save"), copies.queued_bytes("load"),
            )  # fmt: skip
            copy.asked_at_resume, copy.loads = asked, self._decider.loads(situation)
        return copy.loads

    def loads_hit(
        self, live: LiveRequest, total_tokens: int, local: int, scheduler: Scheduler, copies: HostPool
    ) -> bool:
        """Whether a request without a copy of its own loads what host memory has beyond the local hit. Asked anew when
        either changes, or the loads before it."""
        asked = local, total_tokens, copies.queued_bytes("load")
        known = self._hits.get(live)
        if known is None or known[0] != asked:
            situation = hit_situation(live, total_tokens, local, scheduler, copies, self._server)
            known = self._hits[live] = asked, self._decider.loads_hit(situation)
        return known[1]

    def admitted(self, live: LiveRequest) -> None:
        """The request waits no longer."""
        self._hits.pop(live, None)

    def reads(
        self, live: LiveRequest, total_tokens: int, local: int, read_s: float, scheduler: Scheduler, copies: HostPool
    ) -> bool:
        """Whether it reads what it has in files, which takes so many seconds, before it loads all beyond the local hit:
        it does unless computing that is predicted to take less."""
        situation = hit_situation(live, total_tokens, local, scheduler, copies, self._server)
        return self._decider.loads_hit(situation, read_s)

    def not_loaded(self, live: LiveRequest, copies: HostPool) -> None:
        """The request was admitted without a load: its copy is not needed, or it is better to compute the rest."""
        copy = live.copy
        assert copy is not None and copy.account is not None
        self.forget(live, copies)
        if not copy.loads:
            copy.account.executed, copy.account.mixed = "recompute", True

    def jobs_taken(self, copies: HostPool) -> None:
        """The copies of a step were taken: settle what was given up for want of slots, and what had nothing to save.

        In this order: a copy may be given up in the step that made it."""
        for account in copies.take_given_up():
            self._recompute_after_all(account)
        for account in copies.take_begun():
            self._settle(account)

    def _recompute_after_all(self, account: Account) -> None:
        account.executed, account.mixed = "recompute", True
        if not account.recorded:
            account.decision = replace(account.decision, executed="recompute", reason="host_full")
        self._settle(account)

    def forget(self, live: LiveRequest, copies: HostPool) -> None:
        """Drop the request's copy; what is executed is final then."""
        copy = copies.forget(live)
        if copy is not None and copy.account is not None:
            self._settle(copy.account)

    def count(self, step: Step) -> None:
        """Count the step's repeated tokens. Computed tokens must already include the step."""
        scheduled = step.scheduled
        for live in [live for live in self.ledger.lost if live in scheduled]:
            self.ledger.count(step, live, live.computed - scheduled[live], live.computed)
        for part in step.repeated:
            part.opened.request.recomputed += part.tokens

    def back(self, step: Step, now_s: float) -> None:
        """Close the preemptions whose requests are back at their lost token with this step's output."""
        for account in step.back:
            self._close(account, account.close("resumed", now_s))

    def finished(self, live: LiveRequest, copies: HostPool, now_s: float) -> None:
        """Close the request's preemption, if one is open, and drop its copy: its last token is out."""
        self.forget(live, copies)
        if live in self.ledger.lost:
            account = self.ledger.open_preemption(live)
            self._close(account, self.ledger.remove(live, now_s))

    def record_outcomes(self) -> None:
        """Record the outcomes of closed preemptions to which no later step will be charged."""
        if not self._closing:
            return
        still_open = []
        for account in self._closing:
            if account.busy or account.outstanding:
                still_open.append(account)
            else:
                assert account.outcome is not None
                outcome = replace(account.outcome, engine_s=account.engine_s, others_delay_s=account.others_s)
                self._trace_writer.outcome(outcome)
                self._learn(account, outcome)
        self._closing = still_open

    def close(self) -> None:
        """At the end of the run: record the outcomes of preemptions whose copies are still under way, without cost."""
        self.record_outcomes()
        for account in self._closing:
            assert account.outcome is not None
            self._trace_writer.outcome(account.outcome)
        self._closing = []

    def _close(self, account: Account | None, outcome: Outcome | None) -> None:
        if account is not None:
            account.outcome = outcome
            known = account.resumed and not account.mixed
            self.survival.closed(account.preemption_id, account.local_hit_tokens if known else None)
            self._closing.append(account)

    def _learn(self, account: Account, outcome: Outcome) -> None:
        if outcome.ended == "resumed" and not account.mixed and self._decider.learns:
            self._decider.learn(Feedback(account.situation, account.option, outcome.engine_s, outcome.victim_delay_s))


def situation_of(
    live: LiveRequest,
    scheduler: Scheduler,
    copies: HostPool,
    server: Server,
    survival: Survival,
    now_s: float,
    cause: Cause = "memory",
    gain_per_block: Callable[[Preemption], float | None] = lambda situation: None,
) -> Preemption:
    """The situation of ``live``, which has left the running list. Time: O(its blocks + running requests).

    ``gain_per_block``: predicts that of its copy, where host memory is short.
    """
    size = server.block_size
    held = -(-live.computed // size)
    shared, hashed = scheduler.pool.shared(live, held), min(live.cached, live.computed // size)
    hit_blocks = survival.hit_blocks(held, shared, hashed, scheduler.pool.free, size, cause)
    save_blocks = max(0.0, held - hit_blocks - copies.stored(live.keyed_blocks[int(hit_blocks) : hashed]))
    lacking = short_blocks(_lacking_by_request(live, scheduler, server), scheduler.pool.free)
    situation = Preemption(
        time_s=now_s,
        computed_tokens=live.computed,
        prompt_tokens=live.request.prompt_tokens,
        output_tokens=live.outputs,
        block_size=size,
        block_bytes=server.block_bytes,
        segment_bytes=server.segment_bytes or server.block_bytes,
        held_blocks=held,
        shared_blocks=shared,
        hashed_blocks=hashed,
        hit_blocks=hit_blocks,
        save_blocks=save_blocks,
        device_blocks=server.device_blocks + NULL_BLOCK,
        free_blocks=scheduler.pool.free,
        short_blocks=lacking if cause == "memory" else 0,
        host_blocks=copies.total,
        free_host_blocks=0,
        running_requests=len(scheduler.running),
        waiting_requests=scheduler.waiting_requests,
        batch_tokens=sum(other.computed for other in scheduler.running),
        queued_save_bytes=copies.queued_bytes("save"),
        queued_load_bytes=copies.queued_bytes("load"),
        earlier_preemptions=live.preemptions,
        priority=live.request.priority,
        cause=cause,
        absence_tokens=survival.absence_tokens(cause),
    )
    keyed = live.keyed_blocks[:hashed]
    free = copies.obtainable(live.computed, save_blocks, keyed, lambda: gain_per_block(situation))
    return replace(situation, free_host_blocks=free)


def hit_situation(
    live: LiveRequest | None, total_tokens: int, local: int, scheduler: Scheduler, copies: HostPool, server: Server
) -> Preemption:
    """The situation of a request that is about to be admitted and whose first ``total_tokens`` are all on the device,
    the ``local`` ones, or in host memory: as :func:`kvpolicy.policy.decision.at_resume` has it for a copy. None: one
    that is not there yet, for which no other copy is under way."""
    size, running = server.block_size, scheduler.running
    return Preemption(
        time_s=0.0,
        computed_tokens=total_tokens,
        prompt_tokens=total_tokens if live is None else live.request.prompt_tokens,
        output_tokens=0 if live is None else live.outputs,
        block_size=size,
        block_bytes=server.block_bytes,
        segment_bytes=server.segment_bytes or server.block_bytes,
        held_blocks=-(-total_tokens // size),
        shared_blocks=0,
        hashed_blocks=local // size,
        hit_blocks=float(local // size),
        save_blocks=0.0,
        device_blocks=server.device_blocks + NULL_BLOCK,
        free_blocks=scheduler.pool.free,
        short_blocks=0,
        host_blocks=copies.total,
        free_host_blocks=copies.free,
        running_requests=len(running),
        waiting_requests=scheduler.waiting_requests,
        batch_tokens=sum(other.computed for other in running),
        queued_save_bytes=0 if live is None else copies.queued_bytes("save"),
        queued_load_bytes=0 if live is None else copies.queued_bytes("load"),
        earlier_preemptions=0 if live is None else live.preemptions,
        priority=0 if live is None else live.request.priority,
        cause="memory",
        absence_tokens=0.0,
    )


def _lacking_by_request(victim: LiveRequest, scheduler: Scheduler, server: Server) -> Iterator[int]:
    """Blocks that each running request, then the victim, lacks for what it computes next."""
    size, budget = server.block_size, server.token_budget
    for live in (*scheduler.running, victim):
        next_tokens = min(max(1, live.tokens + live.placeholders - live.computed), budget)
        yield lacking_blocks(live.computed, next_tokens, live.held, size)
