"""The link between device and host as given by ``--link``, for the plugin's copies and for simulated ones."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kvpolicy.fields import AMOUNT, POSITIVE, WrongValue, option, validate

NATIVE = "native"
"""Name of the machine's own link."""
FORM = "BYTES_PER_S[,LATENCY_S], as 25e9 or 25e9,0.00005"


@dataclass(frozen=True, slots=True)
class SimulatedLink:
    """A simulated link: each direction takes ``latency_s + bytes / bytes_per_s``, one transfer at a time."""

    bytes_per_s: float = option("Bytes per second in each direction.", rule=POSITIVE)
    latency_s: float = option("Seconds that every transfer takes besides.", 0.0, AMOUNT)

    def __post_init__(self) -> None:
        validate(self)

    @classmethod
    def parse(cls, text: str) -> SimulatedLink:
        """``BYTES_PER_S[,LATENCY_S]``. Raises WrongValue for anything else."""
        try:
            rate, *latency = map(float, text.split(","))
            if len(latency) < 2:
                return cls(rate, *latency)
        except ValueError:
            pass
        raise WrongValue("link", f"{text!r}: should be {FORM}")

    @property
    def text(self) -> str:
        """The shortest text that :meth:`parse` accepts for this link."""
        numbers = (self.bytes_per_s, self.latency_s) if self.latency_s else (self.bytes_per_s,)
        texts = (f"{number:g}" if float(f"{number:g}") == number else repr(number) for number in numbers)
        return ",".join(re.sub(r"e\+?(-?)0*", r"e\1", text) for text in texts)

    def seconds(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bytes_per_s

    def to_dict(self) -> dict[str, Any]:
        """The link as in a trace's header."""
        return {"kind": "simulated", "bytes_per_s": self.bytes_per_s, "latency_s": self.latency_s}


def header_link(link: SimulatedLink | None) -> dict[str, Any]:
    """The link as in a trace's header; None stands for the machine's own link."""
    return {"kind": NATIVE} if link is None else link.to_dict()
