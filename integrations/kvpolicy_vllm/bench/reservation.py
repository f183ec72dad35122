"""Reserving KV memory for requests before they are sent, as Orca's allocator did, in front of any server.

Called by :mod:`kvpolicy_vllm.bench.rate_load`. An unmodified vLLM cannot reserve, so the client does: it holds a
request back until what it reserves fits beside what those at the server have reserved, first come, first served. The
batch is then never larger than an engine with that reservation could hold. It is an upper bound on such an engine: no
memory is lost to fragments between reservations, and kernels and scheduler are vLLM's.
"""

from __future__ import annotations

import asyncio
from collections import deque

from kvpolicy.workload import Request

RESERVED = {
    "max": "the longest sequence that the server takes",
    "pow2": "the prompt, and the output's length rounded up to a power of two",
    "oracle": "the prompt and the output's true length",
}
"""What a request may reserve: the three variants of Orca in section 6.1 of the PagedAttention paper (Kwon et al.,
2023)."""


def reserved_tokens(how: str, request: Request, context_tokens: int) -> int:
    """Tokens that a request reserves. ``how``: one of :data:`RESERVED`."""
    if how == "max":
        return context_tokens
    output = request.output_tokens if how == "oracle" else 1 << (request.output_tokens - 1).bit_length()
    return min(context_tokens, request.prompt_tokens + output)


class Memory:
    """So many tokens, reserved first come, first served. Within one event loop."""

    def __init__(self, tokens: int) -> None:
        self.tokens = self._free = tokens
        self._waiting: deque[tuple[int, asyncio.Event]] = deque()

    async def reserve(self, tokens: int) -> int:
        """Wait until the tokens are free, and take them. Returns how many to release: a reservation larger than the
        memory takes all of it."""
        tokens = min(tokens, self.tokens)
        if self._waiting or tokens > self._free:
            granted = asyncio.Event()
            self._waiting.append((tokens, granted))
            await granted.wait()
        else:
            self._free -= tokens
        return tokens

    def release(self, tokens: int) -> None:
        self._free += tokens
        while self._waiting and self._waiting[0][0] <= self._free:
            wanted, granted = self._waiting.popleft()
            self._free -= wanted
            granted.set()
