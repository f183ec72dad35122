"""Sinks for the rows of a simulated trace: memory, or part files; and the identity of a run in the trace's header."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import pyarrow as pa

from kvpolicy.errors import InputError
from kvpolicy.order import Priority
from kvpolicy.policy import Policy
from kvpolicy.simulator.base import NULL_BLOCK, Server, Times
from kvpolicy.trace import SCHEMAS, Header, Row, Trace, from_rows, with_core, write_part
from kvpolicy.workload import Source

PART_ROWS = 5000


class MemorySink:
    """Holds all rows in memory and returns them as a :class:`Trace`."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Row]] = {name: [] for name in SCHEMAS}
        self._headers: dict[str, Header] = {}

    def begin(self, core: str, header: Header) -> None:
        self._headers[core] = header

    def add(self, table: str, rows: list[Row]) -> None:
        self._rows[table] += rows

    def finish(self) -> Trace:
        """Return the trace. Raises InputError where no run has begun."""
        core = _only(self._headers)
        tables = {name: with_core(from_rows(name, rows), core) for name, rows in self._rows.items() if rows}
        return Trace(dict(self._headers), tables)


class FolderSink:
    """Writes ``folder/CORE/...`` in the format of :mod:`kvpolicy.trace`, holding at most ``part_rows`` rows per table.

    Raises FileExistsError where the core's folder exists. ``finish`` returns no trace: read the folder.
    """

    def __init__(self, folder: Path | str, part_rows: int = PART_ROWS) -> None:
        self.folder = Path(folder)
        self._part_rows = part_rows
        self._rows: dict[str, list[Row]] = {name: [] for name in SCHEMAS}
        self._parts = dict.fromkeys(SCHEMAS, 0)
        self._headers: dict[str, Header] = {}

    def begin(self, core: str, header: Header) -> None:
        if (self.folder / core).exists():
            raise FileExistsError(f"{self.folder / core}: exists already; give every run a folder of its own")
        header.write(self.folder / core)
        self._headers[core] = header

    def add(self, table: str, rows: list[Row]) -> None:
        waiting = self._rows[table]
        waiting += rows
        while len(waiting) >= self._part_rows:
            self._write(table, waiting[: self._part_rows])
            del waiting[: self._part_rows]

    def finish(self) -> None:
        for name, rows in self._rows.items():
            if rows:
                self._write(name, rows)
                self._rows[name] = []

    def _write(self, name: str, rows: list[Row]) -> None:
        table: pa.Table = from_rows(name, rows)
        write_part(self.folder / _only(self._headers), name, self._parts[name], table)
        self._parts[name] += 1


def _only(headers: dict[str, Header]) -> str:
    if len(headers) != 1:
        raise InputError(f"a sink takes one run, this one has begun {len(headers)}: make a new one for each run")
    return next(iter(headers))


FIXED_DAY = "1970-01-01T00:00:00Z"
"""Default creation time of a simulated trace; fixed, so that equal runs give equal traces."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything that determines a run, beside the simulator itself."""

    requests: Source
    policy: Policy
    server: Server
    times: Times
    seed: int

    def core(self, simulator: str) -> str:
        """Name of the engine core: equal only for equal runs, so that traces of several can be read together."""
        inputs = repr(
            (self.requests.name, self.requests.seed, self.policy.label, self.server, self.times.source, self.seed)
        )
        return f"{simulator}-{blake2b(inputs.encode(), digest_size=6).hexdigest()}"

    def header(self, core: str, engine: str, created: str) -> Header:
        server = self.server
        header = Header.recorded_on(
            server.engine_spec,
            run_id=core,
            source="simulation",
            created=created,
            engine=engine,
            device_blocks=server.device_blocks + NULL_BLOCK,
            host_blocks=server.host_blocks,
            policy=self.policy.label,
        )
        order = server.order if server.scheduling == "fcfs" else Priority()
        return replace(
            header,
            seed=self.seed,
            notes=f"workload {self.requests.name}; times: {self.times.source}",
            order=order.label,
            order_digest=order.digest,
        )
