"""One workload cut into successive parts, each a run of its own: repeats of a trace that was recorded only once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvpolicy.errors import InputError
from kvpolicy.workload import Request, Source


@dataclass(frozen=True, slots=True)
class Part:
    """Implements :class:`~kvpolicy.workload.Source`: part ``index`` of ``count`` with nearly equal numbers of requests.

    Times begin anew with the part. Sessions stay whole, in the order of their first requests; so do the users of a
    closed loop, whose first requests all come at once: a part then has its share of them. The source is read twice;
    raises ValueError where it holds fewer sessions, or requests without one, than there are parts.
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
        homes = self._homes()
        units: dict[str, int] = {}
        began = 0
        began_s: float | None = None
        for request in self.whole:
            unit = units.get(request.session, began) if request.session else began
            if unit == began:
                began += 1
                if request.session:
                    units[request.session] = unit
            if homes[unit] != self.index:
                continue
            began_s = request.arrival_s if began_s is None else began_s
            yield replace(request, arrival_s=request.arrival_s - began_s)

    def _homes(self) -> list[int]:
        """Part of every unit, a session or a request without one, in the order in which they begin."""
        sizes: list[int] = []
        units: dict[str, int] = {}
        for request in self.whole:
            unit = units.setdefault(request.session, len(sizes)) if request.session else len(sizes)
            if unit == len(sizes):
                sizes.append(0)
            sizes[unit] += 1
        if len(sizes) < self.count:
            what = "sessions, which stay whole," if units else "requests"
            raise InputError(
                f"workload {self.whole.name}: {len(sizes)} {what} cannot be cut into {self.count} parts: "
                f"part {len(sizes) + 1} would be empty"
            )
        return dealt(sizes, self.count)


def dealt(sizes: Sequence[int], parts: int) -> list[int]:
    """Part of each unit of that size, in order, parts being as equal in size as units allow and none of them empty.

    A unit goes where its middle lies, unless a part would be left without any.
    """
    total, before, part = sum(sizes), 0, 0
    homes = []
    for number, size in enumerate(sizes):
        beyond = (2 * before + size) * parts > 2 * total * (part + 1)
        needed = len(sizes) - number < parts - part
        if number and part < parts - 1 and (beyond or needed):
            part += 1
        homes.append(part)
        before += size
    return homes
