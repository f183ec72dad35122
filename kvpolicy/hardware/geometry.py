"""The machine and the model's shape: what a measured cost belongs to."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
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
            raise InputError(f"model geometry: field {missing[0]} is missing")
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


def available_memory_bytes() -> int:
    """Memory that could be taken without swapping out anything else, within this container's limit where it has one.

    Linux; raises OSError elsewhere.
    """
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    available = _system_available_bytes()
    return available if limit is None or used is None else min(available, max(0, limit - used))


def _cgroup_bytes(name: str) -> int | None:
    """A value of the control group this process is in; None where it has none or sets no limit."""
    try:
        text = (Path("/sys/fs/cgroup") / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _system_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
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
