"""A preemption: what is known about it, what the policy makes of it, what it turns out to cost."""

from __future__ import annotations

import random

from kvpolicy.events import Ending, Preemption
from kvpolicy.policy import Decider, Feedback, Policy
from kvpolicy.simulator.base import NULL_BLOCK, Server
from kvpolicy.simulator.builtin import ledger
from kvpolicy.simulator.builtin.copies import CopyBook
from kvpolicy.simulator.builtin.journal import Journal
from kvpolicy.simulator.builtin.live import Account, Copy, Live, Step
from kvpolicy.simulator.builtin.scheduler import Scheduler
from kvpolicy.simulator.summary import Tallied


class Preemptions:
    """Opens, decides, follows and closes the preemptions of a run."""

    def __init__(self, server: Server, policy: Policy, seed: int, journal: Journal, tallied: Tallied) -> None:
        self._server = server
        self._decider = Decider(policy, random.Random(seed))
        self._journal = journal
        self._tallied = tallied
        self._count = 0
        self._closing: list[Account] = []

    def preempting(self, live: Live, scheduler: Scheduler, copies: CopyBook, step: Step, now_s: float) -> None:
        """``live`` has left the running list and still holds its blocks: decide, and queue a save where it swaps."""
        self._count += 1
        preemption_id = f"{self._journal.core}-{self._count}"
        situation = situation_of(live, scheduler, copies, self._server, now_s)
        decision = self._decider.decide(situation, _why_no_swap(situation))
        option = next(one for one in decision.options if one.kind == decision.executed)
        account = Account(
            preemption_id, live, situation, decision, option, live.computed, now_s, step.number, live.preemptions
        )
        if option.kind == "swap":
            self.forget(live, copies)
            copies.save(live, account, situation.held_blocks)
        else:
            self._decided(account)
        step.lost.append(account)
        if live.open is not None:
            self._close(live.open, "superseded", now_s)
        ledger.preempted(live, account)

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

    def back(self, step: Step, now_s: float) -> None:
        """The step's output is there, and with it those who are where they were before."""
        for account in step.back:
            self._close(account, "resumed", now_s)

    def finished(self, live: Live, copies: CopyBook, now_s: float) -> None:
        """The request's last token is out."""
        self.forget(live, copies)
        for _, account in live.lost:
            account.busy -= 1
        live.lost = []
        if live.open is not None:
            self._close(live.open, "aborted", now_s)
            live.open = None

    def settle(self) -> None:
        """Tell of the preemptions that nothing more will be charged to."""
        if not self._closing:
            return
        waiting = []
        for account in self._closing:
            if account.busy:
                waiting.append(account)
            else:
                self._journal.outcome(account)
                self._learn(account)
        self._closing = waiting

    def _close(self, account: Account, ended: Ending, now_s: float) -> None:
        ledger.close(account, ended, now_s)
        self._closing.append(account)

    def _learn(self, account: Account) -> None:
        if account.ended != "resumed" or not self._decider.learns:
            return
        delay_s = ledger.outcome(account).victim_delay_s
        self._decider.learn(Feedback(account.situation, account.option, account.engine_s, delay_s))


def _why_no_swap(situation: Preemption) -> str:
    if situation.computed_tokens == 0:
        return "nothing_computed"
    return "host_full" if situation.free_host_blocks < situation.held_blocks else ""


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
        short_blocks=_short_blocks(live, scheduler, server),
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


def _short_blocks(victim: Live, scheduler: Scheduler, server: Server) -> int:
    """Blocks the failed allocation lacked, as the plugin can tell: see its module ``situation``."""
    free = scheduler.pool.free
    for live in (*scheduler.running, victim):
        ahead = min(max(1, live.tokens + live.placeholders - live.computed), server.token_budget)
        lacking = -(-(live.computed + ahead) // server.block_size) - live.held
        if lacking > free:
            return lacking - free
    return 0
