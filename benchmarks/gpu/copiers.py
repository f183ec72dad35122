"""Copiers that slow themselves down, that keep digests, and that go the staged way. Named by import path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvpolicy_vllm.plugin.copiers.base import Copier
from kvpolicy_vllm.plugin.copiers.indexing import IndexingCopier
from kvpolicy_vllm.plugin.copiers.staging import StagedCopier
from kvpolicy_vllm.plugin.messages import Job

SLEEP_CYCLES = 50_000_000
"""Some 30 ms on the device: many steps of a small model."""
LATE_POLLS = 5
FACTOR = 1_000_003
"""Odd, so that multiplying by its powers loses nothing of a 64-bit value."""


def numbers_on(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Whole numbers on a device without waiting for it. From pageable memory the call would wait for all that the
    stream has still to do, and a copier that forgot to wait for the same would pass."""
    tensor = torch.tensor(numbers, dtype=torch.int64)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def block_digests(segments: list[torch.Tensor], block_ids: tuple[int, ...]) -> torch.Tensor:
    """One 64-bit number per block, computed where the blocks are. Equal bits give equal numbers, wherever they are."""
    ids = numbers_on(block_ids, segments[0].device)
    total = torch.zeros(len(block_ids), dtype=torch.int64, device=segments[0].device)
    for number, segment in enumerate(segments):
        values = segment.view(torch.int16 if segment.element_size() == 2 else torch.int32)[ids].to(torch.int64)
        places = torch.arange(values.shape[1], dtype=torch.int64, device=values.device) * 2 + 2 * number + 1
        total = total * FACTOR + (values * places * (values + FACTOR)).sum(dim=1)
    return total


class Digests:
    """Before whichever copier: what was saved and whether that came back, by host slot; numbers stay on the device."""

    device_segments: list[torch.Tensor]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.saved: dict[int, torch.Tensor] = {}
        self.compared: list[torch.Tensor] = []

    def copy_out(self, job: Job, urgent: int) -> None:
        self.saved.update(zip(job.slots, block_digests(self.device_segments, job.block_ids), strict=True))
        super().copy_out(job, urgent)  # a mixin's super is a copier

    def copied_in(self, job: Job) -> bool:
        """The blocks are not reported as loaded yet, so no step has written into them."""
        there = bool(super().copied_in(job))
        if there:
            digests = torch.stack([self.saved[slot] for slot in job.slots])
            self.compared.append(block_digests(self.device_segments, job.block_ids) == digests)
        return there

    def told(self) -> dict[str, int]:
        """Blocks that came back, and those of them that are not what they were."""
        same = torch.cat(self.compared) if self.compared else torch.ones(0, dtype=torch.bool)
        return {"restored_blocks": same.numel(), "different_blocks": int((~same).sum())}


class SlowOnHost:
    """Loads that are reported late, by so many asks."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._asked: dict[int, int] = {}

    def copied_in(self, job: Job) -> bool:
        self._asked[job.copy_id] = self._asked.get(job.copy_id, 0) + 1
        return self._asked[job.copy_id] > LATE_POLLS and bool(super().copied_in(job))


class SlowOnDevice:
    """Every copy begins with a sleep of its stream, so that whatever does not wait for it comes too early."""

    _save_stream: torch.cuda.Stream
    _load_stream: torch.cuda.Stream

    def _save_parts(self, *arguments: Any) -> None:
        torch.cuda._sleep(SLEEP_CYCLES)
        super()._save_parts(*arguments)

    def move_in(self, job: Job) -> None:
        torch.cuda._sleep(SLEEP_CYCLES)
        super().move_in(job)


def _made(arguments: tuple[Any, ...], mixins: tuple[type, ...], staged: bool) -> Copier:
    """The device's copier behind some mixins."""
    if arguments[0][0].device.type == "cuda":
        from kvpolicy_vllm.plugin.copiers.cuda import CudaCopier, StagedCudaCopier

        base: type = StagedCudaCopier if staged else CudaCopier
        slow = SlowOnDevice
    else:
        base = StagedCopier if staged else IndexingCopier
        slow = SlowOnHost
    bases = (*(slow if mixin is SlowOnHost else mixin for mixin in mixins), base)
    copier: Copier = type("Made", bases, {})(*arguments)
    return copier


def digesting(*arguments: Any) -> Copier:
    return _made(arguments, (Digests,), staged=False)


def staged_digesting(*arguments: Any) -> Copier:
    return _made(arguments, (Digests,), staged=True)


def slow(*arguments: Any) -> Copier:
    return _made(arguments, (Digests, SlowOnHost), staged=False)


def staged_slow(*arguments: Any) -> Copier:
    return _made(arguments, (Digests, SlowOnHost), staged=True)
