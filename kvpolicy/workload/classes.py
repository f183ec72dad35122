"""Sources whose requests say what they are: of a class, with a priority and deadlines, in a closed loop; and sources
that are merged into one."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from kvpolicy.request_marks import CLASS_NAME, CLASS_WORDS, Classes, Marks
from kvpolicy.workload.files import Counts
from kvpolicy.workload.requests import ClosedLoop, Request, Source, WorkloadError
from kvpolicy.workload.scaling import Scaled, counts_of


@dataclass(frozen=True, slots=True)
class Labelled(Scaled):
    """Requests of one class, with its priority and deadlines; what is None stays as it is."""

    class_name: str | None = None
    priority: int | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        if self.class_name is not None and not CLASS_NAME.fullmatch(self.class_name):
            raise WorkloadError(f"{self.inner.name}: class is {self.class_name!r}, should be {CLASS_WORDS}")
        for name, seconds in (("ttft", self.ttft_s), ("tpot", self.tpot_s)):
            if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
                raise WorkloadError(f"{self.inner.name}: {name} is {seconds}, should be above 0")

    @property
    def marks(self) -> dict[str, Any]:
        """What is set, by the request's fields."""
        names = ("class_name", "priority", "ttft_s", "tpot_s")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def name(self) -> str:
        return ",".join([self.inner.name, *(f"{name}={value}" for name, value in self.marks.items())])

    def __iter__(self) -> Iterator[Request]:
        marks = self.marks
        for request in self.inner:
            yield replace(request, **marks)


@dataclass(frozen=True, slots=True)
class Granted(Scaled):
    """Requests with the class, priority and deadlines that a server grants them, by
    :meth:`kvpolicy.request_marks.Classes.grant`."""

    classes: Classes

    def __iter__(self) -> Iterator[Request]:
        for request in self.inner:
            claimed = Marks(request.class_name, request.priority, request.ttft_s, request.tpot_s)
            granted, _ = self.classes.grant(claimed)
            yield request if granted == claimed else _with_marks(request, granted)


def _with_marks(request: Request, marks: Marks) -> Request:
    return replace(
        request, class_name=marks.class_name, priority=marks.priority, ttft_s=marks.ttft_s, tpot_s=marks.tpot_s
    )


@dataclass(frozen=True, slots=True)
class Looped(Scaled):
    """Requests that are served ``concurrency`` at a time: each arrives at its own time, but not before fewer of those
    before it are being served. Raises :class:`WorkloadError` for requests that are in a closed loop already."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise WorkloadError(f"{self.inner.name}: concurrency is {self.concurrency}, should be 1 or more")

    @property
    def name(self) -> str:
        return f"{self.inner.name},concurrency={self.concurrency}"

    def __iter__(self) -> Iterator[Request]:
        loop = ClosedLoop(self.concurrency)
        for request in self.inner:
            if request.loop is not None:
                raise WorkloadError(
                    f"{self.inner.name}: concurrency {self.concurrency} is given to requests that have one of "
                    f"{request.loop.concurrency}; should be given once"
                )
            yield replace(request, loop=loop)


@dataclass(frozen=True, slots=True)
class Joined:
    """Several sources as one, in the order of arrival; requests that arrive together in the order of their sources.

    Each source keeps its own sessions, closed loops and prefixes: none is shared with another one.
    """

    sources: tuple[Source, ...]

    def __post_init__(self) -> None:
        if len(self.sources) < 2:
            raise WorkloadError(f"{len(self.sources)} sources are joined, should be 2 or more")

    @property
    def name(self) -> str:
        return " + ".join(source.name for source in self.sources)

    @property
    def source(self) -> str:
        return "; ".join(dict.fromkeys(source.source for source in self.sources))

    @property
    def seed(self) -> int:
        """That of the first source."""
        return self.sources[0].seed

    @property
    def counts(self) -> Counts | None:
        """Sums over all files, in their latest iteration; None where no source reads one."""
        counts = [found for found in map(counts_of, self.sources) if found is not None]
        if not counts:
            return None
        return Counts(
            rows=sum(one.rows for one in counts),
            requests=sum(one.requests for one in counts),
            damaged=sum(one.damaged for one in counts),
            empty=sum(one.empty for one in counts),
            first_damage=next((one.first_damage for one in counts if one.first_damage), ""),
        )

    def __iter__(self) -> Iterator[Request]:
        parts = [self._apart(number, source) for number, source in enumerate(self.sources)]
        return heapq.merge(*parts, key=attrgetter("arrival_s"))

    def _apart(self, number: int, source: Source) -> Iterator[Request]:
        """The requests of a source under names and ids that no other source has."""
        count = len(self.sources)
        loops: dict[ClosedLoop, ClosedLoop] = {}
        for request in source:
            changed: dict[str, Any] = {}
            if request.session:
                changed["session"] = f"{number}/{request.session}"
            if request.prefix:
                changed["prefix"] = tuple(prefix_id * count + number for prefix_id in request.prefix)
            if request.hints.session is not None:
                changed["hints"] = replace(request.hints, session=f"{number}.{request.hints.session}")
            if request.loop is not None:
                named = replace(request.loop, name=f"{number}/{request.loop.name}")
                changed["loop"] = loops.setdefault(request.loop, named)
            yield replace(request, **changed) if changed else request
