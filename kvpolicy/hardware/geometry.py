"""The machine and the model's shape: what a measured cost belongs to."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvpolicy.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of a decoder-only model as far as its costs depend on it, on one rank."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    weight_bytes: int
    """Bytes per weight."""
    kv_bytes: int
    """Bytes per KV element."""
    dtype: str

    @classmethod
    def from_config(cls, config: Mapping[str, Any], kv_cache_dtype: str = "auto") -> Geometry:
        """From a Hugging Face config.json; see :meth:`of_shape`. Raises ConfigError naming a field that is missing."""
        return cls.of_shape(ModelShape.from_config(config, kv_cache_dtype))

    @classmethod
    def of_shape(cls, shape: ModelShape, ranks: int = 1) -> Geometry:
        """The nearest there is to ``shape`` with all layers alike. KV bytes per token are the same.

        Latent attention (MLA) appears as one KV head half as wide as what it stores, a mixture's MLP as wide as what
        one token goes through; linear FLOPs are the same but for latent attention, whose projections have no place
        here. Bytes of weights and KV values are whole numbers of their types, quantised or not. ``ranks``, tensor
        parallel, part heads and MLP; KV heads are doubled where there are fewer of them.
        """
        first = shape.kinds[0].attention
        latent = first.kv_heads == 0
        active = sum(kind.layers * kind.mlp.active for kind in shape.kinds) / shape.layers
        return cls(
            layers=shape.layers,
            hidden=shape.hidden,
            heads=first.heads // ranks,
            kv_heads=max(1, first.kv_heads // ranks),
            head_dim=first.kv_values // 2 if latent else first.kv_values // (2 * first.kv_heads),
            intermediate=round(active / (3 * shape.hidden)) // ranks,
            vocab=shape.vocab,
            weight_bytes=int(shape.precision.other // 8),
            kv_bytes=int(shape.precision.kv // 8),
            dtype=shape.precision.dtype,
        )

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes

    @property
    def linear_flops_per_token(self) -> float:
        """Multiply-adds of the projections and the MLP for one token, times two."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = 3 * self.hidden * self.intermediate
        return 2.0 * self.layers * (attention + mlp)

    @property
    def attention_flops_per_pair(self) -> float:
        """Multiply-adds times two for one (query token, context token) pair: scores and weighted values."""
        return 4.0 * self.layers * self.heads * self.head_dim

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Geometry:
        """Raises ValueError naming the first field that is missing."""
        missing = [f.name for f in fields(cls) if f.name not in values]
        if missing:
            raise ValueError(f"model geometry: field {missing[0]} is missing")
        return cls(**{f.name: values[f.name] for f in fields(cls)})


def describe(device: str = "cpu") -> dict[str, Any]:
    """What this machine is, as far as costs depend on it. ``device`` is the accelerator's name, or ``cpu``."""
    return {
        "device": device,
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
    }


def available_memory_bytes(proc: Path = Path("/proc")) -> int:
    """Memory that could be taken without swapping out anything else, within the limits of all control groups that this
    process is in: its own, a container's, a pod's.

    Linux; raises OSError elsewhere. ``proc``: where its process information is mounted.
    """
    left = [_left_in_group_bytes(folder) for folder in _memory_groups(proc)]
    return min([_system_available_bytes(proc), *(found for found in left if found is not None)])


UNIFIED_LIMITS = ("memory.max", "memory.high")
"""The second one kills nobody, but beyond it every allocation waits."""


def _left_in_group_bytes(group: Path) -> int | None:
    """What a control group, of either version, lets its members still take; None where it sets no limit."""
    limits = [_group_bytes(group / name) for name in UNIFIED_LIMITS]
    used = _group_bytes(group / "memory.current")
    if used is None:
        limits = [_group_bytes(group / "memory.limit_in_bytes")]
        used = _group_bytes(group / "memory.usage_in_bytes")
    limit = min((found for found in limits if found is not None), default=None)
    return None if limit is None or used is None else max(0, limit - used + _reclaimable_bytes(group))


def _reclaimable_bytes(group: Path) -> int:
    """What the group uses, but the kernel would give up for the asking: clean pages of files, as of weights that were
    read, and freeable kernel objects. Pages of a tmpfs are not among its pages of files."""
    try:
        rows = [line.split() for line in (group / "memory.stat").read_text().splitlines()]
    except OSError:
        return 0
    stat = {row[0]: int(row[1]) for row in rows if len(row) == 2}
    # Version 1 tells of the group without those below it first, and of all of them under other names.
    prefix, dirty, writeback = "", "file_dirty", "file_writeback"
    if "total_inactive_file" in stat:
        prefix, dirty, writeback = "total_", "total_dirty", "total_writeback"
    files = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
    unwritten = stat.get(dirty, 0) + stat.get(writeback, 0)
    return max(0, files - unwritten) + stat.get("slab_reclaimable", 0)


def _group_bytes(file: Path) -> int | None:
    """A value of a control group; None where there is none, or where it says ``max``."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _memory_groups(proc: Path) -> list[Path]:
    """Folders of the control groups that this process's memory may be counted in, from its own outwards."""
    paths = _group_paths(proc)
    found = []
    for version, root, point in _group_mounts(proc):
        own = point / _below(root, paths.get(version, "/"))
        found += [own, *(parent for parent in own.parents if parent.is_relative_to(point))]
    return found


def _group_paths(proc: Path) -> dict[int, str]:
    """By the version of control groups: the group of this process, as ``/proc/self/cgroup`` names it."""
    found: dict[int, str] = {}
    for line in _lines(proc / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            found[1] = path
        elif number == "0" and not controllers:
            found[2] = path
    return found


def _group_mounts(proc: Path) -> list[tuple[int, str, Path]]:
    """Version of control groups, the group that is mounted, and where, for all mounts that may count memory."""
    found = []
    for line in _lines(proc / "self" / "mountinfo"):
        mount, _, system = line.partition(" - ")
        root, point = mount.split()[3:5]
        kind, *_, options = system.split()
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            # Spaces are told as octal numbers.
            point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), point)
            found.append((2 if kind == "cgroup2" else 1, root, Path(point)))
    return found


def _below(root: str, path: str) -> str:
    """``path`` as seen from the mounted group ``root``: a container without a namespace of its own is told the host's
    path. Where it lies elsewhere, the mounted group is the nearest that is known."""
    outer = root.rstrip("/")
    return "" if ".." in path or not f"{path}/".startswith(f"{outer}/") else path[len(outer) :].strip("/")


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _system_available_bytes(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("MemAvailable is missing from the system's memory information")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def same_machine(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two hardware descriptions name the same kind of device and processor."""
    return all(one.get(key) == other.get(key) for key in ("device", "processor", "cores"))


def fingerprint(hardware: Mapping[str, Any]) -> str:
    """One line for a person."""
    return json.dumps({key: hardware.get(key) for key in ("device", "processor", "cores")}, sort_keys=True)
