"""Copies where the device's memory is the host's."""

from __future__ import annotations

import torch

from kvpolicy_vllm.plugin.copiers.base import Copier
from kvpolicy_vllm.plugin.messages import Job


class IndexingCopier(Copier):
    """Plain torch indexing, at once: for devices whose memory is the host's."""

    def copy_out(self, job: Job) -> None:
        blocks, slots = torch.tensor(job.block_ids), torch.tensor(job.slots)
        for device, host in zip(self.device_segments, self.host_segments, strict=True):
            host[slots] = device[blocks]

    def copy_in(self, job: Job) -> None:
        blocks, slots = torch.tensor(job.block_ids), torch.tensor(job.slots)
        for device, host in zip(self.device_segments, self.host_segments, strict=True):
            device[blocks] = host[slots]
