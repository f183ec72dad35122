"""The copier for devices that use the host's memory."""

from __future__ import annotations

import torch

from kvpolicy_vllm.plugin.copiers.base import Copier
from kvpolicy_vllm.plugin.messages import Job


class IndexingCopier(Copier):
    """Copies synchronously by torch indexing, for devices that use the host's memory."""

    def copy_out(self, job: Job, urgent: int) -> None:
        blocks, slots = torch.tensor(job.block_ids), torch.tensor(job.slots)
        for device, host in zip(self.device_segments, self.host_segments, strict=True):
            host[slots] = device[blocks]

    def copy_in(self, job: Job) -> None:
        blocks, slots = torch.tensor(job.block_ids), torch.tensor(job.slots)
        for device, host in zip(self.device_segments, self.host_segments, strict=True):
            device[blocks] = host[slots]
