"""Description of an engine as far as costs depend on it. Cost models are made for one and checked against one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine. Bytes and geometry are those of one rank; None or empty means unknown."""

    block_size: int = DEFAULT_BLOCK_SIZE
    """Tokens per KV block."""
    token_budget: int | None = None
    """Maximum tokens of a step (``max_num_batched_tokens``, or ``max_num_scheduled_tokens`` where that is less)."""
    ranks: int = 1
    """Number of tensor-parallel ranks."""
    pinned: bool | None = True
    """Whether the host pool is page-locked. Not compared where the model computes on the host (``device`` cpu)."""
    block_bytes: int | None = None
    """Bytes of one KV block over all layers."""
    geometry: Mapping[str, Any] = field(default_factory=dict)
    """Fields of :class:`kvpolicy.hardware.Geometry`."""
    hardware: Mapping[str, Any] = field(default_factory=dict)
    """See :func:`kvpolicy.hardware.describe`; holds at least ``device``."""
    link: Mapping[str, Any] = field(default_factory=dict)
    """See :func:`kvpolicy.hardware.link.header_link`."""
