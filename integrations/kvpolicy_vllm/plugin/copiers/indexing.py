"""The copier for devices that use the host's memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvpolicy_vllm.plugin.copiers.base import Copier
from kvpolicy_vllm.plugin.copiers.staging import runs_of
from kvpolicy_vllm.plugin.messages import Job


class IndexingCopier(Copier):
    """Copies synchronously, for devices that use the host's memory. Every byte is read and written once."""

    def copy_out(self, job: Job, urgent: int) -> None:
        gather(self.device_segments, job.block_ids, self.host_segments, job.slots)

    def copy_in(self, job: Job) -> None:
        gather(self.host_segments, job.slots, self.device_segments, job.block_ids)


def gather(
    sources: Sequence[torch.Tensor], source_rows: Sequence[int], targets: Sequence[torch.Tensor], rows: Sequence[int]
) -> None:
    """Copy rows of every source to rows of its target, in one call for each run of consecutive target rows.

    An assignment by index would gather into a temporary tensor first, and then copy that.
    """
    pairs = sorted(zip(rows, source_rows, strict=True))
    ids = torch.tensor([source for _, source in pairs])
    runs = [(first, count, ids[at : at + count]) for at, first, count in runs_of([row for row, _ in pairs])]
    for source, target in zip(sources, targets, strict=True):
        for first, count, chosen in runs:
            torch.index_select(source, 0, chosen, out=target.narrow(0, first, count))
