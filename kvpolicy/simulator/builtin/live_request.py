"""A request while it is served, and a preemption while its cost is not yet known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvpolicy.attribution import ledger
from kvpolicy.attribution.ledger import OpenPreemption
from kvpolicy.events import Decision, Option, Outcome, Preemption
from kvpolicy.workload import Request


class Status(IntEnum):
    """Of a request, by vLLM's names."""

    WAITING = 0
    RUNNING = 1
    LOADING = 2
    """Waiting for remote KV: it holds blocks that a copy is being loaded into."""
    PREEMPTED = 3
    FINISHED = 4


class Held:
    """A block with a content that somebody may look for."""

    __slots__ = ("holders", "key", "place")

    def __init__(self, key: int) -> None:
        self.key = key
        self.holders = 1
        self.place = 0
        """Of its last entry into the queue of free blocks, while it is free."""


@dataclass(slots=True, eq=False)
class Live:
    """One request. Token counts are those of vLLM's ``Request``."""

    number: int
    """Its place in the source: the order of requests that arrive at the same time."""
    request: Request
    arrival_s: float
    keys: tuple[int, ...] = ()
    """Contents of its leading full blocks that others may have too."""
    status: Status = Status.WAITING
    outputs: int = 0
    """Output tokens that are known."""
    computed: int = 0
    """Tokens whose KV is computed or being computed."""
    placeholders: int = 0
    """Output tokens that a step in flight will bring; asynchronous scheduling alone."""
    in_flight: int = 0
    """Tokens scheduled in steps whose output is not back."""
    stale: int = 0
    """Of those, the ones scheduled before it was preempted."""
    prefilling: bool = False
    """Whether its last scheduled chunk did not reach its last known token."""
    known: list[Held] = field(default_factory=list)
    """Its leading blocks, as far as somebody may look for their content."""
    held: int = 0
    """Blocks it holds."""
    cached: int = 0
    """Of these, leading ones that are in the prefix cache."""
    turn: int = 0
    """Rises in the order of the running list."""
    joined: int = 0
    """Clock of the decoding set at which it joined."""
    ends: int = 0
    """Clock at which its last token comes."""
    preemptions: int = 0
    recomputed: int = 0
    loaded: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    copy: Copy | None = None

    @property
    def tokens(self) -> int:
        """Prompt and known output."""
        return self.request.prompt_tokens + self.outputs

    @property
    def order(self) -> tuple[int, float, int]:
        """vLLM's order of priority scheduling: lower goes first."""
        return self.request.priority, self.arrival_s, self.number


@dataclass(slots=True, eq=False)
class Copy:
    """A request's KV in host memory, as it was at one preemption."""

    copy_id: int
    live: Live
    account: Account
    tokens: int
    blocks: int
    load_tokens: int = 0
    load_blocks: int = 0
    loading: bool = False
    told: bool = False
    """Whether a step has brought the save to the worker."""
    saved: bool = False
    """Whether the worker has said that it is done."""
    forgotten: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class Account(OpenPreemption):
    """One preemption: what was decided, what it costs so far. Closed where there is an outcome."""

    request: Live
    situation: Preemption
    decision: Decision
    option: Option
    """As executed."""
    generation: int
    engine_s: float = 0.0
    others_s: float = 0.0
    busy: int = 0
    """Copies on their way."""
    outcome: Outcome | None = None
    """As it closed: without what it cost the engine, which later steps may add to."""


@dataclass(slots=True, eq=False)
class Step(ledger.Step[Account]):
    """One scheduled step until its output is back; what its parts count includes the crowd."""

    scheduled: dict[Live, int] = field(default_factory=dict)
    """Tokens by request, in vLLM's order; without those that decode in the crowd."""
    crowd: int = 0
    """Requests that decode one token each and are not listed."""
    crowd_read: int = 0
    """Context they read."""
    through: list[Live] = field(default_factory=list)
    """Of the crowd: those whose last token it schedules, or scheduled before it where scheduling runs ahead."""
    sampling: set[Live] = field(default_factory=set)
    """Listed requests for which the step brings a token."""
    to_save: Sequence[Copy] = ()
    to_load: Sequence[Copy] = ()
    end_s: float = 0.0
