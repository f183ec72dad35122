"""Simulators: what a policy would have done to a workload, without a GPU. Both engines write the same ``Trace``."""

from __future__ import annotations

from kvpolicy.simulator.protocol import LOAD, Link, Run, Server, Simulator, Sink, StepLoad, Summary, Tail, Times

__all__ = ["LOAD", "Link", "Run", "Server", "Simulator", "Sink", "StepLoad", "Summary", "Tail", "Times"]
