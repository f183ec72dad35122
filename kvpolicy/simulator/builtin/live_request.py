"""State of a request while it is served, and of a preemption until its cost is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from kvpolicy.attribution import ledger
from kvpolicy.attribution.ledger import OpenPreemption
from kvpolicy.events import Decision, Option, Outcome, Preemption
from kvpolicy.host_store import HostBlock, HostCopy
from kvpolicy.latency import ClassTally
from kvpolicy.workload import Request


class Status(IntEnum):
    """Status of a request, by vLLM's names."""

    WAITING = 0
    RUNNING = 1
    LOADING = 2
    """Waiting for remote KV: it holds blocks that a copy is being loaded into."""
    PREEMPTED = 3
    FINISHED = 4


class KeyedBlock:
    """A block whose content has a key, so that a request can find it in the prefix cache."""

    __slots__ = ("holders", "key", "place")

    def __init__(self, key: int) -> None:
        self.key = key
        self.holders = 1
        self.place = 0
        """Number of its latest entry in the queue of free blocks; 0 while a request holds it."""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request. Token counts are those of vLLM's ``Request``."""

    number: int
    """Its place in the source: the order of requests that arrive at the same time."""
    request: Request
    arrival_s: float
    keys: tuple[int, ...] = ()
    """Content keys of its leading full blocks that other requests may share."""
    status: Status = Status.WAITING
    outputs: int = 0
    """Output tokens that are known."""
    computed: int = 0
    """Tokens whose KV is computed or being computed."""
    placeholders: int = 0
    """Output tokens that a step in flight will bring; only with asynchronous scheduling."""
    in_flight: int = 0
    """Tokens scheduled in steps whose output is not back."""
    stale: int = 0
    """The part of ``in_flight`` that was scheduled before the request was preempted."""
    prefilling: bool = False
    """Whether its last scheduled chunk did not reach its last known token."""
    keyed_blocks: list[KeyedBlock] = field(default_factory=list)
    """Its leading blocks whose content has a key."""
    held: int = 0
    """Number of blocks it holds."""
    cached: int = 0
    """Number of its leading blocks that are in the prefix cache."""
    turn: Any = 0
    """Rises in the order of the running list: a number given at admission, or the key of an order of service."""
    keeps_turn: bool = False
    """Whether it was loaded and waits for admission, which then gives it no new turn."""
    joined: int = 0
    """Clock of the decode batch when it joined."""
    ends: int = 0
    """Clock of the decode batch at which its last token is scheduled."""
    preemptions: int = 0
    recomputed: int = 0
    loaded: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    longest_gap_s: float = 0.0
    """Between two of its tokens; those of its time in the decode batch are added when it leaves."""
    copy: Copy | None = None
    tally: ClassTally = field(default_factory=ClassTally)
    """What counts the requests of its class."""
    asked_files: bool = False
    """Whether it has looked for its blocks in files."""
    staged: Sequence[int] = ()
    """Keys of those that are read, or being read, for it."""

    @property
    def tokens(self) -> int:
        """Prompt and known output."""
        return self.request.prompt_tokens + self.outputs

    @property
    def order(self) -> tuple[int, float, int]:
        """vLLM's order of priority scheduling: lower goes first."""
        return self.request.priority, self.arrival_s, self.number


@dataclass(slots=True, eq=False, kw_only=True)
class Copy(HostCopy):
    """What is kept of a request's KV, as it was at one preemption; or what it loads of its prompt from the cache."""

    live: LiveRequest
    account: Account | None
    """Its preemption; None where it is loaded from the cache."""
    staged_blocks: int = 0
    """Blocks that were read from files for it: they are loaded behind its others, and have no slots."""
    saved: bool = False
    """Whether any save of its own was made."""
    load_tokens: int = 0
    asked_at_resume: tuple[int, int] | None = None
    """Local hit and bytes of loads under way when the policy was last asked whether to load it."""
    loads: bool = True
    """Its answer."""


@dataclass(frozen=True, slots=True)
class CopyJob:
    """A save or load that a step brings to the worker."""

    copy_id: int
    copy: Copy | None
    """The copy that it is accounted to; None for a save of contents that no copy needs."""
    blocks: list[HostBlock]
    saved_by: int = 0
    """For a load: ``copy_id`` of the last save that it needs."""

    @property
    def count(self) -> int:
        """Number of blocks that it moves."""
        return len(self.blocks) + (0 if self.copy is None else self.copy.staged_blocks)

    @property
    def account(self) -> Account | None:
        """The preemption that it is made for, if any."""
        return None if self.copy is None else self.copy.account


@dataclass(slots=True, eq=False, kw_only=True)
class Account(OpenPreemption):
    """One preemption: the decision, and its cost so far. Closed once it has an outcome."""

    request: LiveRequest
    situation: Preemption
    decision: Decision
    option: Option
    """As executed."""
    generation: int
    engine_s: float = 0.0
    others_s: float = 0.0
    busy: int = 0
    """Copies under way."""
    recorded: bool = False
    """Whether what is executed is final, and the decision recorded."""
    outcome: Outcome | None = None
    """As of its closing, without engine time, to which later steps may add."""


@dataclass(slots=True, eq=False)
class Step(ledger.Step[Account]):
    """One scheduled step until its output is back; its counts include the decode batch."""

    scheduled: dict[LiveRequest, int] = field(default_factory=dict)
    """Tokens by request, in vLLM's order, without the decode batch."""
    batch_requests: int = 0
    """Requests of the decode batch, one token each; they are not listed in ``scheduled``."""
    batch_read_tokens: int = 0
    """Context that the decode batch reads."""
    batch_others: Sequence[tuple[ClassTally, int]] = ()
    """Requests of the decode batch by class, without those of the batch's first class."""
    finished: list[LiveRequest] = field(default_factory=list)
    """Requests of the decode batch whose last token this step schedules; scheduling ahead, the step before it."""
    sampling: set[LiveRequest] = field(default_factory=set)
    """Requests in ``scheduled`` that get a token from the step."""
    to_save: Sequence[CopyJob] = ()
    to_load: Sequence[CopyJob] = ()
    computes_s: float = 0.0
    """The part of the step that copies do not add."""
    end_s: float = 0.0
