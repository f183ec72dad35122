"""Readers of traces whose rows have arrival times: Azure, Mooncake, BurstGPT, and plain tables of arrivals."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from kvpolicy.request_marks import HINT_NAMES, Hints, InvalidMarks, read_marks
from kvpolicy.workload.files import (
    EXACT,
    Care,
    Counts,
    DamagedFile,
    DamagedRow,
    FileSource,
    block_ids,
    cells,
    lines,
    member,
    places,
    real,
    record,
    tokens,
    whole,
)
from kvpolicy.workload.requests import MARKS, Request, WorkloadError

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens of one of Mooncake's ``hash_ids``."""


class Row(NamedTuple):
    """A request as in the file."""

    at: float
    """Arrival in ticks of the layout; exact where it is a whole number."""
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    session: str = ""
    marks: Mapping[str, Any] = MappingProxyType({})
    """Class, priority and deadlines, as fields of the request."""


Parse = Callable[[str], Row | None]
"""Parses a line; None for a failed request. Raises :class:`DamagedRow`."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A published file format of requests."""

    name: str
    source: str
    """Publisher and licence."""
    fields: tuple[str, ...]
    """Columns or JSON fields of the format."""
    ticks_per_s: float
    """Units of :attr:`Row.at` per second."""
    from_first: bool
    """Whether time counts from the first request, because the file's origin is arbitrary."""
    bind: Callable[[Mapping[str, int]], Parse]
    """Makes a line parser from the positions of a file's columns."""
    json: bool = False
    block_tokens: int = 0


class TimedFile(FileSource):
    """Requests of one trace file, read anew at every iteration: a :class:`kvpolicy.workload.Source`."""

    def __init__(self, path: Path | str, layout: Layout, care: Care | None = None, seed: int = 0) -> None:
        """``seed``: for drawing the requests' texts; nothing else is drawn."""
        super().__init__(path, care, seed)
        self.layout = layout

    @property
    def source(self) -> str:
        return f"{self.path.name}: {self.layout.source}"

    def __iter__(self) -> Iterator[Request]:
        counts = self.counts = Counts()
        rows = self._rows(counts)
        if self.care.sort:
            rows = iter(sorted(rows, key=lambda numbered: numbered[1].at))
        ticks_per_s, block_tokens = self.layout.ticks_per_s, self.layout.block_tokens
        origin: float | None = None if self.layout.from_first else 0
        last: float = 0
        for number, row in rows:
            if origin is None:
                origin = last = row.at
            if row.at < last:
                order = "before the row above it" if counts.requests else "before the workload's start"
                counts.damage(
                    self.care, f"{self.path}, line {number}: arrives {(last - row.at) / ticks_per_s:.9g} s {order}"
                )
                continue
            last = row.at
            counts.requests += 1
            yield Request(
                (row.at - origin) / ticks_per_s,
                row.prompt_tokens,
                row.output_tokens,
                row.prefix,
                block_tokens if row.prefix else 0,
                row.session,
                **row.marks,
            )

    def _rows(self, counts: Counts) -> Iterator[tuple[int, Row]]:
        """Line number and content of each readable row."""
        parse: Parse | None = self.layout.bind({}) if self.layout.json else None
        try:
            for number, line in lines(self.path):
                if parse is None:
                    parse = self.layout.bind(places(self.path, line, self.layout.fields))
                    continue
                counts.rows += 1
                try:
                    row = parse(line)
                except DamagedRow as error:
                    counts.damage(self.care, f"{self.path}, line {number}: {error}")
                    continue
                if row is None:
                    counts.empty += 1
                else:
                    yield number, row
        except DamagedFile as error:
            counts.damage(self.care, str(error))
        if parse is None:
            raise WorkloadError(f"{self.path}: is empty, should begin with columns {', '.join(self.layout.fields)}")


def _columns(places: Mapping[str, int], names: Sequence[str]) -> Callable[[str], list[str]]:
    """A reader of a line's fields of these names; it refuses lines with more or fewer fields than the header."""
    positions, width = [places[name] for name in names], len(places)

    def read(line: str) -> list[str]:
        fields = cells(line)
        if len(fields) != width:
            raise DamagedRow(f"{len(fields)} fields, the header has {width}")
        return [fields[place] for place in positions]

    return read


_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?", re.ASCII)


class _Stamps:
    """Reads ISO timestamps to the nanosecond. In one file either all of them have a time zone or none."""

    def __init__(self) -> None:
        self._second = ("", "", "")
        self._second_ns = 0
        self._zoned: bool | None = None

    def ns(self, text: str, field: str) -> int:
        match = _STAMP.fullmatch(text)
        if not match:
            raise DamagedRow(f"{field} is {text!r}, should be like 2023-11-16 18:15:46.6805900")
        day, clock, fraction, zone = match.groups()
        if self._zoned is not None and self._zoned != bool(zone):
            raise DamagedRow(
                f"{field} is {text!r}, should {'' if self._zoned else 'not '}carry a time zone like others"
            )
        # Successive rows often share the second, which is then parsed only once.
        if self._second != (day, clock, zone):
            try:
                moment = datetime.fromisoformat(f"{day}T{clock}{zone or '+00:00'}")
            except ValueError as error:
                raise DamagedRow(f"{field} is {text!r}: {error}") from error
            self._second, self._second_ns = (day, clock, zone), round(moment.astimezone(UTC).timestamp()) * 10**9
        self._zoned = bool(zone)
        return self._second_ns + int((fraction or "").ljust(9, "0"))


def _bind_azure(places: Mapping[str, int]) -> Parse:
    read, stamps = _columns(places, AZURE.fields), _Stamps()

    def parse(line: str) -> Row:
        at, prompt, output = read(line)
        return Row(stamps.ns(at, "TIMESTAMP"), tokens(prompt, "ContextTokens"), tokens(output, "GeneratedTokens"))

    return parse


def _bind_arrivals(places: Mapping[str, int]) -> Parse:
    marks = [column for column in (*MARKS, *HINT_NAMES) if column in places]
    read = _columns(places, (*ARRIVALS.fields, *marks))

    def parse(line: str) -> Row:
        at, prompt, output, *texts = read(line)
        at_s, prompt_tokens = real(at, "arrival_s"), tokens(prompt, "prompt_tokens")
        said = {name: text for name, text in zip(marks, texts, strict=True) if text}
        told = {MARKS[name]: _mark(text, name) for name, text in said.items() if name in MARKS}
        if hints := {name: _hint(text, name) for name, text in said.items() if name in HINT_NAMES}:
            told["hints"] = _hints(hints)
        return Row(at_s, prompt_tokens, tokens(output, "output_tokens"), marks=told)

    return parse


def _hint(text: str, column: str) -> Any:
    """What a request says of its KV in one cell, as a client would send it."""
    if text in ("true", "false") and column != "session":
        return text == "true"
    if column == "keep_s":
        return real(text, column)
    return int(text) if column == "pin" and text.isdecimal() else text


def _hints(said: Mapping[str, Any]) -> Hints:
    try:
        return read_marks(dict(said)).hints
    except InvalidMarks as invalid:
        raise DamagedRow(f"{', '.join(said)}: {invalid}") from None


def _mark(text: str, column: str) -> Any:
    """The class, priority or deadline that a cell holds."""
    if column == "class":
        return text
    number = real(text, column)
    if column == "priority":
        if not number.is_integer() or abs(number) >= EXACT:
            raise DamagedRow(f"{column} is {text!r}, should be a whole number")
        return int(number)
    if number <= 0:
        raise DamagedRow(f"{column} is {text!r}, should be above 0, or empty")
    return number


def _bind_burstgpt(places: Mapping[str, int]) -> Parse:
    labelled = "Session ID" in places
    read = _columns(places, (*BURSTGPT.fields, *(["Session ID"] if labelled else [])))

    def parse(line: str) -> Row | None:
        at, prompt_text, output_text, *session = read(line)
        at_s, prompt, output = (
            real(at, "Timestamp"),
            whole(prompt_text, "Request tokens"),
            whole(output_text, "Response tokens"),
        )
        if not prompt or not output:
            return None
        return Row(at_s, prompt, output, (), session[0] if labelled else "")

    return parse


def _bind_mooncake(places: Mapping[str, int]) -> Parse:
    def parse(line: str) -> Row:
        fields = record(line)
        prompt = tokens(member(fields, "input_length"), "input_length")
        ids = block_ids(member(fields, "hash_ids"), "hash_ids")
        blocks = -(-prompt // MOONCAKE_BLOCK_TOKENS)
        if len(ids) > blocks:
            raise DamagedRow(f"hash_ids holds {len(ids)} ids, {prompt} tokens are {blocks} blocks")
        at_ms = real(member(fields, "timestamp"), "timestamp")
        return Row(at_ms, prompt, tokens(member(fields, "output_length"), "output_length"), ids)

    return parse


AZURE = Layout(
    "azure",
    "Azure LLM inference trace, Azure/AzurePublicDataset, CC-BY-4.0",
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ticks_per_s=1e9,
    from_first=True,
    bind=_bind_azure,
)
"""2023 and 2024: CSV, TIMESTAMP in ISO format, with 7 decimals or a time zone."""

ARRIVALS = Layout(
    "arrivals",
    "a table of requests",
    ("arrival_s", "prompt_tokens", "output_tokens"),
    ticks_per_s=1.0,
    from_first=False,
    bind=_bind_arrivals,
)
"""The simplest format: CSV, seconds from the workload's start; optional columns say what requests are
(:data:`~kvpolicy.workload.requests.MARKS`) and of their KV (:data:`~kvpolicy.request_marks.HINT_NAMES`)."""

BURSTGPT = Layout(
    "burstgpt",
    "BurstGPT, HPMLL/BurstGPT, CC-BY-4.0",
    ("Timestamp", "Request tokens", "Response tokens"),
    ticks_per_s=1.0,
    from_first=True,
    bind=_bind_burstgpt,
)
"""CSV with Timestamp (seconds), Model, Log Type and, from its second release on, Session ID (blank for API calls).
Rows without response (or request) tokens are failed requests: left out, counted as empty. Sessions keep their recorded
times. The data does not say what part of its history a request repeats, so no prefixes are shared."""

MOONCAKE = Layout(
    "mooncake",
    "Mooncake trace, kvcache-ai/Mooncake, Apache-2.0",
    ("timestamp", "input_length", "output_length", "hash_ids"),
    ticks_per_s=1e3,
    from_first=False,
    bind=_bind_mooncake,
    json=True,
    block_tokens=MOONCAKE_BLOCK_TOKENS,
)
"""JSONL, milliseconds from the start; many requests share one timestamp."""
