"""Requests, and workloads: requests in the order of their arrival, in memory or read as they are needed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from numbers import Integral, Real
from typing import Protocol

from kvpolicy.errors import KVPolicyError
from kvpolicy.request_marks import DEFAULT_CLASS, NO_HINTS, Hints

MARKS: Mapping[str, str] = {
    "class": "class_name",
    "priority": "priority",
    "ttft_deadline_s": "ttft_s",
    "tpot_deadline_s": "tpot_s",
}
"""What a request says of itself: its fields by their columns in tables of requests, all of them optional."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A closed loop: at most ``concurrency`` of its requests are served at a time, the next one once a place is free.

    What ``vllm bench serve --max-concurrency`` does. Requests with equal loops share its places.
    """

    concurrency: int
    name: str = ""
    """Tells the loops of a workload apart."""

    def __post_init__(self) -> None:
        if not isinstance(self.concurrency, Integral) or self.concurrency < 1:
            raise WorkloadError(f"concurrency is {self.concurrency!r}, should be a whole number, 1 or more")


@dataclass(frozen=True, slots=True)
class Request:
    """One request to serve."""

    arrival_s: float
    """Seconds since the workload's start."""
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    """Ids of the leading blocks, each of ``prefix_block_tokens`` tokens, the last one perhaps partly filled.
    Requests whose ids are equal up to some block share every token up to there; without ids they share none.
    Ids may continue past the prompt: these name generated tokens, which the next prompt of a session repeats."""
    prefix_block_tokens: int = 0
    session: str = ""
    """Name of the session; its requests follow each other. Empty without a session."""
    think_s: float | None = None
    """Seconds after the end of its session's previous request at which it arrives, but not before ``arrival_s``; None:
    it arrives at ``arrival_s``."""
    priority: int = 0
    """Lower goes first, as in vLLM; only under priority scheduling."""
    class_name: str = DEFAULT_CLASS
    """Class of service that it belongs to."""
    ttft_s: float | None = None
    """Deadline: seconds from its arrival to its first token; None: it has none."""
    tpot_s: float | None = None
    """Deadline: mean seconds per output token after the first; None: it has none."""
    loop: ClosedLoop | None = None
    """Closed loop in which it waits for a free place, from ``arrival_s`` on; None: it waits for none."""
    hints: Hints = field(default=NO_HINTS, repr=False)
    """What it says of its KV, as a server grants it. A session here is that of the hint."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


class WorkloadError(KVPolicyError):
    """An invalid workload; the message names file, line and field, and what would be right."""


def _check_marks(where: str, request: Request) -> None:
    """Raise :class:`WorkloadError` for an impossible class, priority, deadline or closed loop."""
    if not isinstance(request.class_name, str) or not request.class_name:
        raise WorkloadError(f"{where}: class_name is {request.class_name!r}, should be a name")
    if not isinstance(request.priority, Integral):
        raise WorkloadError(f"{where}: priority is {request.priority!r}, should be a whole number")
    for name, seconds in (("ttft_s", request.ttft_s), ("tpot_s", request.tpot_s)):
        if seconds is not None and not (isinstance(seconds, Real) and isfinite(seconds) and seconds > 0):
            raise WorkloadError(f"{where}: {name} is {seconds!r}, should be a number above 0, or None")
    if not isinstance(request.hints, Hints):
        raise WorkloadError(f"{where}: hints are {request.hints!r}, should be Hints")
    if request.loop is not None and not isinstance(request.loop, ClosedLoop):
        raise WorkloadError(f"{where}: loop is {request.loop!r}, should be a ClosedLoop, or None")


class Source(Protocol):
    """Requests in the order of ``arrival_s``, read anew at every iteration, so that they need not fit into memory."""

    @property
    def name(self) -> str: ...

    @property
    def source(self) -> str:
        """Where the requests come from, with licence."""
        ...

    @property
    def seed(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their arrival, held in memory, and their origin."""

    name: str
    requests: tuple[Request, ...]
    seed: int
    """Seed that the requests were drawn from; texts for them are drawn from the same seed."""
    source: str = ""
    """Where the lengths come from, with licence."""

    def __post_init__(self) -> None:
        if not isinstance(self.requests, Sequence):
            raise WorkloadError(f"workload {self.name}: requests are {self.requests!r}, should be a tuple of Request")
        for number, request in enumerate(self.requests):
            if not isinstance(request, Request):
                raise WorkloadError(f"workload {self.name}, request {number}: is {request!r}, should be a Request")
            if not (isinstance(request.arrival_s, Real) and isfinite(request.arrival_s)):
                raise WorkloadError(f"workload {self.name}, request {number}: {request}: arrival_s should be a number")
            for tokens in (request.prompt_tokens, request.output_tokens):
                if not isinstance(tokens, Integral) or tokens < 1:
                    raise WorkloadError(
                        f"workload {self.name}, request {number}: {request}: both lengths should be whole numbers, "
                        "1 or more"
                    )
            _check_marks(f"workload {self.name}, request {number}", request)
        arrivals = [request.arrival_s for request in self.requests]
        if arrivals != sorted(arrivals) or (arrivals and arrivals[0] < 0):
            raise WorkloadError(f"workload {self.name}: arrival_s should rise and not be negative")

    @property
    def digest(self) -> str:
        """SHA-256 of the contents. Raises WorkloadError for requests that may change: a list, or another class."""
        if type(self.requests) is not tuple or any(type(request) is not Request for request in self.requests):
            raise WorkloadError(
                f"workload {self.name}: requests should be a tuple of Request, else they have no digest"
            )
        sha256 = hashlib.sha256(repr((self.name, self.seed, self.source)).encode())
        for request in self.requests:
            sha256.update(repr(request).encode())
            if request.hints:
                sha256.update(repr(request.hints).encode())
        return sha256.hexdigest()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)

    @property
    def longest_tokens(self) -> int:
        """Prompt and output of the longest request together; 0 without requests."""
        return max((request.total_tokens for request in self.requests), default=0)

    def arriving(self, arrivals_s: Sequence[float]) -> Workload:
        """The same requests at other times. Raises WorkloadError unless there is a time for each."""
        if len(arrivals_s) != len(self):
            raise WorkloadError(
                f"workload {self.name}: {len(arrivals_s)} arrivals for {len(self)} requests, should be one each"
            )
        pairs = zip(self.requests, arrivals_s, strict=True)
        return replace(self, requests=tuple(replace(request, arrival_s=at) for request, at in pairs))

    def first(self, count: int) -> Workload:
        """Its first ``count`` requests."""
        return replace(self, requests=self.requests[:count])
