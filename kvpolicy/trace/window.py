"""A window of time of what servers recorded: rows of some hours or days, read as if the recording had begun and ended
there.

Rows have readings of their engine core's clock. What time of day that was follows from the core's header, which has one
reading of the clock and when it was taken. Where the header is older and has none, the last row is taken to be as old
as its file, as a server's upkeep of its trace does, with a :class:`~kvpolicy.trace.parts.TraceWarning`. A simulated
clock is no time of day: there only times back from the end are taken.

Of ``decisions``, ``steps`` and the other tables, those rows are in a window whose time
(:data:`~kvpolicy.trace.row_groups.TIMES`) is: a preemption that ended after it has no outcome, one that was decided
before it has none either. Of requests those count that arrived in it (:meth:`~kvpolicy.trace.Trace.arrivals`). Those
that arrived before and were served in it are there, too: by them is seen which preemptions are recorded completely.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any

import pyarrow as pa

from kvpolicy.fields import WrongValue
from kvpolicy.trace.header import Header
from kvpolicy.trace.parts import TraceError, TraceWarning
from kvpolicy.trace.row_groups import TIMES, Extent, core_rows, extent_of, offset_by_files_s, requests_served_after
from kvpolicy.trace.table import Trace, core_folders, read, with_core

FORM = (
    "an ISO time such as 2026-11-24T09:00 (UTC where it names no zone), a time back from the last row such as -2h, "
    "-90m or -1.5d, begin or end"
)
HELP = f"Only what was recorded between these two times. Each is {FORM}. Files of other times are not read."
BEGIN, END = "begin", "end"
BACK = re.compile(r"-(\d{1,9}(?:\.\d{1,9})?)([smhd])", re.ASCII)
EARLIEST_S, LATEST_S = (
    datetime(year, month, day, tzinfo=UTC).timestamp() for year, month, day in ((1, 1, 1), (9999, 12, 31))
)
"""The times that have a date, seconds since the epoch."""
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


@dataclass(frozen=True, slots=True)
class Moment:
    """One end of a window."""

    text: str
    back_s: float | None = None
    """Seconds before the last row."""
    epoch_s: float | None = None
    """Seconds since the epoch. Where both are None: as early, or as late, as anything recorded."""

    @classmethod
    def parse(cls, text: object) -> Moment:
        """Raises WrongValue for what is none of :data:`FORM`."""
        if text in (BEGIN, END):
            return cls(str(text))
        if isinstance(text, str) and (back := BACK.fullmatch(text)):
            return cls(text, back_s=float(back[1]) * UNITS_S[back[2]])
        try:
            if not isinstance(text, str):
                raise ValueError
            return cls(text, epoch_s=_epoch_s(text))
        except (ValueError, OverflowError):
            raise WrongValue("between", f"has {text!r}, should be {FORM}") from None

    def at_s(self, last_s: float) -> float:
        """When it is, where the last row is of ``last_s``."""
        if self.epoch_s is not None:
            return self.epoch_s
        if self.back_s is not None:
            return last_s - self.back_s
        return -inf if self.text == BEGIN else inf


@dataclass(frozen=True, slots=True)
class Window:
    """A window as it was given, and the part of it in which anything was recorded."""

    between: tuple[str, str]
    begin: str
    """The time of day in UTC; of a simulation, seconds of its clock."""
    end: str

    def text(self) -> str:
        return f"only what was recorded from {self.begin} to {self.end} (--between {' '.join(self.between)})"


@dataclass(frozen=True, slots=True)
class CoreTimes:
    """When an engine core recorded."""

    extent: Extent
    offset_s: float
    """What is added to its clock for seconds since the epoch, in a simulation for nothing."""

    @property
    def first_s(self) -> float:
        return self.extent.first_s + self.offset_s

    @property
    def last_s(self) -> float:
        return self.extent.last_s + self.offset_s


def read_between(
    folders: Sequence[Path | str], between: tuple[str, str] | None, table: str | None = None
) -> dict[str, Trace]:
    """Traces by folder: whole where ``between`` is None, else what was recorded from its first to its second time,
    without the cores, and the folders, that recorded nothing then.

    Times back are from the last row of all of these traces. ``table``: one that has to have a row then.

    Raises WrongValue for times that are none, or of which the second is not after the first; TraceError, naming the
    times that there are, where nothing was recorded then, for a profile, which is no log in time, and as
    :func:`kvpolicy.trace.read`.
    """
    if between is None:
        return {name: read(name) for name in map(str, folders)}
    return read_window(folders, between, table)[0]


def read_window(
    folders: Sequence[Path | str], between: tuple[str, str], table: str | None = None
) -> tuple[dict[str, Trace], Window]:
    """As :func:`read_between`, with the window that it was."""
    names = list(map(str, folders))
    begin, end = _parsed(between)
    cores = {name: core_folders(Path(name)) for name in names}
    simulated = _is_simulated([core for of_folder in cores.values() for core in of_folder])
    if simulated and (begin.epoch_s is not None or end.epoch_s is not None):
        raise WrongValue("between", "has a time of day, and a simulation has none: give times back, such as -2h")
    times = {core: placed for of_folder in cores.values() for core in of_folder if (placed := _times(core, simulated))}
    if not times:
        raise TraceError(f"{', '.join(names)}: nothing was recorded")
    last_s = max(placed.last_s for placed in times.values())
    from_s, to_s = begin.at_s(last_s), end.at_s(last_s)
    if from_s >= to_s:
        raise WrongValue("between", f"is from {begin.text} to {end.text}: the second time should be after the first")
    windowed = {name: _windowed(of_folder, times, from_s, to_s) for name, of_folder in cores.items()}
    found = {name: trace for name, trace in windowed.items() if trace.headers}
    if not any(table is None or table in trace.tables for trace in found.values()):
        nothing = "nothing was recorded" if table is None else f"table {table} holds nothing"
        within = f"between {begin.text} and {end.text}"
        raise TraceError(f"{', '.join(names)}: {nothing} {within}; {_recorded(times, simulated)}")
    first_s = max(from_s, min(placed.first_s for placed in times.values()))
    edges = (_time_text(at_s, simulated) for at_s in (first_s, min(to_s, last_s)))
    return found, Window((begin.text, end.text), *edges)


def joined(parts: Sequence[Trace]) -> Trace:
    """Traces of several folders as one. Raises TraceError for cores of the same name."""
    names = [name for part in parts for name in part.headers]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise TraceError(f"{twice}: a core of this name is there already; is a trace given twice?")
    rows: dict[str, list[pa.Table]] = {}
    for part in parts:
        for name, table in part.tables.items():
            rows.setdefault(name, []).append(table)
    tables = {name: pa.concat_tables(found, promote_options="default") for name, found in rows.items()}
    headers = {name: header for part in parts for name, header in part.headers.items()}
    return Trace(headers, tables, {name: at_s for part in parts for name, at_s in part.begin_s.items()})


def _parsed(between: object) -> tuple[Moment, Moment]:
    if not isinstance(between, Sequence) or isinstance(between, str) or len(between) != 2:
        raise WrongValue("between", f'is {between!r}, should be two times, as ("-2h", "end")')
    return Moment.parse(between[0]), Moment.parse(between[1])


def _is_simulated(cores: Sequence[Path]) -> bool:
    """Raises TraceError for a profile, and for a simulation beside anything else."""
    sources = {core: Header.read(core / "header.json").source for core in cores}
    for core, source in sources.items():
        if source == "profile":
            raise TraceError(f"{core}: is of a profile, which is judged as a whole: give it without --between")
    if len(set(sources.values())) > 1:
        raise TraceError(f"{cores[0].parent}: a simulation and a server have no common time: give one of them")
    return "simulation" in sources.values()


def _times(core: Path, simulated: bool) -> CoreTimes | None:
    extent = extent_of(core)
    if extent is None:
        return None
    if simulated:
        return CoreTimes(extent, 0.0)
    header = Header.read(core / "header.json")
    if header.clock_s is None:
        warnings.warn(
            f"{core}: its header does not say what time of day its clock stood for, as that of an earlier kvpolicy: "
            "the last row is taken to be of the time of its file",
            TraceWarning,
            stacklevel=2,
        )
        return _placed(core, extent, offset_by_files_s(core, extent), "the times of its files")
    where = core / "header.json"
    try:
        created_s = _epoch_s(header.created)
    except (ValueError, OverflowError):
        raise TraceError(f"{where}: field created is {header.created!r}, should be an ISO time") from None
    return _placed(where, extent, created_s - header.clock_s, f"its field clock_s, {header.clock_s:g},")


def _placed(where: Path, extent: Extent, offset_s: float, by: str) -> CoreTimes:
    """Raises TraceError, naming ``where`` and ``by`` what, for times that are beyond all calendars."""
    times = CoreTimes(extent, offset_s)
    if not EARLIEST_S <= times.first_s <= times.last_s <= LATEST_S:
        raise TraceError(
            f"{where}: by {by} rows are of a time outside the years 1 to 9999: correct it, or leave it out"
        )
    return times


def _epoch_s(iso: str) -> float:
    """Seconds since the epoch. Refuses as datetime does what is no ISO time, or is beyond all clocks."""
    found = datetime.fromisoformat(iso)
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _windowed(cores: Sequence[Path], times: Mapping[Path, CoreTimes], from_s: float, to_s: float) -> Trace:
    """What these cores recorded between two times; without those that recorded nothing."""
    headers: dict[str, Header] = {}
    begin_s: dict[str, float] = {}
    parts: dict[str, list[pa.Table]] = {}
    for core in cores:
        if core not in times or times[core].last_s < from_s or times[core].first_s > to_s:
            continue
        offset_s = times[core].offset_s
        found = _rows_between(core, (from_s - offset_s, to_s - offset_s))
        if not found:
            continue
        headers[core.name] = Header.read(core / "header.json")
        if from_s > -inf:
            begin_s[core.name] = from_s - offset_s
        for name, rows in found.items():
            parts[name] = [*parts.get(name, ()), *(with_core(table, core.name) for table in rows)]
    tables = {name: pa.concat_tables(rows, promote_options="default") for name, rows in parts.items()}
    return Trace(headers, tables, begin_s)


def _rows_between(core: Path, window_s: tuple[float, float]) -> dict[str, list[pa.Table]]:
    """Rows of one core between two times of its clock, by table; empty where it recorded nothing then."""
    found: dict[str, list[pa.Table]] = {}
    decided: list[str] = []
    for name in TIMES:
        rows = list(core_rows(core, name, between_s=window_s, ids=decided if name == "outcomes" else None))
        if name == "decisions":
            decided = sorted(id_ for table in rows for id_ in table["preemption_id"].to_pylist())
        if rows:
            found[name] = rows
    if not found or window_s[0] == -inf:
        return found
    victims = {id_ for table in found.get("decisions", ()) for id_ in table["request"].to_pylist()}
    if earlier := list(requests_served_after(core, window_s[0], sorted(victims))):
        found["requests"] = [*earlier, *found.get("requests", ())]
    return found


def _recorded(times: Mapping[Any, CoreTimes], simulated: bool) -> str:
    """The times that there are."""
    first_s = min(found.first_s for found in times.values())
    last_s = max(found.last_s for found in times.values())
    if simulated:
        return f"the simulation is of {last_s - first_s:,.0f} s"
    return f"there is what was recorded from {_time_text(first_s, False)} to {_time_text(last_s, False)}"


def _time_text(at_s: float, simulated: bool) -> str:
    """Seconds since the epoch as an ISO time; those of a simulation as they are."""
    return f"{at_s:.6g} s" if simulated else datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
