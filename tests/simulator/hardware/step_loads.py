"""Loads of steps, and the seconds that the laws behind the tables give them."""

from __future__ import annotations

from kvpolicy.shape import ModelShape
from kvpolicy.simulator.base import StepLoad
from tests.simulator import tables
from tests.simulator.tables import CONFIG, LAYERS

SHAPE = ModelShape.from_config(CONFIG)


def step_load(decode: int = 0, context: int = 0, chunks: tuple[tuple[int, int], ...] = ()) -> StepLoad:
    """Requests that decode behind ``context`` tokens, the new one in, and chunks of (tokens, tokens before them)."""
    return StepLoad(
        scheduled_tokens=decode + sum(c for c, _ in chunks),
        decode_requests=decode,
        kv_read_tokens=decode * context,
        chunk_context=sum(c * k + c * (c + 1) // 2 for c, k in chunks),
        prefill_requests=len(chunks),
        prefill_context_tokens=sum(k for _, k in chunks),
    )


def expected_s(decode: int, context: int, chunk: int = 0, before: int = 0) -> float:
    """Seconds of a step by the laws that the tables were made from."""
    us = tables.dense_us(decode + chunk) + tables.sequences_us(decode + (chunk > 0))
    return 1e-6 * (us + LAYERS * tables.attention_us(chunk, before, decode, context))
