"""Tables of lengths without times (CSV with prompt_tokens and output_tokens); arrivals come from a process."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

from kvpolicy.workload.arrivals import Arrivals, AtOnce, stream
from kvpolicy.workload.files import Care, Counts, DamagedFile, DamagedRow, FileSource, cells, lines, places, tokens
from kvpolicy.workload.requests import Request, WorkloadError

COLUMNS = ("prompt_tokens", "output_tokens")


class LengthTable(FileSource):
    """Requests with the lengths of a table's rows: a :class:`kvpolicy.workload.Source`.

    Each row once, in the file's order; or, with ``draw``, that many rows drawn from the seed with replacement, for
    which the table is held in memory (16 bytes a row).
    """

    def __init__(
        self,
        path: Path | str,
        arrivals: Arrivals | None = None,
        care: Care | None = None,
        seed: int = 0,
        draw: int | None = None,
    ) -> None:
        if draw is not None and draw < 0:
            raise WorkloadError(f"{path}: draw is {draw}, should be 0 or more")
        super().__init__(path, care, seed)
        self.arrivals = arrivals or AtOnce()
        self.draw = draw

    @property
    def source(self) -> str:
        return f"{self.path.name}: a table of lengths, arrivals drawn"

    def __iter__(self) -> Iterator[Request]:
        counts = self.counts = Counts()
        pairs = self.pairs(counts) if self.draw is None else self._drawn(counts, self.draw)
        times_s = self.arrivals.times_s(stream(self.seed, "arrivals"))
        for (prompt_tokens, output_tokens), arrival_s in zip(pairs, times_s, strict=False):
            counts.requests += 1
            yield Request(arrival_s, prompt_tokens, output_tokens)

    def _drawn(self, counts: Counts, draw: int) -> Iterator[tuple[int, int]]:
        prompts, outputs = array("q"), array("q")
        for prompt_tokens, output_tokens in self.pairs(counts):
            prompts.append(prompt_tokens)
            outputs.append(output_tokens)
        if not prompts:
            raise WorkloadError(f"{self.path}: holds no lengths to draw from")
        rng = stream(self.seed, "rows")
        for _ in range(draw):
            row = rng.randrange(len(prompts))
            yield prompts[row], outputs[row]

    def pairs(self, counts: Counts) -> Iterator[tuple[int, int]]:
        """Prompt and output tokens of each row, which is counted."""
        numbered = self._lines(counts)
        header = next(numbered, None)
        if header is None:
            raise WorkloadError(f"{self.path}: is empty, should begin with columns {', '.join(COLUMNS)}")
        columns = places(self.path, header[1], COLUMNS)
        for number, line in numbered:
            counts.rows += 1
            try:
                fields = cells(line)
                if len(fields) != len(columns):
                    raise DamagedRow(f"{len(fields)} fields, the header has {len(columns)}")
                prompt_tokens, output_tokens = (tokens(fields[columns[name]], name) for name in COLUMNS)
            except DamagedRow as error:
                counts.damage(self.care, f"{self.path}, line {number}: {error}")
                continue
            yield prompt_tokens, output_tokens

    def _lines(self, counts: Counts) -> Iterator[tuple[int, str]]:
        try:
            yield from lines(self.path)
        except DamagedFile as error:
            counts.damage(self.care, str(error))
