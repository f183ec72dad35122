"""A cell: everything that one simulation depends on, in words; and its digest, by which its result is kept.

Where a server's flags say nothing, what vLLM 0.32 takes by device: ``EngineArgs.get_batch_defaults``, API server.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy.hardware.sheets import known_sheet

GIB = 2**30
DEFAULT_HOST_GIB = 4.0
MAX_HOST = 2**53
"""GiB, or blocks: more would not be exact as a float."""
"""The plugin's own."""


@dataclass(frozen=True, slots=True)
class Serving:
    """The server around a grid's cells: the same for all of them. vLLM's own defaults go by the device, see
    :mod:`kvpolicy.study.cell`; those here are of a large GPU that schedules step by step."""

    block_size: int = 16
    host_gib: float | None = DEFAULT_HOST_GIB
    """Host memory for evicted KV, of one rank; None where ``host_blocks`` says it."""
    host_blocks: int | None = None
    token_budget: int = 8192
    max_num_seqs: int = 256
    prefix_caching: bool = True
    scheduling: str = "fcfs"
    asynchronous: bool = False
    watermark: float = 0.0
    """Share of the device's blocks that stays free when a request is admitted beside running ones."""

    def __post_init__(self) -> None:
        for name in ("block_size", "token_budget", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}: should be 1 or more")
        if (self.host_gib is None) == (self.host_blocks is None):
            raise InputError("host_gib and host_blocks: one of the two says how much host memory there is")
        host = self.host_gib if self.host_blocks is None else self.host_blocks
        if host is None or not 0 <= host <= MAX_HOST:
            raise InputError(f"host memory is {host}: should be a number from 0 to {MAX_HOST}")
        if self.scheduling not in ("fcfs", "priority"):
            raise InputError(f"scheduling {self.scheduling!r}: should be fcfs or priority")
        if not 0 <= self.watermark < 1:
            raise InputError(f"watermark is {self.watermark}: should be a share of the blocks, from 0, below 1")

    def host_blocks_of(self, block_bytes: int) -> int:
        """How many blocks of that size the host memory holds."""
        if self.host_blocks is not None:
            return self.host_blocks
        assert self.host_gib is not None
        return int(self.host_gib * GIB // block_bytes)


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
            raise InputError(f"kv_blocks is {self.kv_blocks}: should be 1 or more")
        if not 0 <= self.part < self.parts:
            raise InputError(f"part {self.part} of {self.parts}: should be from 0 to {self.parts - 1}")

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


@dataclass(frozen=True, slots=True)
class ServerDefaults:
    """Flags of one server."""

    token_budget: int
    max_num_seqs: int
    asynchronous: bool
    """Whether it schedules one step ahead."""


CPU = ServerDefaults(2048, 128, False)
LARGEST = ServerDefaults(16384, 1024, True)
LARGE = ServerDefaults(8192, 1024, True)
OTHER = ServerDefaults(2048, 256, True)
"""Also of an A100 of whatever size, and of a device whose memory nobody knows."""


def server_defaults(device: str) -> ServerDefaults:
    """By the name that a trace's header or a data sheet has for it; memory as its data sheet says."""
    if device == "cpu":
        return CPU
    sheet = known_sheet(device)
    if sheet is None:
        return OTHER
    if sheet.memory_bytes >= 160 * GIB:
        return LARGEST
    names = " ".join((sheet.name, *sheet.device_names)).casefold()
    return LARGE if sheet.memory_bytes >= 70 * GIB and "a100" not in names else OTHER
