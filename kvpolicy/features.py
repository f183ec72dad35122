"""The vector a cost model sees: what an option would move and compute, and what else the engine is busy with.

Plain numbers, no arrays: this runs inside a scheduling step.
"""

from __future__ import annotations

from math import isfinite
from typing import NamedTuple

from kvpolicy.events import Option, Preemption


class Features(NamedTuple):
    """One option in one situation. Counts are those of one rank, as in :class:`~kvpolicy.events.Preemption`."""

    computed_tokens: float
    recomputed_tokens: float
    """Tokens a recompute prefills again: all but those in blocks that other requests hold too. 0 for a swap."""
    recomputed_pairs: float
    """(token, earlier token) pairs of that prefill's attention. 0 for a swap."""
    save_bytes: float
    """0 for a recompute, like all that is about copies."""
    load_bytes: float
    """Less than ``save_bytes`` where blocks are shared: those are still on the device."""
    save_segments: float
    load_segments: float
    segment_bytes: float
    """Contiguous bytes per segment: what one copy operation moves."""
    queued_save_bytes: float
    queued_load_bytes: float
    running_requests: float
    batch_tokens: float
    free_blocks: float
    waiting_requests: float


FEATURES: tuple[str, ...] = Features._fields

GROWING = frozenset(
    {
        "computed_tokens",
        "recomputed_tokens",
        "recomputed_pairs",
        "save_bytes",
        "load_bytes",
        "save_segments",
        "load_segments",
    }
)
"""Features that can only grow when the victim is longer and nothing else changes; costs may not fall with them."""


def features_of(situation: Preemption, option: Option) -> Features:
    """The features of ``option`` in ``situation``.

    A swap moves every block held out, and back those nobody else holds. Raises ValueError, naming the feature, for
    one that is not a finite number, or below 0.
    """
    kept = min(situation.shared_blocks * situation.block_size, situation.computed_tokens)
    computed = situation.computed_tokens
    if option.kind == "recompute":
        lost, pairs = computed - kept, (computed * (computed + 1) - kept * (kept + 1)) / 2
        save = load = save_segments = load_segments = segment = queued_save = queued_load = 0
    else:
        lost, pairs = 0, 0.0
        pieces = max(1, situation.block_bytes // max(1, situation.segment_bytes))
        back = max(0, situation.held_blocks - situation.shared_blocks)
        save, load = situation.copy_bytes, back * situation.block_bytes
        save_segments, load_segments = situation.held_blocks * pieces, back * pieces
        segment = situation.segment_bytes
        queued_save, queued_load = situation.queued_save_bytes, situation.queued_load_bytes
    found = Features(
        computed, lost, pairs, save, load, save_segments, load_segments, segment, queued_save, queued_load,
        situation.running_requests, situation.batch_tokens, situation.free_blocks, situation.waiting_requests,
    )  # fmt: skip
    if not isfinite(sum(found)) or min(found) < 0:
        raise ValueError(_what_is_wrong(found))
    return found


def _what_is_wrong(found: Features) -> str:
    bad = {name: value for name, value in zip(FEATURES, found, strict=True) if not (isfinite(value) and value >= 0)}
    return f"features: {bad or found}: every feature should be a finite number, 0 or above"
