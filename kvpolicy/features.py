"""The vector a cost model sees: what an option would move and compute, and what else the engine is busy with.

Of one situation in plain numbers, which runs inside a scheduling step; of many in columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf, isfinite
from typing import NamedTuple

import numpy as np

from kvpolicy.arrays import Floats, causal_pairs
from kvpolicy.errors import InputError
from kvpolicy.events import Kind, Option, Preemption


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


def lacking_blocks(computed_tokens: int, ahead_tokens: int, held_blocks: int, block_size: int) -> int:
    """Blocks that a request lacks to compute ``ahead_tokens`` more; 0 or below where it holds them."""
    return -(-(computed_tokens + ahead_tokens) // block_size) - held_blocks


def short_blocks(lacking: Iterable[int], free_blocks: int) -> int:
    """Blocks that the failed allocation lacked: that of the first request, in scheduling order, which lacks more than
    are free. 0 where there is none.

    Exact for a decode; for a prefill chunk an upper bound, since nobody says what was left of the token budget.
    """
    return next((blocks - free_blocks for blocks in lacking if blocks > free_blocks), 0)


def blocks_back(held_blocks: int, shared_blocks: int) -> int:
    """Blocks that a load brings back: those that nobody else holds."""
    return max(0, held_blocks - shared_blocks)


Row = tuple[
    float, float, float, float, float, float, float, float, float, float, float, float, float, float,
]  # fmt: skip
"""What :class:`Features` holds, unnamed: one number each of :data:`FEATURES`."""


def features_of(situation: Preemption, option: Option) -> Features:
    """The features of ``option`` in ``situation``.

    A swap moves every block held out, and back those nobody else holds. Raises ValueError, naming the feature, for
    one that is not a finite number, or below 0.
    """
    one = situation
    if option.kind == "recompute":
        row = recompute_row(
            one.computed_tokens, one.shared_blocks, one.block_size, one.running_requests, one.batch_tokens,
            one.free_blocks, one.waiting_requests,
        )  # fmt: skip
    else:
        row = swap_row(
            one.computed_tokens, one.shared_blocks, one.held_blocks, one.block_bytes, one.segment_bytes,
            one.queued_save_bytes, one.queued_load_bytes, one.running_requests, one.batch_tokens, one.free_blocks,
            one.waiting_requests,
        )  # fmt: skip
    if not usable(row):
        raise InputError(_what_is_wrong(row))
    return Features(*row)


# ---- arithmetic that can be compiled: numbers in, numbers out; comparisons written out, for they decide on NaN ----


def recompute_row(
    computed_tokens: float,
    shared_blocks: float,
    block_size: float,
    running_requests: float,
    batch_tokens: float,
    free_blocks: float,
    waiting_requests: float,
) -> Row:
    """The features of a recompute."""
    kept = shared_blocks * block_size
    if kept > computed_tokens:
        kept = computed_tokens
    pairs = (computed_tokens * (computed_tokens + 1) - kept * (kept + 1)) / 2
    return (
        float(computed_tokens), float(computed_tokens - kept), float(pairs), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
        float(running_requests), float(batch_tokens), float(free_blocks), float(waiting_requests),
    )  # fmt: skip


def swap_row(
    computed_tokens: float,
    shared_blocks: float,
    held_blocks: float,
    block_bytes: float,
    segment_bytes: float,
    queued_save_bytes: float,
    queued_load_bytes: float,
    running_requests: float,
    batch_tokens: float,
    free_blocks: float,
    waiting_requests: float,
) -> Row:
    """The features of a swap."""
    piece = segment_bytes
    if piece < 1:
        piece = 1
    pieces = block_bytes // piece
    if pieces < 1:
        pieces = 1
    back = held_blocks - shared_blocks
    if back < 0:
        back = 0
    return (
        float(computed_tokens), 0.0, 0.0, float(held_blocks * block_bytes), float(back * block_bytes),
        float(held_blocks * pieces), float(back * pieces), float(segment_bytes), float(queued_save_bytes),
        float(queued_load_bytes), float(running_requests), float(batch_tokens), float(free_blocks),
        float(waiting_requests),
    )  # fmt: skip


def usable(row: Sequence[float]) -> bool:
    """Whether every feature is a finite number, 0 or above."""
    right = True
    for value in row:
        right = right and 0.0 <= value < inf
    return right


# ---- the same for many situations at once ----

COLUMNS = (
    "computed_tokens", "shared_blocks", "held_blocks", "block_size", "block_bytes", "segment_bytes",
    "queued_save_bytes", "queued_load_bytes", "running_requests", "batch_tokens", "free_blocks", "waiting_requests",
)  # fmt: skip
"""Fields of a :class:`~kvpolicy.events.Preemption` that features are made of."""
_OF_COPIES = (
    "save_bytes", "load_bytes", "save_segments", "load_segments", "segment_bytes", "queued_save_bytes",
    "queued_load_bytes",
)  # fmt: skip
_SURROUNDINGS = ("computed_tokens", "running_requests", "batch_tokens", "free_blocks", "waiting_requests")


def feature_columns(got: Mapping[str, Floats], kind: Kind) -> dict[str, Floats]:
    """What :func:`features_of` gives for each situation, by feature. ``got``: by name, the :data:`COLUMNS`.

    Values are 0 or above, as in every trace that was read.
    """
    nothing = np.zeros(len(got["computed_tokens"]))
    around = {name: got[name] for name in _SURROUNDINGS}
    if kind == "recompute":
        kept = np.minimum(got["shared_blocks"] * got["block_size"], got["computed_tokens"])
        lost = {
            "recomputed_tokens": got["computed_tokens"] - kept,
            "recomputed_pairs": causal_pairs(kept, got["computed_tokens"]),
        }
        return lost | dict.fromkeys(_OF_COPIES, nothing) | around
    pieces = np.maximum(got["block_bytes"] // np.maximum(got["segment_bytes"], 1.0), 1.0)
    held, back = got["held_blocks"], np.maximum(got["held_blocks"] - got["shared_blocks"], 0.0)
    copied = {
        "save_bytes": held * got["block_bytes"],
        "load_bytes": back * got["block_bytes"],
        "save_segments": held * pieces,
        "load_segments": back * pieces,
    }
    queued = {name: got[name] for name in ("segment_bytes", "queued_save_bytes", "queued_load_bytes")}
    return copied | queued | dict.fromkeys(("recomputed_tokens", "recomputed_pairs"), nothing) | around


def _what_is_wrong(row: Row) -> str:
    bad = {name: value for name, value in zip(FEATURES, row, strict=True) if not (isfinite(value) and value >= 0)}
    return f"features: {bad}: every feature should be a finite number, 0 or above"
