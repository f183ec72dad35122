"""Which copier a worker uses, by the device its KV cache is on. A setting may name another factory."""

from __future__ import annotations

import torch

from kvpolicy.hardware.link import GivenLink
from kvpolicy_vllm.plugin.copier import Copier, IndexingCopier
from kvpolicy_vllm.plugin.cuda_copier import CudaCopier, StagedCudaCopier


def copier_for(device_segments: list[torch.Tensor], slots: int, pin_memory: bool, link: GivenLink | None) -> Copier:
    """The copier for the device the KV cache is on."""
    if device_segments[0].device.type == "cuda":
        return (CudaCopier if pin_memory else StagedCudaCopier)(device_segments, slots, pin_memory, link)
    return IndexingCopier(device_segments, slots, pin_memory, link)
