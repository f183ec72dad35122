"""Conversations in ShareGPT's JSON, turned into sessions by counting tokens and drawing pauses."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvpolicy.workload.arrivals import Think, stream
from kvpolicy.workload.files import Care, Counts, DamagedFile, DamagedRow, chunks, member, record
from kvpolicy.workload.requests import WorkloadError
from kvpolicy.workload.sessions import Beginning, Session, SessionFile, Turn, Windows, history

TOKENS_PER_WORD = 4 / 3
"""OpenAI's rule of thumb for English: 100 tokens per 75 words. A tokenizer is more accurate."""

ASKING = ("human", "user", "system")
ANSWERING = ("gpt", "assistant", "chatgpt", "bing", "bard")

MAX_ITEM_BYTES = 64 * 2**20
"""A longer conversation is taken as a sign that the file's brackets do not close."""


class ShareGPT(SessionFile):
    """Conversations of one file: a :class:`kvpolicy.workload.Source`.

    Every answer becomes a request whose prompt is the conversation so far. Messages without an answer are part of the
    next prompt, or left out at the end. The data has no times: pauses are drawn, and ``beginning`` gives the starts.
    In the counts, rows are conversations, requests are answers, and empty rows are conversations without an answer.
    """

    def __init__(
        self,
        path: Path | str,
        think: Think,
        beginning: Beginning | None = None,
        care: Care | None = None,
        seed: int = 0,
        tokens_per_word: float = TOKENS_PER_WORD,
        tokenizer: Callable[[str], int] | None = None,
        block_tokens: int = 16,
        count: int | None = None,
        windows: Windows | None = None,
    ) -> None:
        """``tokenizer``: number of tokens of a text, used instead of ``tokens_per_word``. ``count``: conversations.
        ``windows``: of those turns alone."""
        if not tokens_per_word > 0 or block_tokens < 1:
            raise WorkloadError(
                f"tokens_per_word {tokens_per_word} and block_tokens {block_tokens}: both should be above 0"
            )
        super().__init__(path, beginning, care, seed, count, windows)
        self.think = think
        self.tokens_per_word = tokens_per_word
        self.tokenizer = tokenizer
        self.block_tokens = block_tokens

    @property
    def source(self) -> str:
        counted = "counted by a tokenizer" if self.tokenizer else f"{self.tokens_per_word:.4g} a word"
        return f"{self.path.name}: conversations in ShareGPT's format, tokens {counted}, pauses drawn"

    def _sessions(self, counts: Counts) -> Iterator[Session]:
        rng = stream(self.seed, "think times")
        number, named = 0, dict[str, int]()
        try:
            for where, text in items(self.path):
                counts.rows += 1
                try:
                    name, turns = self._conversation(text, number, rng)
                except DamagedRow as error:
                    counts.damage(self.care, f"{self.path}, {where}: {error}")
                    continue
                if not turns:
                    counts.empty += 1
                    continue
                number += 1
                yield Session(_unused(name or f"conversation-{number}", named), turns, self.block_tokens)
        except DamagedFile as error:
            counts.damage(self.care, str(error))

    def _conversation(self, text: str, number: int, rng: random.Random) -> tuple[str, tuple[Turn, ...]]:
        name, messages = _messages(text)
        so_far = 0
        turns: list[Turn] = []
        for is_answer, message in messages:
            message_tokens = self._tokens(message)
            if is_answer and so_far and message_tokens:
                think_s = self.think.draw(rng) if turns else 0.0
                ids = history(number, so_far + message_tokens, self.block_tokens)
                turns.append(Turn(so_far, message_tokens, think_s, prefix=ids))
            so_far += message_tokens
        return name, tuple(turns)

    def _tokens(self, text: str) -> int:
        if self.tokenizer:
            return self.tokenizer(text)
        words = len(text.split())
        return max(1, round(words * self.tokens_per_word)) if words else 0


def _unused(name: str, named: dict[str, int]) -> str:
    """The name, or where another conversation has it, the same with a number: files repeat ids. ``named``: names in
    use, with how often each was asked for; this one is added."""
    unused = name
    while unused in named:
        named[name] += 1
        unused = f"{name}.{named[name]}"
    named[unused] = 1
    return unused


def _messages(text: str) -> tuple[str, list[tuple[bool, str]]]:
    """A conversation's name, and for each message whether it is an answer, and its text. Raises :class:`DamagedRow`."""
    fields = record(text)
    messages = member(fields, "conversations")
    if not isinstance(messages, list):
        raise DamagedRow("conversations should be a list")
    return str(fields.get("id", "")), [_message(message, place) for place, message in enumerate(messages)]


def _message(message: Any, place: int) -> tuple[bool, str]:
    if not isinstance(message, Mapping):
        raise DamagedRow(f"message {place} should be an object with from and value")
    sender, content = member(message, "from"), member(message, "value")
    if sender not in ASKING + ANSWERING:
        raise DamagedRow(f"message {place} is from {sender!r}, known are {', '.join(ASKING + ANSWERING)}")
    if not isinstance(content, str):
        raise DamagedRow(f"message {place}: value should be text")
    return sender in ANSWERING, content


_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|["{}\[\]]', re.DOTALL)


def items(path: Path, chunk_bytes: int = 1 << 16) -> Iterator[tuple[str, str]]:
    """Place ("line 1, conversation 3") and text of each object of a JSON list, holding one at a time.

    Raises :class:`DamagedFile` where the list breaks off, :class:`WorkloadError` where there is none.
    """
    scan = _Scan(path)
    for chunk in chunks(path, chunk_bytes):
        yield from scan.feed(chunk)
        if scan.closed:
            return
    if not scan.inside:
        raise WorkloadError(f"{path}: should be a JSON list of conversations")
    raise DamagedFile(f"{path}, line {scan.line}: the list breaks off after {scan.number} conversations")


class _Scan:
    """Finds the objects of a JSON list by brackets and quotes alone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes = b""
        self._place = 0
        self._begin = 0
        self._depth = 0
        self.line = 1
        """Line at which the buffered bytes begin."""
        self.number = 0
        """Number of objects found."""
        self.inside = False
        self.closed = False

    def feed(self, chunk: bytes) -> Iterator[tuple[str, str]]:
        self._bytes += chunk
        while not self.closed and (match := _TOKEN.search(self._bytes, self._place)):
            if match.group() == b'"':
                self._place = match.start()  # a string that continues in the next chunk
                break
            self._place = match.end()
            if self._completes_object(match):
                self.number += 1
                line = self.line + self._bytes.count(b"\n", 0, self._begin)
                text = self._bytes[self._begin : self._place].decode("utf-8", errors="replace")
                yield f"line {line}, conversation {self.number}", text
        consumed = self._begin if self._depth else self._place
        self.line += self._bytes.count(b"\n", 0, consumed)
        self._bytes, self._place, self._begin = self._bytes[consumed:], self._place - consumed, 0
        if len(self._bytes) > MAX_ITEM_BYTES:
            raise DamagedFile(f"{self._path}, line {self.line}: conversation {self.number + 1} does not end")

    def _completes_object(self, match: re.Match[bytes]) -> bool:
        """Whether this token completes an object."""
        token = match.group()
        if not self.inside:
            if token != b"[" or self._bytes[: match.start()].strip(b" \t\r\n\xef\xbb\xbf"):
                raise WorkloadError(f"{self._path}: should be a JSON list of conversations")
            self.inside = True
        elif token in (b"{", b"["):
            self._begin = self._begin if self._depth else match.start()
            self._depth += 1
        elif token in (b"}", b"]"):
            self.closed = not self._depth
            self._depth -= 1
            return self._depth == 0
        return False
