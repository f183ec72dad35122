"""Cells: everything that one simulation depends on, and the digest by which its result is cached."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy.fields import WrongValue
from kvpolicy.latency import Slo
from kvpolicy.policy import Policy
from kvpolicy.study.config import Serving
from kvpolicy.study.inputs import HardwareObject
from kvpolicy.workload import Workload

OBJECT_FIELDS = (
    "module",
    "policy_digest",
    "workload_digest",
    "hardware_digest",
    "policy_object",
    "workload_object",
    "hardware_object",
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation. It is sent to other processes and, except for objects, written as JSON."""

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
    """Number of parts that the workload is cut into; the cell runs number ``part``."""
    module: str = ""
    """The policy's module path, where it is named by one."""
    policy_digest: str = ""
    """Digest of a policy that is an object."""
    policy_object: Policy | None = field(default=None, compare=False, repr=False)
    """The policy, where it is an object; cells are compared by its digest."""
    workload_digest: str = ""
    """Digest of a workload that is an object."""
    workload_object: Workload | None = field(default=None, compare=False, repr=False)
    """The workload, where it is an object."""
    hardware_digest: str = ""
    """Digest of hardware that is an object."""
    hardware_object: HardwareObject | None = field(default=None, compare=False, repr=False)
    """The hardware, where it is an object."""
    slo: Slo | None = None
    """Deadlines by which requests that bring none are judged."""

    def __post_init__(self) -> None:
        if self.kv_blocks < 1:
            raise WrongValue("kv_blocks", f"is {self.kv_blocks}, should be 1 or more")
        if not 0 <= self.part < self.parts:
            raise InputError(f"part {self.part} of {self.parts}: should be from 0 to {self.parts - 1}")

    def inputs(self) -> dict[str, Any]:
        """The cell as plain values, with digests for objects; fields about objects, ``slo`` and the server's
        ``classes``, cache and ``max_model_len`` only where they are set."""
        serving = replace(self.serving, order="fcfs")  # without the object that an order may be
        by_name = asdict(replace(self, serving=serving, policy_object=None, workload_object=None, hardware_object=None))
        del by_name["serving"]["order_object"]
        by_name["serving"]["order"] = self.serving.order
        if self.serving.order_object is not None:
            by_name["serving"]["order_digest"] = self.serving.order_object.digest
        for name in ("classes", "host_cache", "file_gib", "file_link"):
            del by_name["serving"][name]
        by_name["serving"] |= self.serving.cache_inputs()
        if self.serving.max_model_len is None:
            del by_name["serving"]["max_model_len"]
        if self.serving.classes is not None:
            by_name["serving"]["classes"] = self.serving.classes.text
        return {name: value for name, value in by_name.items() if value or name not in (*OBJECT_FIELDS, "slo")}

    def words(self) -> str:
        """The cell in words, for messages; of its server the order of service alone: a grid may have several."""
        left_out = ("serving", "part", "parts", "slo", *OBJECT_FIELDS)
        shown = {"workload": self.workload, "policy": self.policy, "order": self.serving.order}
        shown |= {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        if self.slo is not None:
            shown["slo"] = self.slo.text
        if self.parts > 1:
            shown["part"] = f"{self.part + 1}/{self.parts}"
        return ", ".join(f"{name} {value}" for name, value in shown.items())

    def digest(self, contents: Mapping[str, str]) -> str:
        """SHA-256 of the inputs and their contents. ``contents``: digests of files, models and program."""
        text = json.dumps({"inputs": self.inputs(), "contents": dict(contents)}, sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()
