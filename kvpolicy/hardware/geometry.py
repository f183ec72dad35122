"""The machine and the model's shape that measured costs belong to."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from kvpolicy.errors import InputError
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
    window_layers: int = 0
    """Layers that attend to a window. All that is not said of layers here holds for full attention in every one."""
    window_tokens: int = 0
    """Its width; 0 without."""
    state_layers: int = 0
    """Layers that keep a state in place of keys and values."""
    mlp_layers: int = 0
    """Layers that neither attend nor keep a state."""
    linear_flops: int = 0
    """FLOPs per token over all layers, where heads and MLP do not say them (states, latent or gated attention)."""
    pair_flops: int = 0
    """FLOPs per pair in one layer that attends, where heads do not say them (latent attention)."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], kv_cache_dtype: str = "auto") -> Geometry:
        """From a Hugging Face config.json; see :meth:`of_shape`. Raises ConfigError naming a field that is missing."""
        return cls.of_shape(ModelShape.from_config(config, kv_cache_dtype))

    @classmethod
    def of_shape(cls, shape: ModelShape, ranks: int = 1) -> Geometry:
        """The closest geometry to ``shape``. KV bytes per token, and FLOPs per token and pair, are the same.

        Latent attention (MLA) is represented as one KV head half as wide as its stored values, and a mixture's MLP is
        as wide as the part that one token uses, as a mean over all layers. Bytes of weights and KV values are rounded
        down to integers. Raises ConfigError for windows of several sizes and for a model without attention.

        ``ranks``: tensor-parallel ranks, which split heads and MLP. KV heads are replicated if there are fewer.
        """
        attention = shape.attention
        latent = attention.kv_heads == 0
        active = sum(kind.layers * kind.mlp.active for kind in shape.kinds) / shape.layers
        geometry = cls(
            layers=shape.layers,
            hidden=shape.hidden,
            heads=attention.heads // ranks,
            kv_heads=max(1, attention.kv_heads // ranks),
            head_dim=attention.kv_values // 2 if latent else attention.kv_values // (2 * attention.kv_heads),
            intermediate=round(active / (3 * shape.hidden)) // ranks,
            vocab=shape.vocab,
            weight_bytes=int(shape.precision.other // 8),
            kv_bytes=int(shape.precision.kv // 8),
            dtype=shape.precision.dtype,
            window_layers=shape.layers_with(lambda kept: kept.attends and kept.window is not None),
            window_tokens=shape.window_tokens or 0,
            state_layers=shape.layers_with(lambda kept: kept.state_values > 0),
            mlp_layers=shape.layers_with(lambda kept: not (kept.attends or kept.state_values)),
        )
        if latent or geometry.layers > geometry.attention_layers:
            geometry = replace(geometry, linear_flops=round(shape.linear_flops_per_token / ranks))
        return replace(geometry, pair_flops=attention.pair_flops // ranks) if latent else geometry

    @property
    def attention_layers(self) -> int:
        """Layers that attend to the whole context or to a window."""
        return self.layers - self.state_layers - self.mlp_layers

    @property
    def full_layers(self) -> int:
        """Layers that attend to the whole context."""
        return self.attention_layers - self.window_layers

    @property
    def layer_kv_bytes_per_token(self) -> int:
        """KV bytes of one token in one layer that attends."""
        return 2 * self.kv_heads * self.head_dim * self.kv_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes of one token that is inside the windows of all layers."""
        return self.attention_layers * self.layer_kv_bytes_per_token

    @property
    def linear_flops_per_token(self) -> float:
        """FLOPs of the projections, the MLP and states for one token: two per multiply-add."""
        if self.linear_flops:
            return float(self.linear_flops)
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = 3 * self.hidden * self.intermediate
        return 2.0 * self.layers * (attention + mlp)

    @property
    def layer_flops_per_pair(self) -> float:
        """FLOPs of scores and weighted values for one (query token, context token) pair in one layer that attends."""
        return float(self.pair_flops or 4 * self.heads * self.head_dim)

    @property
    def attention_flops_per_pair(self) -> float:
        """FLOPs per pair in the layers that attend to the whole context: two per multiply-add."""
        return self.full_layers * self.layer_flops_per_pair

    @property
    def window_flops_per_pair(self) -> float:
        """FLOPs per pair in the layers that attend to a window."""
        return self.window_layers * self.layer_flops_per_pair

    @property
    def block_tables(self) -> int:
        """Block tables of a request where windows are not stored whole: vLLM's groups of equally many layers of a kind.

        A group has as many layers as the kind with the fewest, or with the most where that is little more.
        """
        counts = [count for count in (self.full_layers, self.window_layers, self.state_layers) if count]
        size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
        return sum(-(-count // size) for count in counts)

    def one_table(self, block_layers: int) -> bool:
        """Whether a request has one block table with every token's block, in which windows are stored whole.

        ``block_layers``: layers whose pages a block holds.
        """
        return bool(self.full_layers) and not self.state_layers and block_layers >= self.attention_layers

    def held_blocks(self, tokens: int, block_size: int, block_layers: int) -> int:
        """Blocks without which a request cannot go on after ``tokens`` tokens, over all of its block tables.

        ``block_layers``: layers whose pages a block holds. An engine has a block table for each group of as many
        layers. Of a window, what the next token attends to is needed; of a state, one block.
        """
        blocks = -(-tokens // block_size)
        if self.one_table(block_layers):
            return blocks
        windowed = blocks - max(0, tokens - self.window_tokens + 1) // block_size
        held = (self.full_layers, blocks), (self.window_layers, windowed), (self.state_layers, 1)
        return sum(-(-layers // block_layers) * count for layers, count in held)

    @property
    def kinds(self) -> dict[str, int]:
        """The fields that say what the layers are, by name; each is 0 where all are of full attention, and alike."""
        return {name: getattr(self, name) for name in KIND_FIELDS}

    def to_dict(self) -> dict[str, Any]:
        """For JSON. What layers are is left out where all are of full attention: older files say nothing of it."""
        return {name: value for name, value in asdict(self).items() if value or name not in KIND_FIELDS}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Geometry:
        """Raises InputError naming the first field that is missing or invalid."""
        missing = [f.name for f in fields(cls) if f.name not in values and f.name not in KIND_FIELDS]
        if missing:
            raise InputError(f"model geometry: field {missing[0]} is missing")
        geometry = cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})
        for f in fields(cls):
            value = getattr(geometry, f.name)
            if f.type == "str" and not isinstance(value, str):
                raise InputError(f"{f.name} is {value!r}, should be a text")
            if f.type == "int" and (type(value) is not int or value < 0):
                raise InputError(f"{f.name} is {value!r}, should be a whole number, 0 or above")
        return geometry


KIND_FIELDS = ("window_layers", "window_tokens", "state_layers", "mlp_layers", "linear_flops", "pair_flops")
"""Fields that files before them lack, which knew layers of full attention only."""


def describe(device: str = "cpu") -> dict[str, Any]:
    """Describe this machine as far as costs depend on it. ``device``: the accelerator's name, or ``cpu``."""
    return {
        "device": device,
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
    }


def available_memory_bytes(proc: Path = Path("/proc")) -> int:
    """Memory that can be allocated without swapping, within the limits of all control groups of this process.

    These are its own group and those of a container and a pod. Linux only; raises OSError elsewhere. ``proc``: mount
    point of the process information.
    """
    group_left = [_left_in_group_bytes(folder) for folder in _memory_groups(proc)]
    return min([_system_bytes(proc, "MemAvailable"), *(limit for limit in group_left if limit is not None)])


def total_memory_bytes(proc: Path = Path("/proc")) -> int:
    """Memory of the machine, or of a control group of this process that may have less. Else as
    :func:`available_memory_bytes`."""
    names = (*UNIFIED_LIMITS, "memory.limit_in_bytes")
    limits = [_group_bytes(folder / name) for folder in _memory_groups(proc) for name in names]
    return min([_system_bytes(proc, "MemTotal"), *(limit for limit in limits if limit is not None)])


UNIFIED_LIMITS = ("memory.max", "memory.high")
"""Beyond ``memory.high`` no process is killed, but every allocation is throttled."""


def _left_in_group_bytes(group: Path) -> int | None:
    """Bytes that the members of a control group may still allocate; None if it sets no limit. Either version."""
    limits = [_group_bytes(group / name) for name in UNIFIED_LIMITS]
    used = _group_bytes(group / "memory.current")
    if used is None:
        limits = [_group_bytes(group / "memory.limit_in_bytes")]
        used = _group_bytes(group / "memory.usage_in_bytes")
    limit = min((value for value in limits if value is not None), default=None)
    return None if limit is None or used is None else max(0, limit - used + _reclaimable_bytes(group))


def _reclaimable_bytes(group: Path) -> int:
    """Bytes in use that the kernel would free on demand: clean file pages, as of weights, and freeable kernel objects.
    Pages of a tmpfs are not counted as file pages."""
    try:
        rows = [line.split() for line in (group / "memory.stat").read_text().splitlines()]
    except OSError:
        return 0
    stat = {row[0]: int(row[1]) for row in rows if len(row) == 2}
    # Version 1 lists the group without its descendants first, and the totals under other names.
    prefix, dirty, writeback = "", "file_dirty", "file_writeback"
    if "total_inactive_file" in stat:
        prefix, dirty, writeback = "total_", "total_dirty", "total_writeback"
    files = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
    unwritten = stat.get(dirty, 0) + stat.get(writeback, 0)
    return max(0, files - unwritten) + stat.get("slab_reclaimable", 0)


def _group_bytes(file: Path) -> int | None:
    """A value of a control group; None if it is absent or ``max``."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _memory_groups(proc: Path) -> list[Path]:
    """Folders of the control groups that may count this process's memory, from its own group outwards."""
    paths = _group_paths(proc)
    groups = []
    for version, root, mount_point in _group_mounts(proc):
        own_group = mount_point / _relative_to_mount(root, paths.get(version, "/"))
        groups += [own_group, *(parent for parent in own_group.parents if parent.is_relative_to(mount_point))]
    return groups


def _group_paths(proc: Path) -> dict[int, str]:
    """Group of this process by control-group version, as ``/proc/self/cgroup`` names it."""
    paths: dict[int, str] = {}
    for line in _lines(proc / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            paths[1] = path
        elif number == "0" and not controllers:
            paths[2] = path
    return paths


def _group_mounts(proc: Path) -> list[tuple[int, str, Path]]:
    """(control-group version, mounted group, mount point) of all mounts that may count memory."""
    mounts = []
    for line in _lines(proc / "self" / "mountinfo"):
        mount, _, system = line.partition(" - ")
        root, mount_point = mount.split()[3:5]
        kind, *_, options = system.split()
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            # Spaces are escaped as octal numbers.
            mount_point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), mount_point)
            mounts.append((2 if kind == "cgroup2" else 1, root, Path(mount_point)))
    return mounts


def _relative_to_mount(root: str, path: str) -> str:
    """``path`` relative to the mounted group ``root``; empty if it lies elsewhere.

    A container without its own namespace sees the host's path. If that is outside the mounted group, the mounted group
    is the best known one.
    """
    outer = root.rstrip("/")
    return "" if ".." in path or not f"{path}/".startswith(f"{outer}/") else path[len(outer) :].strip("/")


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _system_bytes(proc: Path, field: str) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{field} is missing from the system's memory information")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def same_machine(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two hardware descriptions name the same device, processor and number of cores."""
    return all(first.get(key) == second.get(key) for key in ("device", "processor", "cores"))


def fingerprint(hardware: Mapping[str, Any]) -> str:
    """Device, processor and cores in one line, for messages and comparison."""
    return json.dumps({key: hardware.get(key) for key in ("device", "processor", "cores")}, sort_keys=True)
