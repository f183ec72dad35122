"""The plugin's controller on a virtual clock: it decides and records as in a server, and hides no mistake."""

from __future__ import annotations

from collections import deque
from typing import Any

from kvpolicy.policy import Policy
from kvpolicy.simulator import Server, Sink
from kvpolicy_vllm.plugin.controller import Controller
from kvpolicy_vllm.plugin.recording import Row
from kvpolicy_vllm.plugin.settings import Settings
from kvpolicy_vllm.simulator.clock import VirtualClock

ROWS = 1000
"""Rows of one table that are handed to the sink at a time."""


class SinkRecording:
    """Rows for a :class:`Sink`, some at a time."""

    def __init__(self, sink: Sink) -> None:
        self.dropped = 0
        self._sink = sink
        self._rows: dict[str, deque[Row]] = {}

    def add(self, table: str, row: Row) -> None:
        rows = self._rows.setdefault(table, deque())
        rows.append(row)
        if len(rows) >= ROWS:
            self._hand_over(table)

    def close(self) -> None:
        for table in self._rows:
            self._hand_over(table)

    def _hand_over(self, table: str) -> None:
        rows = self._rows[table]
        if rows:
            self._sink.add(table, list(rows))
            rows.clear()


class SimulatedController(Controller):
    """Requests keep their names, they are nobody's; an error in deciding is an error."""

    def __init__(
        self, scheduler: Any, server: Server, policy: Policy, seed: int, clock: VirtualClock, sink: Sink | None
    ) -> None:
        super().__init__(
            Settings(policy=policy.name, seed=seed, source="simulation", pin_memory=False),
            scheduler.vllm_config,
            scheduler.kv_cache_config,
            server.host_blocks,
            server.block_bytes,
            clock,
            policy,
            None if sink is None else SinkRecording(sink),
        )
        self.core = "simulated"
        self._segment_bytes = server.segment_bytes or server.block_bytes

    @property
    def lost_now(self) -> bool:
        """Whether the step just scheduled took somebody's blocks."""
        return bool(self._step.lost)

    def anonymous(self, request_id: str) -> str:
        return request_id

    def arrived(self, request: Any) -> None:
        """When it came, not when the engine next looked."""
        if self.journal is not None:
            self.journal.arrived(request, request.arrival_time)

    def _complain(self, reason: str, what: str) -> None:
        raise  # called while an exception is handled


def take_control(
    scheduler: Any, server: Server, policy: Policy, seed: int, clock: VirtualClock, sink: Sink | None
) -> SimulatedController:
    """Put a simulated controller in the place of the one that scheduler and connector were made with."""
    controller = SimulatedController(scheduler, server, policy, seed, clock, sink)
    scheduler.connector.controller.close()
    scheduler.connector.controller = scheduler.kvpolicy = controller
    return controller
