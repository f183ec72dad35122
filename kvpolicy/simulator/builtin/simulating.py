"""The built-in simulator, as whoever calls it sees it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvpolicy.policy import Policy
from kvpolicy.simulator.base import Run, Server, Sink, Times
from kvpolicy.simulator.builtin.engine import Engine
from kvpolicy.simulator.builtin.journal import Journal
from kvpolicy.simulator.builtin.victims import Victims, VllmVictims
from kvpolicy.simulator.identity import FIXED_DAY, Identity
from kvpolicy.workload import Source

RULES = ("0.32",)


@dataclass(frozen=True, slots=True)
class Builtin:
    """The built-in simulator. Satisfies :class:`kvpolicy.simulator.Simulator`."""

    leap: bool = True
    """Whether steps in which nothing but decoding happens are taken at once. The results are the same."""
    victims: Victims | None = None
    """Whose blocks are taken; None: as vLLM does."""
    wall: Callable[[], float] = time.perf_counter
    created: str = FIXED_DAY
    """Of the trace's header; fixed, so that equal runs give equal traces."""

    @property
    def name(self) -> str:
        return "builtin"

    def run(
        self, requests: Source, policy: Policy, server: Server, times: Times, seed: int = 0, sink: Sink | None = None
    ) -> Run:
        """See :class:`kvpolicy.simulator.Simulator`. Raises ValueError for a server that cannot be, or rules of a
        version that it does not have."""
        _refuse_impossible(server)
        began = self.wall()
        identity = Identity(requests, policy, server, times, seed)
        core = identity.core("sim")
        begin = getattr(sink, "begin", None)
        if begin is not None:
            begin(core, identity.header(core, f"kvpolicy builtin, rules of vllm {server.rules}", self.created))
        journal = Journal(core, sink)
        victims = self.victims or VllmVictims(server.scheduling)
        engine = Engine(requests, policy, server, times, seed, journal, victims, self.leap)
        engine.run()
        journal.flush()
        trace = None if sink is None else sink.finish()
        return Run(engine.tallied.summary(self.wall() - began), trace)


def _refuse_impossible(server: Server) -> None:
    if server.rules not in RULES:
        raise ValueError(f"server.rules is {server.rules!r}; the built-in engine has {', '.join(RULES)}")
    for name in ("block_size", "block_bytes", "device_blocks", "token_budget", "max_running", "max_model_len"):
        if getattr(server, name) < 1:
            raise ValueError(f"server.{name} is {getattr(server, name)}, should be 1 or more")
    if not 0 <= server.watermark < 1:
        raise ValueError(f"server.watermark is {server.watermark:g}, should be from 0, below 1: a share of the blocks")
    if server.host_blocks < 0 or server.link.slowdown < 0:
        raise ValueError(f"server: host_blocks {server.host_blocks} and {server.link}: nothing should be below 0")
