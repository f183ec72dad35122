"""The plugin's controller on a virtual clock: it decides and records as in a server, and hides no mistake."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from kvpolicy import policy as policies
from kvpolicy.policy import Decider, Policy
from kvpolicy.simulator import DecisionObserver, Server, Sink
from kvpolicy.trace import Row
from kvpolicy_vllm.plugin.controller import Controller
from kvpolicy_vllm.plugin.host_copies import CopyBook
from kvpolicy_vllm.plugin.observers import Observer, Pending
from kvpolicy_vllm.simulator.clock import VirtualClock

ROWS = 1000
"""Rows of one table that are handed to the sink at a time."""


def name_of(number: int) -> str:
    """A request's name within vLLM, which breaks ties by it."""
    return f"{number:012d}"


def number_of(name: str) -> int:
    return int(name)


class SinkWriter:
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

    def flush_soon(self) -> None:
        """Nobody ends a simulation unasked."""

    def close(self) -> None:
        for table in self._rows:
            self._hand_over(table)

    def _hand_over(self, table: str) -> None:
        rows = self._rows[table]
        if rows:
            self._sink.add(table, list(rows))
            rows.clear()


class DecisionReporter(Observer):
    """Hands every decision to whoever asked for them."""

    def __init__(self, on_decision: DecisionObserver) -> None:
        self._on_decision = on_decision

    def decided(self, pending: Pending) -> None:
        self._on_decision(pending.decision)


class SimulatedController(Controller):
    """Requests are named by their numbers, they are nobody's; whatever goes wrong is an error."""

    def __init__(
        self,
        core: str,
        server: Server,
        policy: Policy,
        seed: int,
        clock: VirtualClock,
        sink: Sink | None,
        on_decision: DecisionObserver | None,
    ) -> None:
        super().__init__(
            core,
            Decider(policy, random.Random(seed)),
            CopyBook(server.host_blocks, 1, server.block_bytes),
            server.segment_bytes or server.block_bytes,
            clock,
            _raise,
            policies.load,
        )
        if sink is not None:
            self.record_into(SinkWriter(sink), lambda request_id: str(number_of(request_id)))
        if on_decision is not None:
            self.observers.add(DecisionReporter(on_decision))

    @property
    def disturbed(self) -> bool:
        """Whether the step just scheduled took somebody's blocks or brings saves."""
        return bool(self._step.lost or self._step.saves)

    def counted(self, name: str, label: str = "") -> int:
        """Sum of a counter, of one label alone where it is given."""
        parts = ((key.split("|"), value) for key, value in self.metrics.tally.totals.items())
        return round(sum(value for key, value in parts if key[0] == name and (not label or label in key)))

    def arrived(self, request: Any) -> None:
        """When it came, not when the engine next looked."""
        self.observers.tell("arrived", request, request.arrival_time)


def _raise(what: str) -> None:
    raise  # called while an exception is handled


def take_control(
    scheduler: Any,
    core: str,
    server: Server,
    policy: Policy,
    seed: int,
    clock: VirtualClock,
    sink: Sink | None,
    on_decision: DecisionObserver | None,
) -> SimulatedController:
    """Put a simulated controller in the place of the one that scheduler and connector were made with."""
    controller = SimulatedController(core, server, policy, seed, clock, sink, on_decision)
    scheduler.connector.controller.close()
    scheduler.connector.controller = scheduler.kvpolicy = controller
    return controller
