"""Token ids for requests that are known by their lengths and their prefixes' ids alone."""

from __future__ import annotations

from kvpolicy.workload import Request

MAX_TOKENS = 1 << 32
"""Of one request, far beyond any: keeps the tokens of different requests apart."""


def prompt_of(request: Request, number: int) -> list[int]:
    """Token ids of the prompt. Even ones belong to a prefix block, odd ones to request ``number`` alone."""
    size = request.prefix_block_tokens
    shared = min(request.prompt_tokens, len(request.prefix) * size)
    found: list[int] = []
    for block in request.prefix:
        first = 2 * block * size
        found.extend(range(first, first + 2 * min(size, shared - len(found)), 2))
        if len(found) == shared:
            break
    start = 2 * number * MAX_TOKENS + 1
    found.extend(range(start + 2 * shared, start + 2 * request.prompt_tokens, 2))
    return found


def token_at(request: Request, number: int, position: int) -> int:
    """What request ``number`` has at a position: its ids may go on past the prompt, into what it generates."""
    size = request.prefix_block_tokens
    if position < len(request.prefix) * size:
        block, offset = divmod(position, size)
        return 2 * (request.prefix[block] * size + offset)
    return 2 * (number * MAX_TOKENS + position) + 1
