"""The loads that a bench over HTTP knows: their settings one by one, one run of each, and the prompts that were sent.

Called by :mod:`kvpolicy_vllm.bench.run_bench`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvpolicy.bench_settings import AnalyticsLoad, ChatLoad
from kvpolicy.errors import InputError
from kvpolicy.workload import open_workload
from kvpolicy.workload.arrivals import stream
from kvpolicy_vllm.bench.analytics_load import Analytics, texts
from kvpolicy_vllm.bench.chat_load import (
    Chat,
    ChatRun,
    Conversation,
    Server,
    begun_midway,
    drawn,
    fitted,
    of_requests,
    prefixed,
)
from kvpolicy_vllm.bench.load_results import analytics_figures, chat_figures

Cell = Mapping[str, Any]
"""One setting of a load: names and values."""
Served = Sequence[tuple[Cell, Mapping[str, Mapping[str, Any]]]]
"""What has been served: each setting with the figures of its runs by arm, in one round."""
SEED_STEP = 1000
"""Between the seeds of rounds, so that no two rounds send the same texts."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a run has of its server and its arm."""

    server: Server
    vocabulary: Sequence[int]
    context_tokens: int
    salt: str
    hints: bool
    reserve: str = ""
    """What each request reserves of the KV cache before it is sent; empty for nothing."""
    progress: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic


class Kind(Protocol):
    """A load."""

    @property
    def name(self) -> str: ...

    @property
    def rate(self) -> str:
        """Field of a run's figures: what is answered per second."""
        ...

    def next_cell(self, served: Served) -> Cell | None:
        """The setting that the first round serves next; None after the last one. Later rounds serve the same."""
        ...

    async def run(self, cell: Cell, round_: int, terms: Terms) -> dict[str, Any]:
        """The figures of one run."""
        ...

    def prompt(self, cell: Cell, round_: int, terms: Terms, rows: Sequence[Mapping[str, Any]], at: Cell) -> list[int]:
        """The tokens before the one at which a run differs from ``rows``, another run of the same round."""
        ...


def following(cells: Sequence[Cell], served: Served) -> Cell | None:
    """The cell after those that were served; None after the last one."""
    return cells[len(served)] if len(served) < len(cells) else None


@dataclass(frozen=True, slots=True)
class ChatKind:
    """Chats by number of chatters and share of prefixed conversations."""

    load: ChatLoad
    name: str = "chat"
    rate: str = "messages_s"

    def next_cell(self, served: Served) -> Cell | None:
        cells = [
            {"chatters": chatters, "prefixed": share} for chatters in self.load.chatters for share in self.load.prefixed
        ]
        return following(cells, served)

    def _conversations(self, cell: Cell, round_: int, context_tokens: int) -> list[Conversation]:
        seed = self._seed(round_)
        room = context_tokens - self._prefix_tokens(context_tokens)
        rng = stream(seed, "conversations")
        if self.load.workload is None:
            all_of_them = drawn(self.load, room, rng)
        else:
            source = open_workload(self.load.workload, think_s=self.load.think_s)
            most = self.load.conversations
            all_of_them = of_requests(source, most, self.load.think_s, rng, first=round_ * most)
        fitting = fitted(all_of_them, room)
        if not fitting:
            raise InputError(
                f"no conversation fits into {room} tokens: give a longer --context-tokens, or a shorter prefix"
            )
        dealt = prefixed(fitting, cell["prefixed"], stream(seed, "prefixed"))
        if not self.load.midway:
            return dealt
        return begun_midway(dealt, cell["chatters"], self.load.warmup_s, stream(seed, "midway"))

    def _prefix_tokens(self, context_tokens: int) -> int:
        """Tokens of the prefix; kept free in every window, so that conversations do not depend on the share."""
        tokens = self.load.prefix_tokens if any(self.load.prefixed) else 0
        if tokens >= context_tokens // 2:
            raise InputError(f"--prefix-tokens {tokens} takes half of the context of {context_tokens} tokens or more")
        return tokens

    def _seed(self, round_: int) -> int:
        return self.load.load_seed + SEED_STEP * round_

    def _chat(self, cell: Cell, round_: int, terms: Terms) -> Chat:
        seed = self._seed(round_)
        tokens = self._prefix_tokens(terms.context_tokens) if cell["prefixed"] else 0
        prefix = stream(seed, "prefix").choices(terms.vocabulary, k=tokens)
        return Chat(
            terms.server,
            self.load,
            terms.vocabulary,
            prefix,
            terms.salt,
            seed,
            terms.hints,
            terms.clock,
            terms.progress,
        )

    def _context(self, terms: Terms) -> int:
        return (
            terms.context_tokens
            if self.load.context_tokens is None
            else min(self.load.context_tokens, terms.context_tokens)
        )

    async def run(self, cell: Cell, round_: int, terms: Terms) -> dict[str, Any]:
        terms = replace(terms, context_tokens=self._context(terms))
        conversations = self._conversations(cell, round_, terms.context_tokens)
        if len(conversations) < cell["chatters"]:
            raise InputError(
                f"{len(conversations)} conversations for {cell['chatters']:g} people, some of whom would have none: "
                "give more --conversations, fewer --chatters, or a workload with more sessions that fit the context"
            )
        begin_alike = sum(conversation.is_prefixed for conversation in conversations)
        counted = {"conversations": len(conversations), "prefixed_conversations": begin_alike}
        run = await self._chat(cell, round_, terms).run(conversations, cell["chatters"])
        figures = counted | chat_figures(run, self.load.warmup_s, self.load.seconds)
        if self.load.warmup_s and not (figures["errors"] or (figures["messages"] and figures["steady_s"])):
            raise InputError(self._why_nothing_counts(run))
        return figures

    def _why_nothing_counts(self, run: ChatRun) -> str:
        warmup_s, idle_s = self.load.warmup_s, run.first_idle_s
        if idle_s is not None and idle_s <= warmup_s:
            return (
                f"--warmup-s {warmup_s:g}: somebody had no conversation left after {idle_s:.0f} s, so that nothing "
                "counts: give fewer seconds, or more --conversations"
            )
        return f"--warmup-s {warmup_s:g}: no message was sent after it: give shorter --think-s, or more --seconds"

    def prompt(self, cell: Cell, round_: int, terms: Terms, rows: Sequence[Mapping[str, Any]], at: Cell) -> list[int]:
        terms = replace(terms, context_tokens=self._context(terms))
        chat = self._chat(cell, round_, terms)
        conversations = self._conversations(cell, round_, terms.context_tokens)
        conversation = next(one for one in conversations if one.name == at["conversation"])
        answers = {row["turn"]: row["token_ids"] for row in rows if row["conversation"] == conversation.name}
        said = chat.texts(conversation)
        window = chat.opening(conversation, said)
        for turn in range(conversation.said_turns, at["turn"] + 1):
            window += [*said[turn], *(answers[turn] if turn < at["turn"] else answers[turn][: at["token"]])]
        return window


@dataclass(frozen=True, slots=True)
class AnalyticsKind:
    """Analyses by length of the prefix."""

    load: AnalyticsLoad
    name: str = "analytics"
    rate: str = "requests_s"

    def next_cell(self, served: Served) -> Cell | None:
        return following([{"prefix_tokens": tokens} for tokens in self.load.prefix_tokens], served)

    def _content(self, cell: Cell, round_: int, terms: Terms) -> tuple[list[int], list[list[int]]]:
        """The prefix and the texts."""
        rng = random.Random(f"{self.load.load_seed + SEED_STEP * round_} analytics {cell['prefix_tokens']}")
        prefix = rng.choices(terms.vocabulary, k=cell["prefix_tokens"])
        all_texts = texts(self.load.texts, terms.vocabulary, rng)
        longest = len(prefix) + max(map(len, all_texts)) + self.load.output_tokens
        if longest > terms.context_tokens:
            raise InputError(
                f"a prefix of {len(prefix)} tokens with its text and answer takes {longest}, more than the server's "
                f"context of {terms.context_tokens}: give a shorter --prefix-tokens"
            )
        return prefix, all_texts

    async def run(self, cell: Cell, round_: int, terms: Terms) -> dict[str, Any]:
        prefix, all_texts = self._content(cell, round_, terms)
        analytics = Analytics(
            terms.server, prefix, self.load.output_tokens, self.load.concurrency, terms.salt, terms.hints, terms.clock,
            terms.progress,
        )  # fmt: skip
        return analytics_figures(await analytics.run(all_texts))

    def prompt(self, cell: Cell, round_: int, terms: Terms, rows: Sequence[Mapping[str, Any]], at: Cell) -> list[int]:
        prefix, all_texts = self._content(cell, round_, terms)
        answer = next(row["token_ids"] for row in rows if row["conversation"] == at["conversation"])
        return [*prefix, *all_texts[int(at["conversation"])], *answer[: at["token"]]]
