"""The load of an analysis: many short texts behind one long prefix, each answered in two tokens.

Called by :mod:`kvpolicy_vllm.bench.run_bench`.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpolicy.request_marks import KEY
from kvpolicy.workload.lengths import TWEET_SENTIMENT, length_at
from kvpolicy_vllm.bench.chat_load import Server
from kvpolicy_vllm.bench.openai_api import Answer


def texts(count: int, vocabulary: Sequence[int], rng: random.Random) -> list[list[int]]:
    """So many texts, as token ids, with the lengths of short messages."""
    lengths = (max(1, round(length_at(TWEET_SENTIMENT.prompt_tokens, rng.random()))) for _ in range(count))
    return [rng.choices(vocabulary, k=length) for length in lengths]


@dataclass(slots=True)
class AnalyticsRun:
    """What one run gave."""

    first: Answer
    """The request that computes the prefix, sent before all others and not counted among them."""
    begin_s: float
    answers: list[Answer | None] = field(default_factory=list)
    """By text; None only for texts that have not been sent yet."""
    before: dict[str, float] = field(default_factory=dict)
    """The server's counters when the prefix was cached, and at the end."""
    after: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Analytics:
    """An analysis by one server. ``salt``: of its cached prefixes."""

    server: Server
    prefix: Sequence[int]
    output_tokens: int
    concurrency: int
    salt: str
    hints: bool
    clock: Callable[[], float]
    progress: Callable[[], None] = lambda: None

    async def run(self, texts: Sequence[Sequence[int]]) -> AnalyticsRun:
        """Send every text once, so many at the same time, the next one when an answer is there."""
        first = await self._send(())
        before = await self.server.counters()
        run = AnalyticsRun(first, self.clock(), [None] * len(texts), before)
        waiting = deque(enumerate(texts))
        await asyncio.gather(*(self._sender(waiting, run) for _ in range(self.concurrency)))
        run.after = await self.server.counters()
        return run

    async def _sender(self, waiting: deque[tuple[int, Sequence[int]]], run: AnalyticsRun) -> None:
        while waiting:
            number, text = waiting.popleft()
            run.answers[number] = await self._send(text)
            self.progress()

    async def _send(self, text: Sequence[int]) -> Answer:
        said: dict[str, Any] | None = {KEY: {"pin": len(self.prefix), "once": True}} if self.hints else None
        return await self.server.complete([*self.prefix, *text], self.output_tokens, self.salt, said)
