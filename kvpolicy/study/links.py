"""A link in place of the hardware's own: what copies take, by its bytes per second and latency."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpolicy.simulator import StepLoad, Times
from kvpolicy.simulator.base import Direction, Floats


@dataclass(frozen=True, slots=True)
class GivenLink:
    """Each direction takes ``latency_s + bytes / bytes_per_s``, one transfer at a time: as the plugin's ``--link``."""

    bytes_per_s: float
    latency_s: float = 0.0

    @classmethod
    def parse(cls, text: str) -> GivenLink:
        """``BYTES_PER_S[,LATENCY_S]``. Raises ValueError naming what is wrong."""
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) not in (1, 2) or not all(map(math.isfinite, numbers)) or numbers[0] <= 0 or min(numbers) < 0:
            raise ValueError(
                f"link {text!r}: should be native or BYTES_PER_S[,LATENCY_S], as 25e9 or 25e9,0.00005, above 0"
            )
        return cls(*numbers)

    def to_dict(self) -> Mapping[str, Any]:
        """As in a trace's header."""
        return {"kind": "simulated", "bytes_per_s": self.bytes_per_s, "latency_s": self.latency_s}


@dataclass(frozen=True, slots=True)
class Behind:
    """Implements :class:`~kvpolicy.simulator.Times`: another one's steps, and copies over a given link."""

    times: Times
    link: GivenLink

    @property
    def steps_of(self) -> Times:
        """Whose steps these are: they may know where they were measured."""
        return self.times

    @property
    def source(self) -> str:
        link = self.link
        told = f"{link.bytes_per_s:g} bytes/s and {link.latency_s:g} s"
        return f"{self.times.source}; copies instead over a given link of {told}"

    def step_s(self, load: StepLoad) -> float:
        return self.times.step_s(load)

    def steps_s(self, loads: Floats) -> Floats:
        return self.times.steps_s(loads)

    def copy_s(self, direction: Direction, copied_bytes: int, segments: int, segment_bytes: int) -> float:
        return self.link.latency_s + copied_bytes / self.link.bytes_per_s
