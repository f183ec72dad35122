"""Swapped preemptions on the scheduler side: what each executes becomes final, and its load is reported."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace

from kvpolicy.attribution.ledger import Ledger, OpenPreemption
from kvpolicy.policy.decision import gain_per_block
from kvpolicy_vllm.plugin.block_tables import Position
from kvpolicy_vllm.plugin.host_copies import Copy, CopyBook, Settled
from kvpolicy_vllm.plugin.messages import NO_REQUEST
from kvpolicy_vllm.plugin.observers import Observers, Pending


class Swaps:
    """Swapped preemptions, from the decision to the end of the load.

    What is executed is final only when the first save is confirmed, has failed or is forgotten, or when the step that
    preempts had nothing to save.
    """

    def __init__(self, copies: CopyBook, ledger: Ledger[OpenPreemption], observers: Observers) -> None:
        self._copies, self._ledger, self._observers = copies, ledger, observers
        self.undecided: dict[str, Pending] = {}
        """Decisions whose execution is not yet final, by preemption."""

    def begin(
        self,
        pending: Pending,
        contents: Iterable[tuple[Hashable | None, int]],
        positions: tuple[Position, ...] | None = None,
    ) -> None:
        """Keep what the request loses. ``contents``: hash and device block of each of its blocks; ``positions``: of
        these in its block tables, None where they are the first ones of the only table."""
        identity = pending.identity
        self.forget(identity.request_id)
        tokens = pending.situation.computed_tokens
        gain = gain_per_block(pending.situation, pending.decision.options, pending.decision.costs)
        copy = self._copies.keep(identity.request_id, identity.preemption_id, tokens, contents, gain)
        copy.situation, copy.positions = pending.situation, positions
        self.undecided[identity.preemption_id] = pending

    def settled(self, settled: Settled) -> None:
        """A copy is finished in one direction on all ranks."""
        copy = settled.copy
        if copy.request_id == NO_REQUEST:
            return
        opened = self._ledger.open_preemption(copy.request_id)
        if settled.direction == "save":
            self._saved(copy.preemption_id, settled.ok, opened)
            return
        self._settle(copy.preemption_id)  # where the load has ended before all ranks confirmed the save
        if copy.orphan:
            return
        if not settled.ok:
            self.recomputed_after_all(opened, "load_failed")
            return
        self._observers.tell("loaded", copy.request_id, copy.load_tokens)
        if opened is not None:
            opened.loaded_tokens = copy.load_tokens

    def step_taken(self) -> None:
        """The jobs of a step were taken: settle what was given up for want of slots, and what had nothing to save.

        In this order: a copy may be given up in the step that made it."""
        for copy in self._copies.take_given_up():
            self._given_up(copy)
        for copy in self._copies.take_begun():
            self._settle(copy.preemption_id)

    def _saved(self, preemption_id: str, ok: bool, opened: OpenPreemption | None) -> None:
        pending = self.undecided.pop(preemption_id, None)
        if pending is None:  # settled before
            return
        if not ok:
            self._execute_recompute(pending, "save_failed", opened)
        self._observers.tell("executed", pending)

    def _given_up(self, copy: Copy) -> None:
        opened = self._ledger.open_preemption(copy.request_id)
        pending = self.undecided.pop(copy.preemption_id, None)
        if pending is not None:
            self._execute_recompute(pending, "host_full", opened)
            self._observers.tell("executed", pending)
        elif opened is not None and opened.preemption_id == copy.preemption_id:
            self.recomputed_after_all(opened, "host_full")

    def _execute_recompute(self, pending: Pending, reason: str, opened: OpenPreemption | None) -> None:
        pending.decision = replace(pending.decision, executed="recompute", reason=reason)
        if opened is not None and opened.preemption_id == pending.identity.preemption_id:
            opened.executed, opened.mixed = "recompute", True

    def recomputed_after_all(self, opened: OpenPreemption | None, reason: str) -> None:
        """The copy was not loaded: loading failed, vLLM did not load, or the copy was given up. The cost is neither
        option's."""
        self._observers.tell("fell_back", reason)
        if opened is not None:
            opened.executed, opened.mixed = "recompute", True

    def forget(self, request_id: str) -> None:
        """The request no longer needs its copy."""
        copy = self._copies.forget(request_id)
        if copy is not None:
            self._settle(copy.preemption_id)

    def forget_all(self) -> None:
        """Everything saved or queued is stale, as after a change of weights."""
        for preemption_id in list(self.undecided):
            self._settle(preemption_id)
        self._copies.forget_all()

    def close(self) -> None:
        """The engine shuts down: report pending decisions as they stand."""
        for pending in self.undecided.values():
            self._observers.tell("executed", pending)
        self.undecided.clear()

    def _settle(self, preemption_id: str) -> None:
        """The decision is final, if it was not before."""
        pending = self.undecided.pop(preemption_id, None)
        if pending is not None:
            self._observers.tell("executed", pending)
