"""A cell: everything that one simulation depends on, in words; and its digest, by which its result is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from kvpolicy.fields import WrongValue
from kvpolicy.study.config import Serving


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation. Plain values only: it travels to other processes and into JSON."""

    workload: str
    policy: str
    kv_blocks: int
    link: str
    """``native`` or ``BYTES_PER_S[,LATENCY_S]``."""
    seed: int
    hardware: str
    engine: str = "builtin"
    serving: Serving = field(default_factory=Serving)
    part: int = 0
    parts: int = 1
    """The workload is cut into that many parts, of which this is number ``part``."""

    def __post_init__(self) -> None:
        if self.kv_blocks < 1:
            raise WrongValue("kv_blocks", f"is {self.kv_blocks}, should be 1 or more")
        if not 0 <= self.part < self.parts:
            raise ValueError(f"part {self.part} of {self.parts}: should be from 0 to {self.parts - 1}")

    def inputs(self) -> dict[str, Any]:
        return asdict(self)

    def words(self) -> str:
        """For a person: what tells it from its neighbours."""
        seen = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("serving", "part", "parts")}
        if self.parts > 1:
            seen["part"] = f"{self.part + 1}/{self.parts}"
        return ", ".join(f"{name} {value}" for name, value in seen.items())

    def digest(self, contents: Mapping[str, str]) -> str:
        """SHA-256 of the inputs and of what they name. ``contents``: digests of files, models and program."""
        told = json.dumps({"inputs": self.inputs(), "contents": dict(contents)}, sort_keys=True, allow_nan=False)
        return hashlib.sha256(told.encode()).hexdigest()
