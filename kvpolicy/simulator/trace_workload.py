"""The requests of a recorded trace as a workload, to be replayed in a simulator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvpolicy.trace import Header, core_folders, iter_parts
from kvpolicy.workload import Format, Request, WorkloadError
from kvpolicy.workload.files import Care, Counts
from kvpolicy.workload.options import Options
from kvpolicy.workload.requests import MARKS, Source

COLUMNS = ("request", "arrival_s", "prompt_tokens", "output_tokens")

ParsedRow = tuple[float, str, int, int, int, dict[str, Any]]
"""Arrival, request, prompt and output tokens, the row among its core's requests, and what the request says of itself.
"""


class RecordedRequests:
    """Table ``requests`` of one engine core of a trace: a :class:`kvpolicy.workload.Source`.

    A trace lists requests as they finish. They are sorted by arrival, for which few columns are held in memory. Time
    counts from the first arrival. A trace contains no text, so shared prefixes are unknown.
    """

    def __init__(self, folder: Path | str, core: str | None = None, care: Care | None = None, seed: int = 0) -> None:
        """``core``: the engine core to read; may be left out where the trace has only one."""
        self.folder = Path(folder)
        self.core = core
        self.care = care or Care()
        self.seed = seed
        self.counts = Counts()
        """Counts of the latest iteration; ``empty`` are requests that generated nothing."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def source(self) -> str:
        header = Header.read(self._core() / "header.json")
        return f"{self.folder.name}: recorded by {header.engine} ({header.source}), run {header.run_id}"

    def __iter__(self) -> Iterator[Request]:
        counts = self.counts = Counts()
        rows = sorted(self._rows(counts))
        for arrival_s, _, prompt_tokens, output_tokens, _, marks in rows:
            counts.requests += 1
            yield Request(arrival_s - rows[0][0], prompt_tokens, output_tokens, **marks)

    def _core(self) -> Path:
        cores = {core.name: core for core in core_folders(self.folder)}
        name = self.core if self.core is not None else next(iter(cores)) if len(cores) == 1 else None
        if name not in cores:
            problem = "which one is meant?" if self.core is None else f"there is no {self.core}"
            raise WorkloadError(f"{self.folder}: has engine cores {', '.join(cores)}; {problem} (core=NAME)")
        return cores[name]

    def _rows(self, counts: Counts) -> Iterator[ParsedRow]:
        core = self._core()
        for part in iter_parts(core, "requests"):
            present = [column for column in MARKS if column in part.column_names]
            for row in part.select([*COLUMNS, *present]).to_pylist():
                counts.rows += 1
                parsed = self._parse(row, counts)
                if parsed:
                    yield parsed

    def _parse(self, row: Mapping[str, Any], counts: Counts) -> ParsedRow | None:
        prompt_tokens, output_tokens = row["prompt_tokens"], row["output_tokens"]
        if prompt_tokens < 1 or output_tokens < 0:
            where = f"{self.folder}, table requests, row {counts.rows - 1}"
            counts.damage(self.care, f"{where}: prompt_tokens {prompt_tokens}, output_tokens {output_tokens}")
            return None
        if not output_tokens:
            counts.empty += 1
            return None
        marks = {field: row[column] for column, field in MARKS.items() if row.get(column) is not None}
        return float(row["arrival_s"]), str(row["request"]), prompt_tokens, output_tokens, counts.rows, marks


def _read(path: Path, options: Options) -> Source:
    care = Care(options.flag("skip_damaged"))
    return RecordedRequests(path, options.text("core"), care, options.seed())


def _is_trace(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*/header.json"))


TRACE_FORMATS = {"trace": Format("a folder recorded by kvpolicy: table requests", _read, _is_trace)}
"""For :func:`kvpolicy.workload.open_workload`, whose package must not import :mod:`kvpolicy.trace`."""
