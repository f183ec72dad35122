"""The built-in simulator: makes and runs engines."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvpolicy.errors import InputError
from kvpolicy.latency import NO_SLO, Slo
from kvpolicy.policy import Policy
from kvpolicy.policy.failures import raise_order_failure
from kvpolicy.simulator.base import DecisionObserver, Run, Server, Sink, Times
from kvpolicy.simulator.builtin.engine import Engine
from kvpolicy.simulator.builtin.lower_tiers import MakeCaching
from kvpolicy.simulator.builtin.scheduler import Victims, VllmVictims
from kvpolicy.simulator.builtin.trace_writer import TraceWriter
from kvpolicy.simulator.sinks import FIXED_DAY, Identity
from kvpolicy.workload import Source

RULES = ("0.32",)
OBJECTS_PER_COLLECTION = 100_000
"""With Python's own number (2,000 or fewer), looking for cycles among blocks that have none took 40% of the time of
runs with prefix caching and long prompts."""


@dataclass(frozen=True, slots=True)
class Builtin:
    """The built-in simulator. Satisfies :class:`kvpolicy.simulator.Simulator`."""

    leap: bool = True
    """Whether runs of pure decode steps are taken at once. The results are the same."""
    victims: Victims | None = None
    """How victims are chosen; None: as vLLM does."""
    load_share: float = 1.0
    """Share of what a swapped request lacks that is loaded, in whole blocks from the front; the rest is computed again.
    The same of what a prompt finds in host memory. For experiments: the plugin loads everything."""
    wall: Callable[[], float] = time.perf_counter
    created: str = FIXED_DAY
    """Creation time in the trace's header; fixed, so that equal runs give equal traces."""
    caching: MakeCaching | None = None
    """Makes what chooses the contents of host memory, in place of the server's caching policy, for references that know
    what is to come."""

    @property
    def name(self) -> str:
        return "builtin"

    def run(
        self,
        requests: Source,
        policy: Policy,
        server: Server,
        times: Times,
        seed: int = 0,
        sink: Sink | None = None,
        on_decision: DecisionObserver | None = None,
        slo: Slo = NO_SLO,
    ) -> Run:
        """See :class:`kvpolicy.simulator.Simulator`. Raises InputError for scheduling rules of an unsupported version,
        too."""
        if server.rules not in RULES:
            raise InputError(f"server.rules is {server.rules!r}; the built-in engine has {', '.join(RULES)}")
        began = self.wall()
        identity = Identity(requests, policy, server, times, seed)
        core = identity.core("sim")
        if sink is not None:
            sink.begin(core, identity.header(core, f"kvpolicy builtin, rules of vllm {server.rules}", self.created))
        trace_writer = TraceWriter(core, sink)
        victims = self.victims or VllmVictims(server.scheduling)
        try:
            engine = Engine(identity, trace_writer, victims, self.leap, on_decision, self.load_share, slo, self.caching)
            with rare_collection():
                engine.run()
        except Exception as error:  # noqa: BLE001  # raised again
            raise_order_failure(server.order, error)
        trace_writer.flush()
        trace = None if sink is None else sink.finish()
        return Run(engine.tallied.summary(self.wall() - began), trace)


@contextmanager
def rare_collection() -> Iterator[None]:
    """Python looks for cyclic garbage less often meanwhile; where it is switched off it stays so."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], OBJECTS_PER_COLLECTION), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
