"""ServeGen's tables (Alibaba): who sends how many requests when, by client, and how long they are.

Two files of aggregates, of which requests are drawn: a CSV of the rate and the burstiness of each client in windows of
600 s, and a Parquet table of the distributions of its lengths in windows of six hours.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from kvpolicy.workload.arrivals import MAX_SHAPE, MIN_SHAPE, stream
from kvpolicy.workload.files import Care, Counts, DamagedFile, DamagedRow, FileSource, cells, lines, places, real, whole
from kvpolicy.workload.requests import Request, WorkloadError

COLUMNS = ("client", "window_start_s", "rate_per_s", "pattern", "arg1")
"""Of the CSV. ``arg1`` is the shape of the gaps' distribution; the scale follows from the rate."""
LENGTH_COLUMNS = ("client", "window_start_s", "field", "value", "prob")
PROMPT, OUTPUT = "input_tokens", "output_tokens"
WINDOW_S, LENGTHS_S = 600.0, 21_600
"""Seconds of a window of arrivals, and of one of lengths."""
MAX_RATE_PER_S = 1e4
"""Of a client: the arrivals of a window are held in memory."""


MAX_LENGTHS_BYTES = 1 << 29
"""Of the rows of lengths, some ten million: a distribution holds its values as Python's numbers, which are larger."""


@dataclass(frozen=True, slots=True)
class Span:
    """One client in one window of arrivals."""

    client: int
    start_s: float
    rate_per_s: float
    pattern: str
    """Gamma or Weibull."""
    shape: float

    def times_s(self, rng: random.Random) -> list[float]:
        """Arrivals: as many as the rate says, the fraction by chance, at gaps of the pattern that fill the window.

        A renewal process that began anew in every window would begin with a burst, and have too many arrivals.
        """
        expected = self.rate_per_s * WINDOW_S
        count = int(expected) + (rng.random() < expected - int(expected))
        gap = rng.gammavariate if self.pattern == "Gamma" else lambda shape, scale: rng.weibullvariate(scale, shape)
        gaps = [gap(self.shape, 1.0) for _ in range(count + 1)]
        total = sum(gaps)
        if not total:  # gaps of a tiny shape may all be too small for a number
            return [self.start_s] * count
        return [self.start_s + WINDOW_S * min(1.0, passed / total) for passed in accumulate(gaps[:-1])]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Values, and the probability of each value or a lower one."""

    values: list[int]
    below: list[float]

    def draw(self, rng: random.Random) -> int:
        return self.values[min(bisect_left(self.below, rng.random() * self.below[-1]), len(self.values) - 1)]


class ServeGen(FileSource):
    """Requests drawn from ServeGen's tables: a :class:`kvpolicy.workload.Source`.

    Prompt and output are drawn apart, as the tables hold nothing of both together. Nothing is shared between prompts.
    """

    def __init__(self, path: Path | str, lengths: Path | str, care: Care | None = None, seed: int = 0) -> None:
        """``path``: the windows of arrivals; ``lengths``: the distributions of lengths."""
        super().__init__(path, care, seed)
        self.lengths = Path(lengths)

    @property
    def source(self) -> str:
        return f"{self.path.name} and {self.lengths.name}: ServeGen's clients, arrivals and lengths drawn"

    def __iter__(self) -> Iterator[Request]:
        counts = self.counts = Counts()
        lengths = _lengths(self.lengths)
        clients: dict[int, list[Span]] = {}
        for span in self._spans(counts, lengths):
            clients.setdefault(span.client, []).append(span)
        of_clients = [self._of_client(client, spans, lengths) for client, spans in sorted(clients.items())]
        for request in heapq.merge(*of_clients, key=lambda request: request.arrival_s):
            counts.requests += 1
            yield request

    def _of_client(
        self, client: int, spans: list[Span], lengths: Mapping[tuple[int, int, str], Distribution]
    ) -> Iterator[Request]:
        arrivals, tokens = stream(self.seed, f"arrivals of {client}"), stream(self.seed, f"lengths of {client}")
        for span in sorted(spans, key=lambda span: span.start_s):
            prompts, outputs = (lengths[_key(span, field)] for field in (PROMPT, OUTPUT))
            for arrival_s in span.times_s(arrivals):
                yield Request(arrival_s, prompts.draw(tokens), outputs.draw(tokens))

    def _spans(self, counts: Counts, lengths: Mapping[tuple[int, int, str], Distribution]) -> Iterator[Span]:
        numbered = self._lines(counts)
        header = next(numbered, None)
        if header is None:
            raise WorkloadError(f"{self.path}: is empty, should begin with columns {', '.join(COLUMNS)}")
        columns = places(self.path, header[1], COLUMNS)
        seen: set[tuple[int, float]] = set()
        for number, line in numbered:
            counts.rows += 1
            try:
                span = _span(line, columns)
                if (span.client, span.start_s) in seen:
                    raise DamagedRow(f"client {span.client} is there twice from second {span.start_s:g}")
                for _, start_s, field in (_key(span, name) for name in (PROMPT, OUTPUT)):
                    if (span.client, start_s, field) not in lengths:
                        absent = f"no {field} of client {span.client} from second {start_s}"
                        raise DamagedRow(f"{self.lengths} holds {absent}")
            except DamagedRow as error:
                counts.damage(self.care, f"{self.path}, line {number}: {error}")
                continue
            seen.add((span.client, span.start_s))
            yield span

    def _lines(self, counts: Counts) -> Iterator[tuple[int, str]]:
        try:
            yield from lines(self.path)
        except DamagedFile as error:
            counts.damage(self.care, str(error))


def _key(span: Span, field: str) -> tuple[int, int, str]:
    return span.client, int(span.start_s // LENGTHS_S) * LENGTHS_S, field


def _span(line: str, columns: Mapping[str, int]) -> Span:
    """A row of the CSV. Raises DamagedRow, naming the field."""
    fields = cells(line)
    if len(fields) != len(columns):
        raise DamagedRow(f"{len(fields)} fields, the header has {len(columns)}")
    values = {name: fields[columns[name]] for name in COLUMNS}
    start_s, rate_per_s, shape = (real(values[name], name) for name in ("window_start_s", "rate_per_s", "arg1"))
    for name, number, most in (("window_start_s", start_s, 1e9), ("rate_per_s", rate_per_s, MAX_RATE_PER_S)):
        if not 0 <= number <= most:
            raise DamagedRow(f"{name} is {number!r}, should be from 0 to {most:g}")
    pattern = values["pattern"]
    if pattern not in ("Gamma", "Weibull"):
        raise DamagedRow(f"pattern is {pattern!r}, should be Gamma or Weibull")
    if not MIN_SHAPE <= shape <= MAX_SHAPE:
        raise DamagedRow(f"arg1 is {shape!r}, should be a shape, from {MIN_SHAPE:g} to {MAX_SHAPE:g}")
    return Span(whole(values["client"], "client"), start_s, rate_per_s, pattern, shape)


def _lengths(file: Path) -> Mapping[tuple[int, int, str], Distribution]:
    """The distributions of prompts and outputs by client and window. Raises WorkloadError."""
    found: dict[tuple[int, int, str], dict[int, float]] = {}
    for row, values in enumerate(_length_rows(file)):
        if values[2] not in (PROMPT, OUTPUT):
            continue
        try:
            client, start_s, length = (whole(values[at], LENGTH_COLUMNS[at]) for at in (0, 1, 3))
            prob = real(values[4], "prob")
            if not length or not 0 <= prob <= 1:
                raise DamagedRow(f"value is {length} and prob {prob!r}, should be 1 or more, and from 0 to 1")
        except DamagedRow as error:
            raise WorkloadError(f"{file}, row {row}: {error}") from error
        if prob:
            probs = found.setdefault((client, start_s, values[2]), {})
            probs[length] = probs.get(length, 0.0) + prob
    return {
        key: Distribution(sorted(probs), list(accumulate(probs[length] for length in sorted(probs))))
        for key, probs in found.items()
    }


def _length_rows(file: Path) -> Iterator[tuple[Any, ...]]:
    """Values of :data:`LENGTH_COLUMNS` of each row, a batch in memory at a time. Raises WorkloadError."""
    import pyarrow as pa  # no other format needs it

    from kvpolicy.stored_tables import UnreadableTable, opened

    try:
        table = opened(file, LENGTH_COLUMNS, MAX_LENGTHS_BYTES)
    except UnreadableTable as error:
        raise WorkloadError(str(error)) from error
    except FileNotFoundError as error:
        raise WorkloadError(f"{file}: cannot be read: {error.strerror}") from error
    names = table.schema_arrow.names
    for name in LENGTH_COLUMNS:
        if names.count(name) != 1:
            problem = "is there twice" if name in names else "is missing"
            raise WorkloadError(f"{file}: column {name} {problem}; the columns are {', '.join(names)}")
    try:
        for batch in table.iter_batches(columns=list(LENGTH_COLUMNS)):
            yield from zip(*(batch[name].to_pylist() for name in LENGTH_COLUMNS), strict=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise WorkloadError(f"{file}: damaged or not a Parquet file: {error}") from error
