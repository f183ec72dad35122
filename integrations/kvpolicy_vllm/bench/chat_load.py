"""The load of a chat: conversations dealt to a number of chatters, each of whom sends its whole window every turn.

A chatter thinks, writes a message, waits for the answer, and writes again; after the last turn it takes the next
conversation. Called by :mod:`kvpolicy_vllm.bench.run_bench`.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Protocol

from kvpolicy.bench_settings import ChatLoad
from kvpolicy.errors import InputError
from kvpolicy.request_marks import KEY
from kvpolicy.workload import Request, Source
from kvpolicy.workload.arrivals import Think, stream
from kvpolicy.workload.lengths import LEVELS, SHAREGPT, length_at
from kvpolicy.workload.scaling import lengthening
from kvpolicy_vllm.bench.openai_api import Answer

MIN_MESSAGE_TOKENS = 8
"""Of a drawn message."""
SAMPLE_S = 1.0
"""Seconds between two readings of the server's counters."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A message and its answer."""

    message_tokens: int
    answer_tokens: int
    think_s: float
    """Before the message is sent."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation."""

    name: str
    turns: tuple[Turn, ...]
    is_prefixed: bool = False
    """Whether it begins with the shared prefix."""
    said_turns: int = 0
    """Turns that were over before the run began: its first message brings them."""


@dataclass(frozen=True, slots=True)
class Message:
    """A turn that was sent."""

    conversation: str
    turn: int
    window_tokens: int
    answer: Answer
    goes_on: bool = False
    """Whether its conversation has further messages, sent or not."""


class Server(Protocol):
    """What a load asks of a server: see :class:`kvpolicy_vllm.bench.openai_api.Api`."""

    async def complete(
        self,
        prompt: Sequence[int],
        output_tokens: int,
        salt: str = "",
        said: dict[str, Any] | None = None,
        priority: int = 0,
    ) -> Answer: ...

    async def counters(self) -> dict[str, float]: ...

    async def kv_tokens(self) -> int: ...


def drawn(load: ChatLoad, context_tokens: int, rng: random.Random) -> list[Conversation]:
    """Conversations whose last window and whose answers have the lengths of ShareGPT's rows, and whose messages fill
    what remains. Windows are drawn among those that fit into the context. A conversation has no more turns than its
    window has room for the answers before the last one and for :data:`MIN_MESSAGE_TOKENS` of each message."""
    think = Think(load.think_s)
    levels = [
        level for level in LEVELS if length_at(SHAREGPT.prompt_tokens, level) < context_tokens - MIN_MESSAGE_TOKENS
    ]
    highest = max(levels, default=0.0)
    if not highest:
        raise InputError(f"a context of {context_tokens} tokens is too short for a chat")
    conversations = []
    for number in range(load.conversations):
        window = max(MIN_MESSAGE_TOKENS, round(length_at(SHAREGPT.prompt_tokens, rng.uniform(0.0, highest))))
        answers: list[int] = []
        for _ in range(_geometric(load.turns, rng)):
            if sum(answers) + MIN_MESSAGE_TOKENS * (len(answers) + 1) > window:
                break
            answers.append(max(1, round(length_at(SHAREGPT.output_tokens, rng.random()))))
        messages = _even_parts(window - sum(answers[:-1]), len(answers))
        turns = tuple(Turn(message, answer, think.draw(rng)) for message, answer in zip(messages, answers, strict=True))
        conversations.append(Conversation(f"conversation-{number}", turns))
    return conversations


def _even_parts(tokens: int, parts: int) -> list[int]:
    """So many numbers that sum up to ``tokens``, no two of them more than 1 apart."""
    return [tokens // parts + (number < tokens % parts) for number in range(parts)]


def _geometric(mean: float, rng: random.Random) -> int:
    count = 1
    while rng.random() * mean >= 1.0:
        count += 1
    return count


def of_requests(source: Source, most: int, think_s: float, rng: random.Random, first: int = 0) -> list[Conversation]:
    """``most`` sessions of a workload from number ``first`` on, each a conversation, in their order; after the last one
    it goes on with the first. A request without a session is one by itself."""
    sessions: dict[str, list[Request]] = {}
    for number, request in enumerate(source):
        sessions.setdefault(request.session or f"request-{number}", []).append(request)
    think, longer = Think(think_s), lengthening(source)
    names = [*sessions]
    chosen = (names[(first + number) % len(names)] for number in range(min(most, len(names))))
    return [Conversation(name, tuple(_turns(sessions[name], longer, think, rng))) for name in chosen]


def _turns(requests: Sequence[Request], longer: float, think: Think, rng: random.Random) -> Iterable[Turn]:
    """``longer``: by what answers are longer than those that the next prompt was recorded with: messages stay as long
    as they were."""
    before = 0
    for request in requests:
        think_s = think.draw(rng) if request.think_s is None else request.think_s
        yield Turn(max(1, request.prompt_tokens - before), request.output_tokens, think_s)
        before = request.prompt_tokens + round(request.output_tokens / longer)


def fitted(conversations: Iterable[Conversation], context_tokens: int) -> list[Conversation]:
    """The conversations up to the turn whose window and answer exceed the context; those without a turn are left out.
    A first turn that exceeds it is cut."""
    fitting = []
    for conversation in conversations:
        turns: list[Turn] = []
        window = 0
        for turn in conversation.turns:
            room = context_tokens - window
            if turn.message_tokens + turn.answer_tokens > room:
                if turns or room < 2:
                    break
                answer = min(turn.answer_tokens, room // 2)
                turn = replace(turn, message_tokens=min(turn.message_tokens, room - answer), answer_tokens=answer)
            turns.append(turn)
            window += turn.message_tokens + turn.answer_tokens
        if turns:
            fitting.append(replace(conversation, turns=tuple(turns)))
    return fitting


def prefixed(conversations: Sequence[Conversation], share: float, rng: random.Random) -> list[Conversation]:
    """The conversations, that share of which begins with the shared prefix, drawn at random. A number halfway between
    two is rounded to the even one."""
    chosen = set(rng.sample(range(len(conversations)), round(share * len(conversations))))
    return [replace(one, is_prefixed=number in chosen) for number, one in enumerate(conversations)]


def begun_midway(
    conversations: Sequence[Conversation], people: int, warmup_s: float, rng: random.Random
) -> list[Conversation]:
    """The conversations, with so many at the front that are under way: drawn by their number of turns, as one that
    lasts longer is the likelier to be met, and each before one of its turns, drawn evenly. That turn's message is sent
    at a time drawn from the warm-up, or after its pause where there is none.

    Raises InputError where every conversation has a single turn.
    """
    if all(len(one.turns) < 2 for one in conversations):
        raise InputError(
            "--midway: no conversation has a second turn, so that none can be met in its middle: give a --workload "
            "with sessions, or more --turns"
        )
    by_chance = sorted(
        range(len(conversations)), key=lambda at: rng.random() ** (1 / len(conversations[at].turns)), reverse=True
    )
    met = [_met(conversations[at], warmup_s, rng) for at in by_chance[:people]]
    return met + [conversations[at] for at in sorted(by_chance[people:])]


def _met(conversation: Conversation, warmup_s: float, rng: random.Random) -> Conversation:
    said_turns, at_s = rng.randrange(len(conversation.turns)), rng.uniform(0.0, warmup_s)
    turns = [*conversation.turns]
    if warmup_s:
        turns[said_turns] = replace(turns[said_turns], think_s=at_s)
    return replace(conversation, turns=tuple(turns), said_turns=said_turns)


@dataclass(slots=True)
class ChatRun:
    """What one run of a chat gave."""

    begin_s: float
    messages: list[Message] = field(default_factory=list)
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    """The server's counters, by seconds since the begin."""
    first_idle_s: float | None = None
    """When the first chatter found no conversation left, or the time of the run was over, since the begin."""
    missed_readings: int = 0
    """Of the counters, during the run."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat with one server. ``vocabulary``: token ids to draw texts from, by ``seed``. ``salt``: of its cached
    prefixes."""

    server: Server
    load: ChatLoad
    vocabulary: Sequence[int]
    prefix: Sequence[int]
    salt: str
    seed: int
    hints: bool
    clock: Callable[[], float]
    progress: Callable[[], None] = lambda: None

    async def run(self, conversations: Sequence[Conversation], chatters: int) -> ChatRun:
        """Deal the conversations to so many chatters, in their order, until all are over, or the load's seconds are.

        Raises InputError where the counters cannot be read at the begin or at the end, between which growth is taken.
        """
        before = await self.server.counters()
        run = ChatRun(self.clock(), samples=[(0.0, before)])
        waiting = deque(conversations)
        sampling = asyncio.create_task(self._sample(run))
        try:
            await asyncio.gather(*(self._chatter(f"chatter-{number}", waiting, run) for number in range(chatters)))
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
        run.samples.append((self.clock() - run.begin_s, await self.server.counters()))
        return run

    async def _sample(self, run: ChatRun) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            try:
                run.samples.append((self.clock() - run.begin_s, await self.server.counters()))
            except InputError:
                run.missed_readings += 1

    async def _chatter(self, name: str, waiting: deque[Conversation], run: ChatRun) -> None:
        while waiting and self._left_s(run) > 0:
            await self._converse(name, waiting.popleft(), run)
        if run.first_idle_s is None:
            run.first_idle_s = self.clock() - run.begin_s

    async def _converse(self, chatter: str, conversation: Conversation, run: ChatRun) -> None:
        """One conversation to its end, to its first error, or to the message that would be sent too late."""
        texts, said_turns = self.texts(conversation), conversation.said_turns
        window = self.opening(conversation, texts)
        for number, turn in enumerate(conversation.turns[said_turns:], said_turns):
            left_s = self._left_s(run)
            await asyncio.sleep(max(0.0, min(turn.think_s, left_s)))
            if turn.think_s > left_s:
                return
            window += texts[number]
            said = self._said(chatter, conversation) if self.hints else None
            answer = await self.server.complete(window, turn.answer_tokens, self.salt, said)
            goes_on = number + 1 < len(conversation.turns)
            run.messages.append(Message(conversation.name, number, len(window), answer, goes_on))
            self.progress()
            if answer.error:
                return
            window += answer.token_ids

    def _left_s(self, run: ChatRun) -> float:
        """Seconds in which messages are still sent."""
        return inf if self.load.seconds is None else run.begin_s + self.load.seconds - self.clock()

    def opening(self, conversation: Conversation, texts: Sequence[Sequence[int]]) -> list[int]:
        """What a window begins with, before the first message that is sent: the prefix, and the turns that are over,
        whose answers are drawn as messages are. ``texts``: all messages of the conversation."""
        opening = list(self.prefix) if conversation.is_prefixed else []
        rng = stream(self.seed, f"answers of {conversation.name}")
        for turn, text in zip(conversation.turns[: conversation.said_turns], texts, strict=False):
            opening += [*text, *rng.choices(self.vocabulary, k=turn.answer_tokens)]
        return opening

    def texts(self, conversation: Conversation) -> list[list[int]]:
        """The messages of a conversation, as token ids."""
        rng = stream(self.seed, f"text of {conversation.name}")
        return [rng.choices(self.vocabulary, k=turn.message_tokens) for turn in conversation.turns]

    def _said(self, chatter: str, conversation: Conversation) -> dict[str, Any]:
        """What an application knows: whose window it is, and that it may go on, not which message will be the last. A
        chatter's next conversation takes the place of the one before it."""
        marks: dict[str, Any] = {"session": chatter, "keep_s": self.load.keep_s}
        if conversation.is_prefixed and self.prefix:
            marks["pin"] = len(self.prefix)
        return {KEY: marks}
