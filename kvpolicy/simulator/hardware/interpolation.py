"""Seconds of a step by interpolation in measured tables, compiled by numba.

Between measured points all tables are linear in each axis. Beyond them the value at the table's edge is multiplied by
the ratio of :func:`physics` at the point to that at the edge; every term of it grows with its column.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
from numba.extending import register_jitable

from kvpolicy.arrays import Floats, Ints

TERMS = ("launch", "pairs", "tokens", "chunk_read", "decode_read", "decode_context", "decode_requests")
"""Terms of :func:`physics`, one constant each: seconds per launch, (query, context) pair, query token of a chunk,
context token that a chunk reads, context token that decoding requests read, token of one decoding request's context
(no kernel ends before its longest request), decoding request."""

PARTS = (
    "tokens_at", "tokens_s", "sequences_at", "sequences_s",
    "prefill_tokens", "prefill_context", "prefill_s",
    "decode_requests", "decode_context", "decode_s",
    "mixed_tokens", "mixed_context", "mixed_requests", "mixed_decode_context", "mixed_s",
    "beyond_tokens", "beyond_sequences", "beyond_prefill", "beyond_decode", "beyond_mixed", "engine",
)  # fmt: skip
"""Parts of the one array that :func:`step` reads, in order: two arguments are cheaper to pass than twenty. Grids are
flat, the last axis runs fastest; an empty ``mixed_s`` means that chunks and decoding requests in one step take as long
as apart. ``beyond_...``: seconds per token and per sequence beyond the last point; for grids the constants of
:data:`TERMS`. ``engine``: seconds per step, extra seconds per step with a chunk, and the share by which attention of
decoding requests takes longer than the tables say, which were measured with even contexts."""
TOKENS, SEQUENCES, PREFILL, DECODE, MIXED, BEYOND, ENGINE = 0, 2, 4, 7, 10, 15, 20


def part(data: Floats, starts: Ints, number: int) -> Floats:
    return data[starts[number] : starts[number + 1]]


def interval_of(axis: Floats, at: float) -> int:
    """Index of the interval that holds ``at``; the first or last one outside. Axes have two points or more."""
    low, high = 0, len(axis) - 2
    while low < high:
        middle = (low + high + 1) // 2
        if axis[middle] <= at:
            low = middle
        else:
            high = middle - 1
    return low


def clamped(axis: Floats, at: float) -> float:
    return float(min(max(at, axis[0]), axis[len(axis) - 1]))


def share(axis: Floats, number: int, at: float) -> float:
    return float((at - axis[number]) / (axis[number + 1] - axis[number]))


def curve(axis: Floats, seconds: Floats, per_more_s: float, at: float) -> float:
    """Linear interpolation; constant below the first point, as weights are read once for however few tokens."""
    last = len(axis) - 1
    if at >= axis[last]:
        return float(seconds[last] + per_more_s * (at - axis[last]))
    inside = clamped(axis, at)
    i = interval_of(axis, inside)
    return float(seconds[i] + share(axis, i, inside) * (seconds[i + 1] - seconds[i]))


def plane(first: Floats, second: Floats, seconds: Floats, a: float, b: float) -> float:
    """Bilinear interpolation at a point inside the grid."""
    i, j, columns = interval_of(first, a), interval_of(second, b), len(second)
    u, v = share(first, i, a), share(second, j, b)
    below = (1 - v) * seconds[i * columns + j] + v * seconds[i * columns + j + 1]
    above = (1 - v) * seconds[(i + 1) * columns + j] + v * seconds[(i + 1) * columns + j + 1]
    return float((1 - u) * below + u * above)


def hyperplane(
    tokens: Floats, context: Floats, requests: Floats, decoded: Floats, seconds: Floats,
    c: float, k: float, n: float, d: float,
) -> float:  # fmt: skip
    """Interpolation linear in each of four axes, at a point inside the grid."""
    i, j = interval_of(tokens, c), interval_of(context, k)
    u, v = share(tokens, i, c), share(context, j, k)
    plane_size = len(requests) * len(decoded)
    total = 0.0
    for next_i in range(2):
        for next_j in range(2):
            weight = (u if next_i else 1 - u) * (v if next_j else 1 - v)
            if weight != 0.0:
                start = ((i + next_i) * len(context) + j + next_j) * plane_size
                total += weight * plane(requests, decoded, seconds[start : start + plane_size], n, d)
    return total


def physics(constants: Floats, c: float, pairs: float, k: float, n: float, d: float) -> float:
    return float(
        constants[0] + constants[1] * pairs + constants[2] * c + constants[3] * (k + c)
        + constants[4] * n * d + constants[5] * d + constants[6] * n
    )  # fmt: skip


def triangle(c: float, k: float) -> float:
    """(query, context) pairs of one chunk of ``c`` tokens behind ``k`` tokens of context."""
    return c * k + c * (c + 1) / 2


def prefill_s(data: Floats, starts: Ints, chunk: float, pairs: float, k: float) -> float:
    tokens, context = part(data, starts, PREFILL), part(data, starts, PREFILL + 1)
    constants = part(data, starts, BEYOND + 2)
    ci, ki = clamped(tokens, chunk), clamped(context, k)
    seconds = plane(tokens, context, part(data, starts, PREFILL + 2), ci, ki)
    edge = physics(constants, ci, triangle(ci, ki), ki, 0.0, 0.0)
    return seconds * physics(constants, chunk, pairs, k, 0.0, 0.0) / edge


def decode_s(data: Floats, starts: Ints, n: float, d: float) -> float:
    requests, context = part(data, starts, DECODE), part(data, starts, DECODE + 1)
    constants = part(data, starts, BEYOND + 3)
    ni, di = clamped(requests, n), clamped(context, d)
    seconds = plane(requests, context, part(data, starts, DECODE + 2), ni, di)
    return seconds * physics(constants, 0.0, 0.0, 0.0, n, d) / physics(constants, 0.0, 0.0, 0.0, ni, di)


def mixed_s(data: Floats, starts: Ints, chunk: float, pairs: float, k: float, n: float, d: float) -> float:
    tokens, context = part(data, starts, MIXED), part(data, starts, MIXED + 1)
    requests, decoded = part(data, starts, MIXED + 2), part(data, starts, MIXED + 3)
    constants = part(data, starts, BEYOND + 4)
    ci, ki, ni, di = clamped(tokens, chunk), clamped(context, k), clamped(requests, n), clamped(decoded, d)
    seconds = hyperplane(tokens, context, requests, decoded, part(data, starts, MIXED + 4), ci, ki, ni, di)
    edge = physics(constants, ci, triangle(ci, ki), ki, ni, di)
    return seconds * physics(constants, chunk, pairs, k, n, d) / edge


def attention(
    data: Floats, starts: Ints, chunk: float, pairs: float, decode: float, kv_read: float, uneven: float
) -> float:
    """Seconds of attention. Chunks of several requests count as one chunk of as many tokens, behind the context that
    gives the same pairs; where that would be negative, it is 0 and :func:`physics` accounts for the fewer pairs."""
    seconds = 0.0
    d = kv_read / decode if decode > 0 else 0.0
    k = max(0.0, (pairs - chunk * (chunk + 1) / 2) / chunk) if chunk > 0 else 0.0
    together = chunk > 0 and decode > 0 and starts[MIXED + 5] > starts[MIXED + 4]
    if together:
        seconds += mixed_s(data, starts, chunk, pairs, k, decode, d)
    elif chunk > 0:
        seconds += prefill_s(data, starts, chunk, pairs, k)
    if decode > 0 and not (together and uneven == 0.0):
        seconds += (uneven if together else 1.0 + uneven) * decode_s(data, starts, decode, d)
    return seconds


def step(
    data: Floats, starts: Ints, scheduled: float, decode: float, kv_read: float, pairs: float, prefills: float
) -> float:
    """Seconds of one step."""
    engine = part(data, starts, ENGINE)
    seconds = engine[0]
    if scheduled > 0:
        beyond, chunk = part(data, starts, BEYOND), scheduled - decode
        seconds += curve(part(data, starts, TOKENS), part(data, starts, TOKENS + 1), beyond[0], scheduled)
        beyond = part(data, starts, BEYOND + 1)
        seconds += curve(part(data, starts, SEQUENCES), part(data, starts, SEQUENCES + 1), beyond[0], decode + prefills)
        seconds += attention(data, starts, chunk, pairs, decode, kv_read, engine[2])
        if chunk > 0:
            seconds += engine[1]
    return float(seconds)


def steps(data: Floats, starts: Ints, loads: Floats, seconds: Floats) -> None:
    """:func:`step` of each row of ``loads``, columns as :data:`~kvpolicy.simulator.base.LOAD`, into ``seconds``."""
    for i in range(len(loads)):
        seconds[i] = step(data, starts, loads[i, 0], loads[i, 1], loads[i, 2], loads[i, 3], loads[i, 4])


JITABLE: tuple[Callable[..., Any], ...] = (
    part, interval_of, clamped, share, curve, plane, hyperplane, physics, triangle, prefill_s, decode_s, mixed_s,
    attention, step,
)  # fmt: skip
PACKED = "float64[::1], int64[::1]"
UNREADABLE = (OSError, RuntimeError, EOFError, ValueError, AttributeError, ImportError, IndexError)
"""Errors of numba where its cache cannot be written or is damaged."""


@cache
def compiled() -> tuple[Callable[..., float], Callable[..., None]]:
    """:func:`step` and :func:`steps`, compiled: takes seconds, much less from numba's cache on disk."""
    for part in JITABLE:
        register_jitable(part)
    try:
        return _compiled(True)
    except UNREADABLE:
        return _compiled(False)


def _compiled(cache: bool) -> tuple[Callable[..., float], Callable[..., None]]:
    # Numba's cache goes by the age of this file, so all compiled functions are in it.
    single_step: Callable[..., float] = numba.njit(f"float64({PACKED}, {', '.join(['float64'] * 5)})", cache=cache)(
        step
    )
    many_steps: Callable[..., None] = numba.njit(f"void({PACKED}, float64[:, ::1], float64[::1])", cache=cache)(steps)
    return single_step, many_steps
