"""Sessions: requests that follow each other, each one after its predecessor's answer and a pause.

A session's whole history is sent again with every request, so prompts grow, and prefix ids say what they repeat.
Within a closed loop nobody knows beforehand when a request will arrive: ``arrival_s`` is then the earliest possible
time, the session's start and its pauses so far.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvpolicy.workload.arrivals import Arrivals, AtOnce, Think, stream
from kvpolicy.workload.lengths import Lengths
from kvpolicy.workload.requests import Request, WorkloadError

ID_BITS = 32
"""A session's prefix ids are its number shifted by so many bits, plus ids of its own."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    prompt_tokens: int
    """With the whole history."""
    output_tokens: int
    think_s: float
    """Pause before it, after the answer before it; of no meaning in a session's first."""
    at_s: float | None = None
    """When it was recorded, since the session's start."""
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Session:
    """Requests in their order."""

    name: str
    turns: tuple[Turn, ...]
    block_tokens: int = 0
    """Tokens of a prefix block."""


class Beginning(Protocol):
    """When sessions begin, and whose they are."""

    def start(self, sessions: Iterable[Session], rng: random.Random) -> Iterator[tuple[Session, float, float | None]]:
        """Each session with its start, never falling, and the pause before it where it follows another one."""
        ...


@dataclass(frozen=True, slots=True)
class Starting:
    """Sessions begin by an arrival process, however many are open already."""

    arrivals: Arrivals

    def start(self, sessions: Iterable[Session], rng: random.Random) -> Iterator[tuple[Session, float, float | None]]:
        for at_s, session in zip(self.arrivals.times_s(rng), sessions, strict=False):
            yield session, at_s, None


@dataclass(frozen=True, slots=True)
class Users:
    """So many people, each with one session after the other; all begin at 0.

    The next session goes to whoever would be free first if answers took no time, so that files are read as they come.
    What a person asks is then one long session, named after the person.
    """

    count: int
    pause: Think = field(default_factory=lambda: Think(0.0))
    """Between two sessions."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise WorkloadError(f"users is {self.count}, should be 1 or more")

    def start(self, sessions: Iterable[Session], rng: random.Random) -> Iterator[tuple[Session, float, float | None]]:
        free: list[tuple[float, int, float | None]] = [(0.0, user, None) for user in range(self.count)]
        for session in sessions:
            at_s, user, pause_s = heapq.heappop(free)
            yield replace(session, name=f"user-{user}"), at_s, pause_s
            next_pause_s = self.pause.draw(rng)
            for turn in session.turns[1:]:
                at_s += turn.think_s
            heapq.heappush(free, (at_s + next_pause_s, user, next_pause_s))


def served(begun: Iterable[tuple[Session, float, float | None]], closed: bool = True) -> Iterator[Request]:
    """The sessions' requests in the order of ``arrival_s``, holding only sessions that overlap.

    ``closed``: each request waits for the answer before it and its pause. Otherwise it comes at its recorded time.
    """
    waiting: list[tuple[float, int, int, Request]] = []
    for number, (session, start_s, pause_s) in enumerate(begun):
        while waiting and waiting[0][0] <= start_s:
            yield heapq.heappop(waiting)[-1]
        for place, request in enumerate(_requests(session, start_s, pause_s, closed)):
            heapq.heappush(waiting, (request.arrival_s, number, place, request))
    while waiting:
        yield heapq.heappop(waiting)[-1]


def _requests(session: Session, start_s: float, pause_s: float | None, closed: bool) -> Iterator[Request]:
    at_s = start_s
    for place, turn in enumerate(session.turns):
        think_s = (pause_s if place == 0 else turn.think_s) if closed else None
        if not closed:
            if turn.at_s is None:
                raise WorkloadError(
                    f"session {session.name}: no recorded times; it can only be served as a closed loop"
                )
            at_s = start_s + turn.at_s
        elif place:
            at_s += turn.think_s
        block_tokens = session.block_tokens if turn.prefix else 0
        yield Request(
            at_s, turn.prompt_tokens, turn.output_tokens, turn.prefix, block_tokens, session.name, think_s=think_s
        )


def history(number: int, until_tokens: int, block_tokens: int, shared_blocks: int = 0) -> tuple[int, ...]:
    """Prefix ids of the first ``until_tokens`` tokens of a session that only ever appends.

    The first ``shared_blocks`` are those of every session of the workload: a common system prompt.
    """
    blocks = -(-until_tokens // block_tokens)
    common = min(shared_blocks, blocks)
    base = (number + 1) << ID_BITS
    return (*range(common), *range(base + common, base + blocks))


@dataclass(frozen=True, slots=True)
class Conversations:
    """Conversations made from a seed: a person writes, reads the answer, thinks, and writes on."""

    lengths: Lengths
    """Tokens of one message and of one answer."""
    count: int
    """Conversations."""
    seed: int
    mean_turns: float
    """Requests of one conversation: geometrically distributed, 1 at least."""
    think: Think
    beginning: Beginning = field(default_factory=lambda: Starting(AtOnce()))
    block_tokens: int = 16
    system_tokens: int = 0
    """Tokens before the first message, the same in every conversation; shared by whole blocks."""
    context_tokens: int | None = None
    """A conversation ends before the request that would be longer; its first request loses prompt instead."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("count", self.count, 0),
            ("mean_turns", self.mean_turns, 1),
            ("block_tokens", self.block_tokens, 1),
            ("system_tokens", self.system_tokens, 0),
            ("context_tokens", self.context_tokens, self.system_tokens + 2),
        ):
            if value is not None and not value >= least:
                raise WorkloadError(f"conversations: {name} is {value}, should be {least} or more")

    @property
    def name(self) -> str:
        return f"sessions-{self.lengths.name}"

    @property
    def source(self) -> str:
        return self.lengths.source

    def __iter__(self) -> Iterator[Request]:
        return served(self.beginning.start(self._sessions(), stream(self.seed, "arrivals")))

    def _sessions(self) -> Iterator[Session]:
        rng = stream(self.seed, "conversations")
        for number in range(self.count):
            turns = tuple(self._turns(number, rng))
            yield Session(f"conversation-{number}", turns, self.block_tokens)

    def _turns(self, number: int, rng: random.Random) -> Iterator[Turn]:
        so_far = self.system_tokens
        for place in range(_geometric(self.mean_turns, rng)):
            message, answer = (max(1, round(tokens)) for tokens in self.lengths.draw(rng))
            think_s = self.think.draw(rng) if place else 0.0
            if self.context_tokens is not None and so_far + message + answer > self.context_tokens:
                if place:
                    return
                answer = min(answer, self.context_tokens - so_far - 1)
                message = min(message, self.context_tokens - so_far - answer)
            prompt, so_far = so_far + message, so_far + message + answer
            shared_blocks = self.system_tokens // self.block_tokens
            yield Turn(prompt, answer, think_s, prefix=history(number, so_far, self.block_tokens, shared_blocks))


def _geometric(mean: float, rng: random.Random) -> int:
    """Tosses until the first success, whose chance is ``1 / mean``."""
    count = 1
    while rng.random() * mean >= 1.0:
        count += 1
    return count
