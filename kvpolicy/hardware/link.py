"""A link between device and host that is given by its numbers, wherever one can be: profiling, serving, simulating."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any

NATIVE = "native"
"""The machine's own link, where one is named."""


@dataclass(frozen=True, slots=True)
class GivenLink:
    """Each direction takes ``latency_s + bytes / bytes_per_s``, one transfer at a time."""

    bytes_per_s: float
    latency_s: float = 0.0

    @classmethod
    def parse(cls, text: str, besides: str = "") -> GivenLink:
        """``BYTES_PER_S[,LATENCY_S]``. Raises ValueError saying what would be right; ``besides``: what else would."""
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) not in (1, 2) or not all(map(isfinite, numbers)) or numbers[0] <= 0 or min(numbers) < 0:
            raise ValueError(
                f"link {text!r}: should be {besides}BYTES_PER_S[,LATENCY_S], as 2e9 or 2e9,0.001; more than 0 bytes/s, "
                "0 s or more"
            )
        return cls(*numbers)

    def seconds(self, size_bytes: int) -> float:
        """Of one transfer."""
        return self.latency_s + size_bytes / self.bytes_per_s


def link_of(text: str) -> GivenLink | None:
    """``native``, which gives None, or ``BYTES_PER_S[,LATENCY_S]``. Raises ValueError for anything else."""
    return None if text == NATIVE else GivenLink.parse(text, f"{NATIVE} or ")


def header_link(link: GivenLink | None) -> dict[str, Any]:
    """As a trace's header has it; None: the machine's own."""
    if link is None:
        return {"kind": NATIVE}
    return {"kind": "simulated", "bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s}
