"""Whose blocks are taken when an allocation fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpolicy.simulator.base import Scheduling
from kvpolicy.simulator.builtin.live import Live


class Victims(Protocol):
    """Chooses one of the running requests. Pure: equal arguments, equal choice."""

    def choose(self, running: Sequence[Live]) -> int:
        """Index of the victim. ``running``: in the order of scheduling; read them, change nothing."""
        ...


@dataclass(frozen=True, slots=True)
class VllmVictims:
    """As vLLM does: the last one that was admitted; under priority scheduling the least urgent, latest one."""

    scheduling: Scheduling

    def choose(self, running: Sequence[Live]) -> int:
        if self.scheduling == "fcfs":
            return len(running) - 1
        ranks = [(live.request.priority, live.arrival_s) for live in running]
        return ranks.index(max(ranks))
