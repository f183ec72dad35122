"""Chooses a worker's copier by the device of its KV cache. A setting may name another factory."""

from __future__ import annotations

from typing import Any

import torch

from kvpolicy.hardware.link import SimulatedLink
from kvpolicy_vllm.plugin.copiers.base import Copier
from kvpolicy_vllm.plugin.copiers.cuda import CudaCopier, StagedCudaCopier
from kvpolicy_vllm.plugin.copiers.indexing import IndexingCopier
from kvpolicy_vllm.plugin.copiers.pool_of_ranks import SharedPool


def copier_for(
    device_segments: list[torch.Tensor],
    slots: int,
    pin_memory: bool,
    link: SimulatedLink | None,
    shared: SharedPool | None = None,
) -> Copier:
    """The copier for the device of the KV cache. ``shared``: the host pool, where all ranks share one."""
    more: dict[str, Any] = {} if shared is None else {"shared": shared}
    if device_segments[0].device.type == "cuda":
        return (CudaCopier if pin_memory else StagedCudaCopier)(device_segments, slots, pin_memory, link, **more)
    return IndexingCopier(device_segments, slots, pin_memory, link, **more)
