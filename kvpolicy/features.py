"""Features of a cost model: what an option would copy and compute, and the engine's other load.

They are computed for one situation as plain numbers, inside a scheduling step, or for many situations as columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite, nan
from typing import NamedTuple

import numpy as np

from kvpolicy.arrays import Floats, causal_pairs
from kvpolicy.errors import InputError
from kvpolicy.events import Kind, Option, Preemption


class Features(NamedTuple):
    """One option in one situation. Counts are those of one rank, as in :class:`~kvpolicy.events.Preemption`."""

    computed_tokens: float
    recomputed_tokens: float
    """Tokens that a recompute is expected to prefill again: all except those in blocks that survive on the device. 0
    for a swap."""
    recomputed_pairs: float
    """(token, earlier token) pairs of that prefill's attention. 0 for a swap."""
    save_bytes: float
    """Bytes expected to be copied out. 0 for a recompute, like all features of copies."""
    load_bytes: float
    """Bytes expected to be copied back: those of blocks that do not survive on the device."""
    save_segments: float
    load_segments: float
    segment_bytes: float
    """Contiguous bytes that one copy operation moves."""
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
"""Features that only grow with the victim's length, all else equal; costs must not fall with them."""


def lacking_blocks(computed_tokens: int, ahead_tokens: int, held_blocks: int, block_size: int) -> int:
    """Blocks that a request lacks to compute ``ahead_tokens`` more; 0 or below if it holds enough."""
    return -(-(computed_tokens + ahead_tokens) // block_size) - held_blocks


def short_blocks(lacking: Iterable[int], free_blocks: int) -> int:
    """Blocks that the failed allocation lacked; 0 if no allocation failed.

    It is the allocation of the first request, in scheduling order, that lacks more blocks than are free. Exact for a
    decode. For a prefill chunk it is an upper bound, because the remaining token budget is unknown.
    """
    return next((blocks - free_blocks for blocks in lacking if blocks > free_blocks), 0)


Row = tuple[
    float, float, float, float, float, float, float, float, float, float, float, float, float, float,
]  # fmt: skip
"""The values of :class:`Features` as a plain tuple, in the order of :data:`FEATURES`."""


def features_of(situation: Preemption, option: Option) -> Features:
    """The features of ``option`` in ``situation``.

    What is lost, saved and loaded is what the situation expects (``hit_blocks``, ``save_blocks``). Shared blocks always
    survive. Raises InputError, naming the feature, for one that is not finite or below 0.
    """
    known = situation
    if option.kind == "recompute":
        row = recompute_row(
            known.computed_tokens, known.cached_tokens, known.shared_blocks, known.block_size, known.running_requests,
            known.batch_tokens, known.free_blocks, known.waiting_requests,
        )  # fmt: skip
    else:
        row = swap_row(
            known.computed_tokens, known.shared_blocks, known.hit_blocks, known.save_blocks, known.held_blocks,
            known.block_bytes, known.segment_bytes, known.queued_save_bytes, known.queued_load_bytes,
            known.running_requests, known.batch_tokens, known.free_blocks, known.waiting_requests,
        )  # fmt: skip
    if not usable(row):
        raise InputError(_what_is_wrong(row))
    return Features(*row)


def with_hits(situation: Preemption, hit_tokens: int) -> Preemption:
    """The situation with the tokens that were found on the device at resume, in place of what was expected.

    A cost is the cost of what was really lost: laws are fitted to it. Predictions know only what is expected. Of
    several block tables nearly every victim finds all that was findable, or nothing; for one that finds a part of the
    tokens, the same part of the blocks is taken.
    """
    hit_blocks = hit_tokens / situation.block_size
    if situation.hashed_tokens is None:
        return replace(situation, hit_blocks=hit_blocks, shared_blocks=min(situation.shared_blocks, int(hit_blocks)))
    share = min(1.0, hit_tokens / situation.hashed_tokens) if situation.hashed_tokens else 0.0
    return replace(situation, hit_blocks=share * situation.hashed_blocks, hit_tokens=float(hit_tokens))


# ---- arithmetic that can be compiled: functions of numbers; explicit comparisons, because they decide on NaN ----


def surviving(hits: float, shared: float) -> float:
    """Blocks, or tokens, that survive on the device: the hits, and never fewer than the shared ones; NaN where either
    is NaN."""
    if hits > shared:
        return hits
    if shared >= hits:
        return shared
    return nan


def recompute_row(
    computed_tokens: float,
    cached_tokens: float,
    shared_blocks: float,
    block_size: float,
    running_requests: float,
    batch_tokens: float,
    free_blocks: float,
    waiting_requests: float,
) -> Row:
    """The features of a recompute."""
    cached = surviving(cached_tokens, shared_blocks * block_size)
    if cached > computed_tokens:
        cached = computed_tokens
    pairs = (computed_tokens * (computed_tokens + 1) - cached * (cached + 1)) / 2
    return (
        float(computed_tokens), float(computed_tokens - cached), float(pairs), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
        float(running_requests), float(batch_tokens), float(free_blocks), float(waiting_requests),
    )  # fmt: skip


def swap_row(
    computed_tokens: float,
    shared_blocks: float,
    hit_blocks: float,
    save_blocks: float,
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
    loaded_blocks = held_blocks - surviving(hit_blocks, shared_blocks)
    if loaded_blocks < 0:
        loaded_blocks = 0
    return (
        float(computed_tokens), 0.0, 0.0, float(save_blocks * block_bytes), float(loaded_blocks * block_bytes),
        float(save_blocks * pieces), float(loaded_blocks * pieces), float(segment_bytes), float(queued_save_bytes),
        float(queued_load_bytes), float(running_requests), float(batch_tokens), float(free_blocks),
        float(waiting_requests),
    )  # fmt: skip


def usable(row: Sequence[float]) -> bool:
    """Whether every feature is a finite number, 0 or above."""
    valid = True
    for value in row:
        valid = valid and 0.0 <= value < inf
    return valid


# ---- features of many situations ----

COLUMNS = (
    "computed_tokens", "shared_blocks", "hit_blocks", "save_blocks", "held_blocks", "block_size", "block_bytes",
    "segment_bytes", "queued_save_bytes", "queued_load_bytes", "running_requests", "batch_tokens", "free_blocks",
    "waiting_requests", "hit_tokens",
)  # fmt: skip
"""Fields of a :class:`~kvpolicy.events.Preemption` that features are computed from; ``hit_tokens`` is NaN where it is
None."""
_OF_COPIES = (
    "save_bytes", "load_bytes", "save_segments", "load_segments", "segment_bytes", "queued_save_bytes",
    "queued_load_bytes",
)  # fmt: skip
_SURROUNDINGS = ("computed_tokens", "running_requests", "batch_tokens", "free_blocks", "waiting_requests")


def feature_columns(columns: Mapping[str, Floats], kind: Kind) -> dict[str, Floats]:
    """The result of :func:`features_of` for many situations, by feature. ``columns``: the :data:`COLUMNS` by name.

    Values must be 0 or above, as in every trace that was read.
    """
    zeros = np.zeros(len(columns["computed_tokens"]))
    surroundings = {name: columns[name] for name in _SURROUNDINGS}
    survives = np.maximum(columns["hit_blocks"], columns["shared_blocks"])
    if kind == "recompute":
        hit_tokens = columns["hit_tokens"]
        of_tables = np.maximum(hit_tokens, columns["shared_blocks"] * columns["block_size"])
        cached = np.where(np.isnan(hit_tokens), survives * columns["block_size"], of_tables)
        cached = np.minimum(cached, columns["computed_tokens"])
        lost = {
            "recomputed_tokens": columns["computed_tokens"] - cached,
            "recomputed_pairs": causal_pairs(cached, columns["computed_tokens"]),
        }
        return lost | dict.fromkeys(_OF_COPIES, zeros) | surroundings
    pieces = np.maximum(columns["block_bytes"] // np.maximum(columns["segment_bytes"], 1.0), 1.0)
    saved, loaded_blocks = columns["save_blocks"], np.maximum(columns["held_blocks"] - survives, 0.0)
    copied = {
        "save_bytes": saved * columns["block_bytes"],
        "load_bytes": loaded_blocks * columns["block_bytes"],
        "save_segments": saved * pieces,
        "load_segments": loaded_blocks * pieces,
    }
    queued = {name: columns[name] for name in ("segment_bytes", "queued_save_bytes", "queued_load_bytes")}
    return copied | queued | dict.fromkeys(("recomputed_tokens", "recomputed_pairs"), zeros) | surroundings


def _what_is_wrong(row: Row) -> str:
    bad = {name: value for name, value in zip(FEATURES, row, strict=True) if not (isfinite(value) and value >= 0)}
    return f"features: {bad}: every feature should be a finite number, 0 or above"
