"""Sessions: requests that follow each other, each after its predecessor's answer and a pause.

Every request repeats the session's history, so prompts grow, and prefix ids say what they repeat. In a closed loop the
time of an arrival depends on the server: ``arrival_s`` is then the earliest possible time, the session's start plus its
pauses so far.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

from kvpolicy.workload.arrivals import Arrivals, AtOnce, Think, stream
from kvpolicy.workload.files import Care, Counts, FileSource
from kvpolicy.workload.lengths import Lengths
from kvpolicy.workload.requests import Request, WorkloadError

ID_BITS = 32
"""A session's prefix ids are its number shifted by this many bits, plus ids within the session."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    prompt_tokens: int
    """Including the whole history."""
    output_tokens: int
    think_s: float
    """Pause between the previous answer and this request; ignored in a session's first."""
    at_s: float | None = None
    """Recorded time, in seconds since the session's start."""
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Session:
    """A session: its requests in order."""

    name: str
    turns: tuple[Turn, ...]
    block_tokens: int = 0
    """Tokens of a prefix block."""


class Beginning(Protocol):
    """When sessions begin, and which user each belongs to."""

    def start(self, sessions: Iterable[Session], rng: random.Random) -> Iterator[tuple[Session, float, float | None]]:
        """Each session with its start, in order, and the pause before it where it follows another session."""
        ...


@dataclass(frozen=True, slots=True)
class Starting:
    """Sessions begin by an arrival process, however many are open."""

    arrivals: Arrivals

    def start(self, sessions: Iterable[Session], rng: random.Random) -> Iterator[tuple[Session, float, float | None]]:
        for at_s, session in zip(self.arrivals.times_s(rng), sessions, strict=False):
            yield session, at_s, None


@dataclass(frozen=True, slots=True)
class Users:
    """A number of users, each with one session after the other; all begin at 0.

    The next session goes to the user who would be free first if answers took no time, so that files are read in order;
    of several such users, to the one whose latest session was dealt longest ago. All requests of a user form one long
    session, named after the user.
    """

    count: int
    pause: Think = field(default_factory=lambda: Think(0.0))
    """Pause between two sessions."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise WorkloadError(f"users is {self.count}, should be 1 or more")

    def start(self, sessions: Iterable[Session], rng: random.Random) -> Iterator[tuple[Session, float, float | None]]:
        free: list[tuple[float, int, int, float | None]] = [(0.0, user, user, None) for user in range(self.count)]
        for dealt, session in enumerate(sessions, self.count):
            at_s, _, user, pause_s = heapq.heappop(free)
            yield replace(session, name=f"user-{user}"), at_s, pause_s
            next_pause_s = self.pause.draw(rng)
            for turn in session.turns[1:]:
                at_s += turn.think_s
            heapq.heappush(free, (at_s + next_pause_s, dealt, user, next_pause_s))


def served(started_sessions: Iterable[tuple[Session, float, float | None]], closed: bool = True) -> Iterator[Request]:
    """The sessions' requests in the order of ``arrival_s``; only overlapping sessions are held in memory.

    ``closed``: each request waits for the previous answer and its pause. Otherwise it comes at its recorded time.
    """
    waiting: list[tuple[float, int, int, Request]] = []
    for number, (session, start_s, pause_s) in enumerate(started_sessions):
        while waiting and waiting[0][0] <= start_s:
            yield heapq.heappop(waiting)[-1]
        for turn_number, request in enumerate(_requests(session, start_s, pause_s, closed)):
            heapq.heappush(waiting, (request.arrival_s, number, turn_number, request))
    while waiting:
        yield heapq.heappop(waiting)[-1]


def _requests(session: Session, start_s: float, pause_s: float | None, closed: bool) -> Iterator[Request]:
    at_s = start_s
    for number, turn in enumerate(session.turns):
        think_s = (pause_s if number == 0 else turn.think_s) if closed else None
        if not closed:
            if turn.at_s is None:
                raise WorkloadError(
                    f"session {session.name}: no recorded times; it can only be served as a closed loop"
                )
            at_s = start_s + turn.at_s
        elif number:
            at_s += turn.think_s
        block_tokens = session.block_tokens if turn.prefix else 0
        yield Request(
            at_s, turn.prompt_tokens, turn.output_tokens, turn.prefix, block_tokens, session.name, think_s=think_s
        )


def history(number: int, until_tokens: int, block_tokens: int, shared_blocks: int = 0) -> tuple[int, ...]:
    """Prefix ids of the first ``until_tokens`` tokens of a session that only appends.

    The first ``shared_blocks`` ids are the same in every session of the workload: a common system prompt.
    """
    blocks = -(-until_tokens // block_tokens)
    common = min(shared_blocks, blocks)
    base = (number + 1) << ID_BITS
    return (*range(common), *range(base + common, base + blocks))


@dataclass(frozen=True, slots=True)
class Conversations:
    """Conversations drawn from a seed: a user writes, reads the answer, thinks, and writes again."""

    lengths: Lengths
    """Tokens of a message and of an answer."""
    count: int
    """Number of conversations."""
    seed: int
    mean_turns: float
    """Mean requests per conversation: geometrically distributed, at least 1."""
    think: Think
    beginning: Beginning = field(default_factory=lambda: Starting(AtOnce()))
    block_tokens: int = 16
    system_tokens: int = 0
    """Tokens before the first message, the same in every conversation; whole blocks of them are shared."""
    context_tokens: int | None = None
    """A conversation ends before a request that would be longer; a first request is cut instead."""

    def __post_init__(self) -> None:
        for name, value, minimum in (
            ("count", self.count, 0),
            ("mean_turns", self.mean_turns, 1),
            ("block_tokens", self.block_tokens, 1),
            ("system_tokens", self.system_tokens, 0),
            ("context_tokens", self.context_tokens, self.system_tokens + 2),
        ):
            if value is not None and not value >= minimum:
                raise WorkloadError(f"conversations: {name} is {value}, should be {minimum} or more")

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
        history_tokens = self.system_tokens
        for turn_number in range(_geometric(self.mean_turns, rng)):
            message, answer = (max(1, round(tokens)) for tokens in self.lengths.draw(rng))
            think_s = self.think.draw(rng) if turn_number else 0.0
            if self.context_tokens is not None and history_tokens + message + answer > self.context_tokens:
                if turn_number:
                    return
                answer = min(answer, self.context_tokens - history_tokens - 1)
                message = min(message, self.context_tokens - history_tokens - answer)
            prompt_tokens, history_tokens = history_tokens + message, history_tokens + message + answer
            shared_blocks = self.system_tokens // self.block_tokens
            yield Turn(
                prompt_tokens, answer, think_s, prefix=history(number, history_tokens, self.block_tokens, shared_blocks)
            )


@dataclass(frozen=True, slots=True)
class Windows:
    """Which turns of a file's sessions are served, by the tokens of their windows: prompts with the whole history."""

    min_tokens: int = 0
    """Of a prompt."""
    max_tokens: int | None = None
    """Of a prompt and its answer; None: no limit."""
    min_turns: int = 1
    """Sessions with fewer turns within these limits are left out."""

    def of(self, sessions: Iterable[Session]) -> Iterator[Session]:
        """The sessions with those turns alone. What turns that are left out added is part of the next message."""
        for session in sessions:
            turns = tuple(turn for turn in session.turns if self._holds(turn))
            if len(turns) >= self.min_turns:
                yield replace(session, turns=turns)

    def _holds(self, turn: Turn) -> bool:
        tokens = turn.prompt_tokens + turn.output_tokens
        return self.min_tokens <= turn.prompt_tokens and (self.max_tokens is None or tokens <= self.max_tokens)


class SessionFile(FileSource):
    """Base of every :class:`kvpolicy.workload.Source` that finds sessions in one file, which does not say when they
    start."""

    closed = True
    """A request comes after its predecessor's answer, and not at its recorded time."""

    def __init__(
        self,
        path: Path | str,
        beginning: Beginning | None,
        care: Care | None,
        seed: int,
        count: int | None,
        windows: Windows | None = None,
    ) -> None:
        """``beginning``: when sessions start, by default all at once. ``count``: read only so many sessions.
        ``windows``: of those turns alone; by default all."""
        super().__init__(path, care, seed)
        self.beginning = beginning or Starting(AtOnce())
        self.count = count
        self.windows = windows or Windows()

    def __iter__(self) -> Iterator[Request]:
        counts = self.counts = Counts()
        sessions = islice(self.windows.of(self._sessions(counts)), self.count)
        for request in served(self.beginning.start(sessions, stream(self.seed, "arrivals")), self.closed):
            counts.requests += 1
            yield request

    def _sessions(self, counts: Counts) -> Iterator[Session]:
        raise NotImplementedError


def _geometric(mean: float, rng: random.Random) -> int:
    """Trials until the first success, which has probability ``1 / mean``."""
    count = 1
    while rng.random() * mean >= 1.0:
        count += 1
    return count
