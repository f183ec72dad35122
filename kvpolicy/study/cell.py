"""A cell: everything that one simulation depends on, in words; and its digest, by which its result is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy.fields import WrongValue
from kvpolicy.policy import Policy
from kvpolicy.study.config import Serving
from kvpolicy.study.inputs import HardwareObject
from kvpolicy.workload import Workload

OF_OBJECTS = ("module", "policy_digest", "workload_digest", "hardware_digest", "given", "requests", "hardware_object")


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation. It travels to other processes and, but for objects, into JSON."""

    workload: str
    policy: str
    """Its label, see :class:`kvpolicy.study.contender.Contender`."""
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
    module: str = ""
    """What the policy is loaded by, where it is a module path."""
    policy_digest: str = ""
    """Of a policy that is an object."""
    given: Policy | None = field(default=None, compare=False, repr=False)
    """The object: its digest stands for it."""
    workload_digest: str = ""
    """Of a workload that is an object."""
    requests: Workload | None = field(default=None, compare=False, repr=False)
    """That object."""
    hardware_digest: str = ""
    """Of hardware that is an object."""
    hardware_object: HardwareObject | None = field(default=None, compare=False, repr=False)
    """That object."""

    def __post_init__(self) -> None:
        if self.kv_blocks < 1:
            raise WrongValue("kv_blocks", f"is {self.kv_blocks}, should be 1 or more")
        if not 0 <= self.part < self.parts:
            raise InputError(f"part {self.part} of {self.parts}: should be from 0 to {self.parts - 1}")

    def inputs(self) -> dict[str, Any]:
        """Plain values; of objects their digests, and how a policy is come by, where there is something to say."""
        told = asdict(replace(self, given=None, requests=None, hardware_object=None))
        return {name: value for name, value in told.items() if name not in OF_OBJECTS or value}

    def words(self) -> str:
        """For a person: what tells it from its neighbours."""
        left_out = ("serving", "part", "parts", *OF_OBJECTS)
        seen = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        if self.parts > 1:
            seen["part"] = f"{self.part + 1}/{self.parts}"
        return ", ".join(f"{name} {value}" for name, value in seen.items())

    def digest(self, contents: Mapping[str, str]) -> str:
        """SHA-256 of the inputs and of what they name. ``contents``: digests of files, models and program."""
        told = json.dumps({"inputs": self.inputs(), "contents": dict(contents)}, sort_keys=True, allow_nan=False)
        return hashlib.sha256(told.encode()).hexdigest()
