"""Counts what a simulated run computes, its preemptions by cause and what they cost, for :mod:`kvpolicy.headroom`.

Both simulators report to it. All prices are those of the run's own hardware model, so nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from kvpolicy.attribution.ledger import Repeated
from kvpolicy.events import Cause, Decision, Preemption
from kvpolicy.headroom import Headroom, Work, headroom, saving_s
from kvpolicy.simulator.base import Server, StepLoad, Times
from kvpolicy.simulator.oracle import recompute_s_of, swap_s_of


class WorkCount:
    """Sums over the steps and preemptions of one run."""

    def __init__(self, server: Server, times: Times) -> None:
        self._server, self._times = server, times
        self._decoded_tokens = self._recomputed_tokens = 0
        self._decode_s = self._recompute_s = self._busy_s = self._swap_s = 0.0
        self._spent_s: dict[str, float] = {}
        """By preemption: what it has cost so far."""
        self._other_s: dict[str, float] = {}
        """By preemption: what its other option would have cost; infinite without one."""
        self.causes: dict[Cause, int] = {}
        """Preemptions by cause; causes that did not occur are left out."""

    def preempted(self, preemption_id: str, situation: Preemption, decision: Decision) -> None:
        """Price the preemption's options: an executed swap, and the option that is not executed.

        A recompute that is executed is priced by the steps in which it runs.
        """
        self.causes[situation.cause] = self.causes.get(situation.cause, 0) + 1
        swap_s = sum(swap_s_of(situation, self._server, self._times))
        if decision.executed == "swap":
            self._swap_s += swap_s
            self._spent_s[preemption_id] = swap_s
            self._other_s[preemption_id] = recompute_s_of(situation, self._server, self._times)
        else:
            feasible = any(option.kind == "swap" for option in decision.options)
            self._spent_s[preemption_id] = 0.0
            self._other_s[preemption_id] = swap_s if feasible else inf

    def decoded(self, tokens: int, computes_s: float, busy_s: float) -> None:
        """Steps in which nothing but decoding happened; seconds as for :meth:`step`."""
        self._decoded_tokens += tokens
        self._decode_s += computes_s
        self._busy_s += busy_s

    def step(
        self, load: StepLoad, rest: StepLoad, computes_s: float, busy_s: float, repeated: Sequence[Repeated[Any]] = ()
    ) -> None:
        """A step that computes something. ``rest``: its load without the ``repeated`` parts. ``computes_s``: without
        what copies add, ``busy_s``: with it."""
        self._busy_s += busy_s
        decodes = StepLoad(rest.decode_requests, rest.decode_requests, rest.kv_read_tokens, 0, 0, 0)
        self._decoded_tokens += decodes.decode_requests
        self._decode_s += computes_s if decodes == load else self._seconds(decodes)
        if repeated:
            self._recomputed(repeated, max(0.0, computes_s - self._seconds(rest)))

    def _recomputed(self, repeated: Sequence[Repeated[Any]], seconds: float) -> None:
        """Preemptions share the price of a step's recomputed tokens in proportion to their number."""
        tokens = sum(part.tokens for part in repeated)
        self._recomputed_tokens += tokens
        self._recompute_s += seconds
        for part in repeated:
            self._spent_s[part.preemption_id] += seconds * part.tokens / tokens

    def _seconds(self, load: StepLoad) -> float:
        return self._times.step_s(load) if load.scheduled_tokens else 0.0

    def headroom(self) -> Headroom:
        """What there was to win in the run so far."""
        work = Work(
            self._decoded_tokens, self._recomputed_tokens, self._decode_s, self._recompute_s, self._busy_s, self._swap_s
        )
        return headroom(work, saving_s(list(self._spent_s.values()), list(self._other_s.values())))
