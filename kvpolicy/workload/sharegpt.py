"""Conversations in ShareGPT's JSON: texts in turns, made sessions by counting tokens and drawing the pauses."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from kvpolicy.workload.arrivals import AtOnce, Think, stream
from kvpolicy.workload.files import Care, Counts, DamagedFile, DamagedRow, FileSource, chunks, member, record
from kvpolicy.workload.requests import Request, WorkloadError
from kvpolicy.workload.sessions import Beginning, Session, Starting, Turn, history, served

TOKENS_PER_WORD = 4 / 3
"""OpenAI's rule of thumb for English, 100 tokens to 75 words. A tokenizer counts better."""

ASKING = ("human", "user", "system")
ANSWERING = ("gpt", "assistant", "chatgpt", "bing", "bard")

MAX_ITEM_BYTES = 64 * 2**20
"""A conversation longer than this is taken for a file whose brackets do not close."""


class ShareGPT(FileSource):
    """Conversations of one file: a :class:`kvpolicy.workload.Source`.

    A request is made of every answer: its prompt is all that was said before it. Messages without an answer are part
    of the next prompt, or left out at the end. The data has no times: pauses are drawn, ``beginning`` gives the starts.
    Rows counted are conversations, requests their answers; empty are conversations without.
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
    ) -> None:
        """``tokenizer``: text to its number of tokens, instead of ``tokens_per_word``. ``count``: conversations."""
        if not tokens_per_word > 0 or block_tokens < 1:
            raise WorkloadError(
                f"tokens_per_word {tokens_per_word} and block_tokens {block_tokens}: both should be above 0"
            )
        super().__init__(path, care, seed)
        self.think = think
        self.beginning = beginning or Starting(AtOnce())
        self.tokens_per_word = tokens_per_word
        self.tokenizer = tokenizer
        self.block_tokens = block_tokens
        self.count = count

    @property
    def source(self) -> str:
        counted = "counted by a tokenizer" if self.tokenizer else f"{self.tokens_per_word:.4g} a word"
        return f"{self.path.name}: conversations in ShareGPT's format, tokens {counted}, pauses drawn"

    def __iter__(self) -> Iterator[Request]:
        counts = self.counts = Counts()
        sessions = islice(self._sessions(counts), self.count)
        for request in served(self.beginning.start(sessions, stream(self.seed, "arrivals"))):
            counts.requests += 1
            yield request

    def _sessions(self, counts: Counts) -> Iterator[Session]:
        rng = stream(self.seed, "think times")
        number = 0
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
                yield Session(name or f"conversation-{number}", turns, self.block_tokens)
        except DamagedFile as error:
            counts.damage(self.care, str(error))

    def _conversation(self, text: str, number: int, rng: random.Random) -> tuple[str, tuple[Turn, ...]]:
        name, messages = _messages(text)
        so_far = 0
        turns: list[Turn] = []
        for answering, said in messages:
            said_tokens = self._tokens(said)
            if answering and so_far and said_tokens:
                think_s = self.think.draw(rng) if turns else 0.0
                ids = history(number, so_far + said_tokens, self.block_tokens)
                turns.append(Turn(so_far, said_tokens, think_s, prefix=ids))
            so_far += said_tokens
        return name, tuple(turns)

    def _tokens(self, text: str) -> int:
        if self.tokenizer:
            return self.tokenizer(text)
        words = len(text.split())
        return max(1, round(words * self.tokens_per_word)) if words else 0


def _messages(text: str) -> tuple[str, list[tuple[bool, str]]]:
    """A conversation's name, and of each message whether it answers and what it says. Raises :class:`DamagedRow`."""
    found = record(text)
    said = member(found, "conversations")
    if not isinstance(said, list):
        raise DamagedRow("conversations should be a list")
    return str(found.get("id", "")), [_message(one, place) for place, one in enumerate(said)]


def _message(one: Any, place: int) -> tuple[bool, str]:
    if not isinstance(one, Mapping):
        raise DamagedRow(f"message {place} should be an object with from and value")
    who, said = member(one, "from"), member(one, "value")
    if who not in ASKING + ANSWERING:
        raise DamagedRow(f"message {place} is from {who!r}, known are {', '.join(ASKING + ANSWERING)}")
    if not isinstance(said, str):
        raise DamagedRow(f"message {place}: value should be text")
    return who in ANSWERING, said


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
    """Finds where the objects of a JSON list begin and end, by its brackets and quotes alone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes = b""
        self._place = 0
        self._begin = 0
        self._depth = 0
        self.line = 1
        """Where the bytes at hand begin."""
        self.number = 0
        """Objects found."""
        self.inside = False
        self.closed = False

    def feed(self, chunk: bytes) -> Iterator[tuple[str, str]]:
        self._bytes += chunk
        while not self.closed and (found := _TOKEN.search(self._bytes, self._place)):
            if found.group() == b'"':
                self._place = found.start()  # a text that goes on in the next piece
                break
            self._place = found.end()
            if self._ends(found):
                self.number += 1
                line = self.line + self._bytes.count(b"\n", 0, self._begin)
                text = self._bytes[self._begin : self._place].decode("utf-8", errors="replace")
                yield f"line {line}, conversation {self.number}", text
        done = self._begin if self._depth else self._place
        self.line += self._bytes.count(b"\n", 0, done)
        self._bytes, self._place, self._begin = self._bytes[done:], self._place - done, 0
        if len(self._bytes) > MAX_ITEM_BYTES:
            raise DamagedFile(f"{self._path}, line {self.line}: conversation {self.number + 1} does not end")

    def _ends(self, found: re.Match[bytes]) -> bool:
        """Whether an object is whole with this token."""
        token = found.group()
        if not self.inside:
            if token != b"[" or self._bytes[: found.start()].strip(b" \t\r\n\xef\xbb\xbf"):
                raise WorkloadError(f"{self._path}: should be a JSON list of conversations")
            self.inside = True
        elif token in (b"{", b"["):
            self._begin = self._begin if self._depth else found.start()
            self._depth += 1
        elif token in (b"}", b"]"):
            self.closed = not self._depth
            self._depth -= 1
            return self._depth == 0
        return False
