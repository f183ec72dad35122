"""What an engine is, as far as costs depend on it: what a cost model is made for, and checked against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Bytes and geometry are those of one rank. What is None or empty was not said."""

    block_size: int = DEFAULT_BLOCK_SIZE
    """Tokens per KV block."""
    token_budget: int | None = None
    """Most tokens of a step (``max_num_batched_tokens``)."""
    ranks: int = 1
    """Tensor parallel."""
    pinned: bool = True
    """Whether the host pool is page-locked."""
    block_bytes: int | None = None
    """One KV block over all layers."""
    geometry: Mapping[str, Any] = field(default_factory=dict)
    """Fields of :class:`kvpolicy.hardware.Geometry`."""
    hardware: Mapping[str, Any] = field(default_factory=dict)
    """See :func:`kvpolicy.hardware.describe`; ``device`` at least."""
    link: Mapping[str, Any] = field(default_factory=dict)
    """See :func:`kvpolicy.hardware.link.header_link`."""
