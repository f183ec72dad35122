"""Memory that requests reserve before they are sent."""

from __future__ import annotations

import asyncio

import pytest

from kvpolicy.workload import Request
from kvpolicy_vllm.bench.reservation import Memory, reserved_tokens


@pytest.mark.parametrize(("how", "tokens"), [("max", 512), ("pow2", 100 + 32), ("oracle", 100 + 25)])
def test_what_a_request_reserves(how: str, tokens: int) -> None:
    """The paper's own example: an output of 25 tokens reserves 32 under Pow2."""
    assert reserved_tokens(how, Request(0.0, 100, 25), 512) == tokens
    assert reserved_tokens(how, Request(0.0, 400, 112), 512) == 512, "never more than the context"
    assert reserved_tokens(how, Request(0.0, 100, 1), 512) == (512 if how == "max" else 101)


def test_first_come_first_served() -> None:
    """A large request at the head is not passed by a small one that would fit."""

    async def served() -> list[str]:
        memory, order = Memory(100), []

        async def ask(name: str, tokens: int, turns: int) -> None:
            held = await memory.reserve(tokens)
            order.append(name)
            for _ in range(turns):
                await asyncio.sleep(0)
            memory.release(held)

        names = (("first", 60, 5), ("large", 70, 1), ("small", 10, 1), ("too large", 1000, 1), ("last", 1, 1))
        await asyncio.gather(*(ask(*one) for one in names))
        assert await memory.reserve(100) == 100, "all of it is free again"
        return order

    assert asyncio.run(served()) == ["first", "large", "small", "too large", "last"]
