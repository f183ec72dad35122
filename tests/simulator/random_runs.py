"""Engines over small random workloads, and how many of these a property is held against."""

from __future__ import annotations

from hypothesis import HealthCheck

from kvpolicy import policy
from kvpolicy.simulator import Server
from kvpolicy.simulator.builtin.engine import Engine
from kvpolicy.simulator.builtin.scheduler import VllmVictims
from kvpolicy.simulator.builtin.trace_writer import TraceWriter
from kvpolicy.simulator.sinks import Identity
from kvpolicy.workload import Source, Workload
from tests.examples import examples
from tests.simulator.worlds import LINEAR

World = tuple[Workload, Server, str]


few_worlds = examples(25, suppress_health_check=[HealthCheck.too_slow])


def engine_of(source: Source, server: Server, name: str) -> Engine:
    victims = VllmVictims(server.scheduling)
    identity = Identity(source, policy.load(name), server, LINEAR, 0)
    return Engine(identity, TraceWriter("core", None), victims, True)
