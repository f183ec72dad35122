"""A preemption: what is known about it, what the policy makes of it, what it turns out to cost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from kvpolicy import policy as policies
from kvpolicy.attribution.ledger import Ledger
from kvpolicy.events import Outcome, Preemption
from kvpolicy.features import lacking_blocks, short_blocks
from kvpolicy.policy import Decider, Feedback, Policy
from kvpolicy.simulator.base import NULL_BLOCK, DecisionObserver, Server
from kvpolicy.simulator.builtin.host_copies import CopyBook
from kvpolicy.simulator.builtin.live_request import Account, Copy, Live, Step
from kvpolicy.simulator.builtin.scheduler import Scheduler
from kvpolicy.simulator.builtin.trace_writer import Journal
from kvpolicy.simulator.summary import Tallied


class Preemptions:
    """Opens, decides, follows and closes the preemptions of a run."""

    def __init__(
        self,
        server: Server,
        policy: Policy,
        seed: int,
        journal: Journal,
        tallied: Tallied,
        on_decision: DecisionObserver | None = None,
    ) -> None:
        self._server = server
        self._decider = Decider(policy, random.Random(seed))
        self._journal = journal
        self._tallied = tallied
        self._on_decision = on_decision
        self.ledger: Ledger[Account] = Ledger()
        self._count = 0
        self._closing: list[Account] = []

    def preempting(self, live: Live, scheduler: Scheduler, copies: CopyBook, step: Step, now_s: float) -> None:
        """``live`` has left the running list and still holds its blocks: decide, and queue a save where it swaps."""
        self._count += 1
        preemption_id = f"{self._journal.core}-{self._count}"
        situation = situation_of(live, scheduler, copies, self._server, now_s)
        decision = self._decider.decide(situation, policies.why_no_swap(situation))
        if self._on_decision is not None:
            self._on_decision(decision)
        option = next(one for one in decision.options if one.kind == decision.executed)
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
            copies.save(live, account, situation.held_blocks)
        else:
            self._decided(account)
        step.lost.append(preemption_id)
        earlier = self.ledger.of(live)
        self._close(earlier, self.ledger.preempted(account))

    def _decided(self, account: Account) -> None:
        """Nothing can change any more about what was executed."""
        self._tallied.preemptions[account.executed] += 1
        self._journal.decision(account)

    def saved(self, copy: Copy) -> None:
        """Its save is through: only now the decision is recorded, as in a server."""
        if not copy.forgotten:
            self._decided(copy.account)

    def forget(self, live: Live, copies: CopyBook) -> None:
        """The request's copy is of no use any more."""
        unsaved = copies.forget(live)
        if unsaved is not None:
            self._decided(unsaved.account)

    def count(self, step: Step) -> None:
        """What of the step is computed again; computed tokens are advanced past it."""
        lost = self.ledger.lost
        if lost.keys().isdisjoint(step.scheduled.keys()):
            return
        for live, new in step.scheduled.items():
            if live in lost:
                self.ledger.count(step, live, live.computed - new, live.computed)
        for part in step.repeated:
            part.opened.request.recomputed += part.tokens

    def back(self, step: Step, now_s: float) -> None:
        """The step's output is there, and with it those who are where they were before."""
        for account in step.back:
            self._close(account, account.close("resumed", now_s))

    def finished(self, live: Live, copies: CopyBook, now_s: float) -> None:
        """The request's last token is out."""
        self.forget(live, copies)
        if live in self.ledger.lost:
            account = self.ledger.of(live)
            self._close(account, self.ledger.gone(live, now_s))

    def settle(self) -> None:
        """Tell of the preemptions that nothing more will be charged to."""
        if not self._closing:
            return
        waiting = []
        for account in self._closing:
            if account.busy or account.outstanding:
                waiting.append(account)
            else:
                assert account.outcome is not None
                outcome = replace(account.outcome, engine_s=account.engine_s, others_delay_s=account.others_s)
                self._journal.outcome(outcome)
                self._learn(account, outcome)
        self._closing = waiting

    def _close(self, account: Account | None, outcome: Outcome | None) -> None:
        if account is not None:
            account.outcome = outcome
            self._closing.append(account)

    def _learn(self, account: Account, outcome: Outcome) -> None:
        if outcome.ended == "resumed" and self._decider.learns:
            self._decider.learn(Feedback(account.situation, account.option, outcome.engine_s, outcome.victim_delay_s))


def situation_of(live: Live, scheduler: Scheduler, copies: CopyBook, server: Server, now_s: float) -> Preemption:
    """What is known about ``live``, which is not in the running list any more. O(its blocks + running requests)."""
    size = server.block_size
    held = -(-live.computed // size)
    return Preemption(
        time_s=now_s,
        computed_tokens=live.computed,
        prompt_tokens=live.request.prompt_tokens,
        output_tokens=live.outputs,
        block_size=size,
        block_bytes=server.block_bytes,
        segment_bytes=server.segment_bytes or server.block_bytes,
        held_blocks=held,
        shared_blocks=scheduler.pool.shared(live, held),
        hashed_blocks=min(live.cached, held),
        device_blocks=server.device_blocks + NULL_BLOCK,
        free_blocks=scheduler.pool.free,
        short_blocks=short_blocks(_lacking(live, scheduler, server), scheduler.pool.free),
        host_blocks=copies.total,
        free_host_blocks=copies.free,
        running_requests=len(scheduler.running),
        waiting_requests=scheduler.waiting_requests,
        batch_tokens=sum(other.computed for other in scheduler.running),
        queued_save_bytes=copies.queued_bytes("save"),
        queued_load_bytes=copies.queued_bytes("load"),
        earlier_preemptions=live.preemptions,
        priority=live.request.priority,
        cause="memory",
    )


def _lacking(victim: Live, scheduler: Scheduler, server: Server) -> Iterator[int]:
    """Blocks that each running request and the victim, in scheduling order, lack for what it computes next."""
    size, budget = server.block_size, server.token_budget
    for live in (*scheduler.running, victim):
        ahead = min(max(1, live.tokens + live.placeholders - live.computed), budget)
        yield lacking_blocks(live.computed, ahead, live.held, size)
