"""Workloads: requests to serve, read from published traces or drawn from a seed, and scaled while they are read."""

from __future__ import annotations

from kvpolicy.request_marks import DEFAULT_CLASS
from kvpolicy.workload.agentic import AgentSessions
from kvpolicy.workload.arrivals import (
    Arrivals,
    AtOnce,
    Bursts,
    Even,
    Gamma,
    Groups,
    Poisson,
    Think,
    Weibull,
    random_arrivals,
)
from kvpolicy.workload.classes import Granted, Joined, Labelled, Looped
from kvpolicy.workload.files import Care, Counts
from kvpolicy.workload.length_tables import LengthTable
from kvpolicy.workload.lengths import (
    AZURE_CONVERSATION,
    DEEPSEEK_R1,
    LEVELS,
    SHAREGPT,
    SHIPPED,
    Lengths,
    length_at,
    scale_to,
)
from kvpolicy.workload.requests import ClosedLoop, Request, Source, Workload, WorkloadError
from kvpolicy.workload.scaling import Faster, First, Resized, Window, at_rate, counts_of
from kvpolicy.workload.servegen import ServeGen
from kvpolicy.workload.session_hints import Hinting
from kvpolicy.workload.sessions import Conversations, Session, Starting, Turn, Users, served
from kvpolicy.workload.sharegpt import ShareGPT
from kvpolicy.workload.spec import FORMATS, Format, arrivals_at, open_workload
from kvpolicy.workload.synthetic import SyntheticRequests, all_at_once
from kvpolicy.workload.timed_tables import ARRIVALS, AZURE, BURSTGPT, MOONCAKE, Layout, TimedFile

__all__ = [
    "ARRIVALS",
    "AZURE",
    "AZURE_CONVERSATION",
    "BURSTGPT",
    "DEEPSEEK_R1",
    "DEFAULT_CLASS",
    "FORMATS",
    "LEVELS",
    "MOONCAKE",
    "SHAREGPT",
    "SHIPPED",
    "AgentSessions",
    "Arrivals",
    "AtOnce",
    "Bursts",
    "Care",
    "ClosedLoop",
    "Conversations",
    "Counts",
    "Even",
    "Faster",
    "First",
    "Format",
    "Gamma",
    "Granted",
    "Groups",
    "Hinting",
    "Joined",
    "Labelled",
    "Layout",
    "LengthTable",
    "Lengths",
    "Looped",
    "Poisson",
    "Request",
    "Resized",
    "ServeGen",
    "Session",
    "ShareGPT",
    "Source",
    "Starting",
    "SyntheticRequests",
    "Think",
    "TimedFile",
    "Turn",
    "Users",
    "Weibull",
    "Window",
    "Workload",
    "WorkloadError",
    "all_at_once",
    "arrivals_at",
    "at_rate",
    "counts_of",
    "length_at",
    "open_workload",
    "random_arrivals",
    "scale_to",
    "served",
]
