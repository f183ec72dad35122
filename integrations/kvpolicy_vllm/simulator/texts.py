"""Token ids for requests of which only lengths and the ids of prefix blocks are known."""

from __future__ import annotations

from kvpolicy.workload import Request

MAX_TOKENS = 1 << 32
"""Upper bound on a request's tokens, far beyond any; keeps the token ids of different requests apart."""


def prompt_of(request: Request, number: int) -> list[int]:
    """Token ids of the prompt: even ones for shared prefix blocks, odd ones for what only request ``number`` has."""
    size = request.prefix_block_tokens
    shared = min(request.prompt_tokens, len(request.prefix) * size)
    token_ids: list[int] = []
    for block in request.prefix:
        first, tokens = _shared_token(size, block * size), min(size, shared - len(token_ids))
        token_ids.extend(range(first, first + tokens * _SHARED_STEP, _SHARED_STEP))
        if len(token_ids) == shared:
            break
    start = 2 * number * MAX_TOKENS + 1
    token_ids.extend(range(start + 2 * shared, start + 2 * request.prompt_tokens, 2))
    return token_ids


_SHARED_STEP = 2 * MAX_TOKENS
"""Between the tokens of a shared block, so that blocks of another size, whose ids mean nothing here, have others."""


def _shared_token(size: int, position: int) -> int:
    """A token of the shared blocks of ``size`` tokens, by its position in all of them."""
    return position * _SHARED_STEP + 2 * size


def token_at(request: Request, number: int, position: int) -> int:
    """The token of request ``number`` at a position; prefix ids may extend past the prompt, into generated tokens."""
    size = request.prefix_block_tokens
    if position < len(request.prefix) * size:
        block, offset = divmod(position, size)
        return _shared_token(size, request.prefix[block] * size + offset)
    return 2 * (number * MAX_TOKENS + position) + 1
