"""A workload cut into successive parts, each run separately: repeats of a trace that was recorded once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvpolicy.errors import InputError
from kvpolicy.workload import Request, Source


@dataclass(frozen=True, slots=True)
class Part:
    """Implements :class:`~kvpolicy.workload.Source`: part ``index`` of ``count`` with nearly equal numbers of requests.

    Times count from the part's first request. Sessions stay whole, in the order of their first requests. In a closed
    loop, where all users begin at once, each part has a share of the users. The source is read twice. Raises
    InputError where it holds fewer sessions, or requests without one, than there are parts.
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
        part_of_unit = self._part_of_unit()
        units: dict[str, int] = {}
        units_seen = 0
        began_s: float | None = None
        for request in self.whole:
            unit = units.get(request.session, units_seen) if request.session else units_seen
            if unit == units_seen:
                units_seen += 1
                if request.session:
                    units[request.session] = unit
            if part_of_unit[unit] != self.index:
                continue
            began_s = request.arrival_s if began_s is None else began_s
            yield replace(request, arrival_s=request.arrival_s - began_s)

    def _part_of_unit(self) -> list[int]:
        """Part index of every unit (a session, or a request without one), in the order in which units begin."""
        sizes: list[int] = []
        units: dict[str, int] = {}
        for request in self.whole:
            unit = units.setdefault(request.session, len(sizes)) if request.session else len(sizes)
            if unit == len(sizes):
                sizes.append(0)
            sizes[unit] += 1
        if len(sizes) < self.count:
            noun = "sessions, which stay whole," if units else "requests"
            raise InputError(
                f"workload {self.whole.name}: {len(sizes)} {noun} cannot be cut into {self.count} parts: "
                f"part {len(sizes) + 1} would be empty"
            )
        return parts_of_units(sizes, self.count)


def parts_of_units(sizes: Sequence[int], parts: int) -> list[int]:
    """Part index of each unit, in order. ``sizes``: requests of each unit. Parts are as equal in size as units allow,
    and none is empty: a unit goes to the part that its middle lies in, unless a part would be left without units.
    """
    total, requests_before, part = sum(sizes), 0, 0
    part_of_unit = []
    for number, size in enumerate(sizes):
        past_end = (2 * requests_before + size) * parts > 2 * total * (part + 1)
        needs_new_part = len(sizes) - number < parts - part
        if number and part < parts - 1 and (past_end or needs_new_part):
            part += 1
        part_of_unit.append(part)
        requests_before += size
    return part_of_unit
