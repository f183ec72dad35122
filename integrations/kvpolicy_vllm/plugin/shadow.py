"""Shadow mode: decisions are counted beside what is executed, and nothing is kept in host memory.

Made by :mod:`kvpolicy_vllm.plugin.assembly` on the scheduler side and by :mod:`kvpolicy_vllm.plugin.connector` in the
workers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvpolicy_vllm.plugin.copiers.base import Copier, CopyError
from kvpolicy_vllm.plugin.messages import Job
from kvpolicy_vllm.plugin.observers import Observer, Pending, Tally


class ShadowCounter(Observer):
    """Counts, of every preemption in shadow mode, what was intended, and what both options were expected to cost."""

    trouble = "a decision in shadow mode could not be counted"

    def __init__(self, tally: Tally, is_on: Callable[[], bool]) -> None:
        self._tally, self._is_on = tally, is_on

    def executed(self, pending: Pending) -> None:
        if not self._is_on():  # as the control file said
            return
        decision = pending.decision
        if len(decision.options) < 2:
            self._tally.add("shadow_untold", reason=decision.reason or "one_option")
            return
        self._tally.add("shadow_preemptions", intended=decision.intended)
        costs = {option.kind: cost for option, cost in zip(decision.options, decision.costs, strict=False)}
        if not costs or any(cost.extrapolated for cost in costs.values()):
            self._tally.add("shadow_untold", reason="extrapolated" if costs else "no_prediction")
            return
        for role, kind in (("intended", decision.intended), ("executed", "recompute")):
            self._tally.add("shadow_cost_microseconds", costs[kind].engine_s * 1e6, option=role)

    def begin_afresh(self) -> bool:
        """Counters have no partial state, so this observer is never dropped."""
        return True


class ShadowCopier(Copier):
    """Takes no host memory and copies nothing: whatever it is asked for fails, and the request is recomputed."""

    def __init__(self, device_segments: list[torch.Tensor]) -> None:
        super().__init__(device_segments, 0, False, None)

    def host_pool(self, slots: int) -> list[torch.Tensor]:
        return []

    def copy_out(self, job: Job, urgent: int) -> None:
        raise CopyError("a server in shadow mode keeps nothing in host memory")

    def copy_in(self, job: Job) -> None:
        raise CopyError("a server in shadow mode has nothing in host memory")
