"""The plugin's controller on a virtual clock: it decides and records as in a server, but raises every error."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

from kvpolicy import policy as policies
from kvpolicy.attribution.ledger import OpenPreemption, Repeated
from kvpolicy.caching import Hinted
from kvpolicy.caching import spec as caching
from kvpolicy.policy import Decider, Policy
from kvpolicy.request_marks import DEFAULT_CLASS, KEY, as_said
from kvpolicy.simulator import DecisionObserver, Server, Sink
from kvpolicy.simulator.work_count import WorkCount
from kvpolicy.trace import Row
from kvpolicy.workload import Request
from kvpolicy_vllm.plugin.assembly import key_in_cache
from kvpolicy_vllm.plugin.controller import Controller
from kvpolicy_vllm.plugin.host_copies import CopyBook
from kvpolicy_vllm.plugin.observers import Observer, Pending
from kvpolicy_vllm.plugin.prompt_cache import BlockPrices
from kvpolicy_vllm.simulator.clock import VirtualClock

ROWS = 1000
"""Rows of one table per call of the sink."""


def name_of(number: int) -> str:
    """A request's name within vLLM, padded since vLLM breaks ties by it."""
    return f"{number:012d}"


def number_of(name: str) -> int:
    return int(name)


def transfer_params(request: Request) -> dict[str, Any] | None:
    """A request's class, deadlines and hints as vLLM's ``kv_transfer_params``; None where it says nothing."""
    said = request.hints.said()
    deadlines = {"ttft_s": request.ttft_s, "tpot_s": request.tpot_s}
    told = {"class": request.class_name} | {name: value and float(value) for name, value in deadlines.items()}
    if not said and told == {"class": DEFAULT_CLASS, "ttft_s": None, "tpot_s": None}:
        return None
    return {KEY: told | said}


class SinkWriter:
    """Collects rows and passes them to a :class:`Sink` in batches."""

    size = None

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
        """Nothing to do: a simulation is not ended without :meth:`close`."""

    def close(self) -> None:
        for table in self._rows:
            self._hand_over(table)

    def _hand_over(self, table: str) -> None:
        rows = self._rows[table]
        if rows:
            self._sink.add(table, list(rows))
            rows.clear()


class DecisionReporter(Observer):
    """Passes every decision to a callback."""

    def __init__(self, on_decision: DecisionObserver) -> None:
        self._on_decision = on_decision

    def decided(self, pending: Pending) -> None:
        self._on_decision(pending.decision)


class WorkObserver(Observer):
    """Passes every decision with its situation to the run's count of work."""

    def __init__(self, work: WorkCount) -> None:
        self._work = work

    def decided(self, pending: Pending) -> None:
        self._work.preempted(pending.identity.preemption_id, pending.situation, pending.decision)


class SimulatedController(Controller):
    """Names requests in traces by number, as there is nothing to anonymise, and raises all errors."""

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
        decider, segment_bytes = Decider(policy, random.Random(seed)), server.segment_bytes or server.block_bytes
        prices = BlockPrices(decider, server.block_size, server.block_bytes, _fail)
        prices.segment_bytes = lambda: segment_bytes
        cache = None
        if server.cache is not None:
            cache = caching.load(server.cache.policy, server.host_blocks, prices, allow_python=True)
        if server.cache is not None and cache is not None:
            cache = Hinted(cache, clock, server.block_size, server.cache.hints)
        copies = CopyBook(server.host_blocks, 1, server.block_bytes, cache)
        super().__init__(core, decider, copies, segment_bytes, clock, _raise, policies.load)
        self._local_tokens: dict[str, int] = {}
        """Tokens that the device had of each waiting request when it was last asked for."""
        self._first_hits: dict[str, int] = {}
        """Tokens that host memory had of each request when it was first admitted, until they are taken."""
        if cache is not None:
            self.cache_prompts(key_in_cache).prices = prices
        self.grant_marks(as_said)
        if sink is not None:
            self.record_into(SinkWriter(sink), lambda request_id: str(number_of(request_id)))
        if on_decision is not None:
            self.observers.add(DecisionReporter(on_decision))

    @property
    def repeated(self) -> list[Repeated[OpenPreemption]]:
        """Parts of the step just scheduled that recompute lost tokens."""
        return self._step.repeated

    @property
    def disturbed(self) -> bool:
        """Whether the step just scheduled preempts a request or has saves."""
        return bool(self._step.lost or self._step.saves)

    def counted(self, name: str, label: str = "") -> int:
        """Sum of a counter over its labels, or its value for one label."""
        parts = ((key.split("|"), value) for key, value in self.metrics.tally.totals.items())
        return round(sum(value for key, value in parts if key[0] == name and (not label or label in key)))

    def arrived(self, request: Any) -> None:
        """A request arrived, at its own arrival time, which may be before the engine saw it."""
        self.observers.tell("arrived", request, request.arrival_time)
        if self.prompts is not None:
            self.prompts.arrived(request)

    def loadable_tokens(self, request: Any, local_tokens: int) -> int:
        self._local_tokens[request.request_id] = local_tokens
        return super().loadable_tokens(request, local_tokens)

    def admitted(self, request: Any, block_ids: Sequence[list[int]], load_tokens: int) -> None:
        local_tokens = self._local_tokens.pop(request.request_id, None)
        if self.prompts is not None and local_tokens is not None and not request.num_preemptions:
            size = self._scheduler.block_size
            keys = request.block_hashes[local_tokens // size : (request.num_tokens - 1) // size]
            found = self.copies.pool.lookup(map(key_in_cache, keys))
            self._first_hits[request.request_id] = found * size
        super().admitted(request, block_ids, load_tokens)

    def take_first_hit(self, request_id: str) -> int:
        """Tokens that host memory had of a request, behind those on the device, when it was first admitted; once."""
        return self._first_hits.pop(request_id, 0)


def _fail() -> None:
    raise  # called while an exception is handled


def _raise(message: str) -> None:
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
    """Replace the controller that scheduler and connector were made with by a simulated one, and return it."""
    controller = SimulatedController(core, server, policy, seed, clock, sink, on_decision)
    controller.keep_tables(scheduler.kvpolicy.tables)
    scheduler.connector.controller.close()
    scheduler.connector.controller = scheduler.kvpolicy = controller
    return controller
