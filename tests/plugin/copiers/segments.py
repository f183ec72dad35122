"""Blocks of KV caches in host memory, in the place of a device's."""

from __future__ import annotations

import torch

from kvpolicy_vllm.plugin.copiers.base import unique_segments


def made_segments(dtypes: tuple[torch.dtype, ...], blocks: int = 24) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    caches = {
        f"layer.{i}": torch.randn((blocks, 2, 4, 2, 8), generator=generator).to(dtype) for i, dtype in enumerate(dtypes)
    }
    return unique_segments(caches, blocks)
