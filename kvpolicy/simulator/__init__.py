"""Simulators: serve a workload under a policy without a GPU. Both engines write the same ``Trace``."""

from __future__ import annotations

from kvpolicy.latency import ClassSummary, Slo, Tail
from kvpolicy.prefix_hits import PrefixHits
from kvpolicy.simulator.base import (
    LOAD,
    DecisionObserver,
    Link,
    LowerTiers,
    Run,
    Server,
    Simulator,
    Sink,
    StepLoad,
    Summary,
    Times,
)
from kvpolicy.simulator.builtin import Builtin, Victims
from kvpolicy.simulator.hardware.law_times import ConstantTimes, LawTimes, law_times
from kvpolicy.simulator.sinks import FolderSink, MemorySink

__all__ = [
    "LOAD",
    "Builtin",
    "ClassSummary",
    "ConstantTimes",
    "DecisionObserver",
    "FolderSink",
    "LawTimes",
    "Link",
    "LowerTiers",
    "MemorySink",
    "PrefixHits",
    "Run",
    "Server",
    "Simulator",
    "Sink",
    "Slo",
    "StepLoad",
    "Summary",
    "Tail",
    "Times",
    "Victims",
    "law_times",
]
