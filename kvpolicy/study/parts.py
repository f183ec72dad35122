"""One workload cut into successive parts, each a run of its own: repeats of a trace that was recorded only once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvpolicy.workload import Request, Source


@dataclass(frozen=True, slots=True)
class Part:
    """Implements :class:`~kvpolicy.workload.Source`: part ``index`` of ``count`` with equal numbers of requests.

    Times begin anew with the part. A session goes where its first request is, whole. The source is read twice; raises
    ValueError where it holds fewer requests than there are parts.
    """

    whole: Source
    index: int
    count: int

    @property
    def name(self) -> str:
        return f"{self.whole.name} part {self.index + 1}/{self.count}"

    @property
    def source(self) -> str:
        return self.whole.source

    @property
    def seed(self) -> int:
        return self.whole.seed

    def __iter__(self) -> Iterator[Request]:
        requests = sum(1 for _ in self.whole)
        if requests < self.count:
            raise ValueError(f"workload {self.whole.name}: {requests} requests cannot be cut into {self.count} parts")
        homes: dict[str, int] = {}
        began_s: float | None = None
        for number, request in enumerate(self.whole):
            home = number * self.count // requests
            if request.session:
                home = homes.setdefault(request.session, home)
            if home != self.index:
                continue
            began_s = request.arrival_s if began_s is None else began_s
            yield replace(request, arrival_s=request.arrival_s - began_s)
