"""Conversations found in a table of lengths whose rows hold a prompt with its whole history, as ShareGPT's do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvpolicy.workload.arrivals import Think, stream
from kvpolicy.workload.files import Care, Counts
from kvpolicy.workload.length_tables import LengthTable
from kvpolicy.workload.requests import WorkloadError
from kvpolicy.workload.sessions import Beginning, Session, SessionFile, Turn, Windows, history


class ContinuedLengths(SessionFile):
    """Conversations of a table of lengths: a :class:`kvpolicy.workload.Source`.

    A row continues the conversation of the row above where its prompt is longer than that prompt and answer together;
    else it begins one. The table does not say where conversations end: one that begins with a longer prompt than the
    last one ended with is taken for its continuation. Where rows are missing, what they added is part of the next
    message. Pauses are drawn, and ``beginning`` gives the starts. In the counts, rows and requests are answers.
    """

    def __init__(
        self,
        path: Path | str,
        think: Think,
        beginning: Beginning | None = None,
        care: Care | None = None,
        seed: int = 0,
        block_tokens: int = 16,
        count: int | None = None,
        windows: Windows | None = None,
    ) -> None:
        """``count``: conversations. ``windows``: of those turns alone.

        Raises :class:`WorkloadError` for blocks of no token.
        """
        if block_tokens < 1:
            raise WorkloadError(f"{path}: block is {block_tokens}, should be 1 or more")
        super().__init__(path, beginning, care, seed, count, windows)
        self.think = think
        self.block_tokens = block_tokens

    @property
    def source(self) -> str:
        return f"{self.path.name}: a table of lengths, conversations found by their growing prompts, pauses drawn"

    def _sessions(self, counts: Counts) -> Iterator[Session]:
        rng = stream(self.seed, "think times")
        turns: list[Turn] = []
        number = tokens = 0
        for prompt_tokens, output_tokens in LengthTable(self.path, care=self.care).pairs(counts):
            if turns and prompt_tokens <= tokens:
                yield Session(f"conversation-{number}", tuple(turns), self.block_tokens)
                number, turns = number + 1, []
            tokens = prompt_tokens + output_tokens
            think_s = self.think.draw(rng) if turns else 0.0
            ids = history(number, tokens, self.block_tokens)
            turns.append(Turn(prompt_tokens, output_tokens, think_s, prefix=ids))
        if turns:
            yield Session(f"conversation-{number}", tuple(turns), self.block_tokens)
