"""The host pool as one range of memory, in which a slot's bytes are contiguous, one layer after the other."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from kvpolicy.arrays import left_out_of_dumps


def host_arena(slots: int, block_bytes: int) -> torch.Tensor:
    """Bytes of shape (slots, block_bytes), on memory pages of their own: whole pages are locked, and two locked ranges
    must not share one. See :func:`guarded` for what else is done."""
    pages = mmap.mmap(-1, slots * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(guarded(pages), dtype=torch.uint8).view(slots, block_bytes)


def guarded(pages: mmap.mmap, touch: bool = True) -> mmap.mmap:
    """The pages, left out of core dumps, and touched: what is promised is there, or it fails at the start.

    Without ``touch``, for those whom another process touches.
    """
    left_out_of_dumps(pages)
    if touch:
        torch.frombuffer(pages, dtype=torch.uint8)[:: mmap.PAGESIZE].zero_()
    return pages


def offsets_of(segments: Sequence[torch.Tensor]) -> list[int]:
    """Offset of each segment's piece in a slot, followed by the slot's size; bytes."""
    return [0, *accumulate(segment.shape[1] * segment.element_size() for segment in segments)]


def segments_in(arena: torch.Tensor, segments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of the arena by segment, each of shape (slots, elements) and of its segment's type."""
    edges = pairwise(offsets_of(segments))
    return [arena[:, begin:end].view(segment.dtype) for segment, (begin, end) in zip(segments, edges, strict=True)]
