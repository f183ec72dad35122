"""The client of a live server: what it sends, what it reads, and that every failure has a name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from kvpolicy.errors import InputError
from kvpolicy_vllm.bench.live_server import free_port
from kvpolicy_vllm.bench.openai_api import Answer, StreamError, connected, events
from tests.bench.live_http import Small, next_tokens, serving


def asked(small: Small, count: int = 1, output_tokens: int = 4) -> list[Answer]:
    async def ask(url: str) -> list[Answer]:
        async with connected(url) as api:
            return [
                await api.complete([1, 2, number], output_tokens, "salt", {"kvpolicy": {}}) for number in range(count)
            ]

    with serving(small) as url:
        return asyncio.run(ask(url))


def test_an_answer_has_its_tokens_and_its_times() -> None:
    small = Small()
    (answer,) = asked(small)
    assert answer.token_ids == tuple(next_tokens([1, 2, 0], 4)) and answer.error == ""
    assert answer.ttft_s is not None and 0 < answer.ttft_s <= answer.e2e_s
    assert len(answer.token_s) == 4 and answer.token_s[0] == answer.ttft_s
    assert list(answer.token_s) == sorted(answer.token_s)
    (body,) = small.bodies
    assert body["model"] == "small" and body["cache_salt"] == "salt" and body["kv_transfer_params"] == {"kvpolicy": {}}
    assert body["temperature"] == 0 and body["ignore_eos"] and body["max_tokens"] == 4


@pytest.mark.parametrize(
    ("fault", "error", "tokens"),
    [
        ("status", "HTTP 503: the pool is full", 0),
        ("in the stream", "in the stream: it broke", 2),
        ("no end", "the stream broke off", 4),
        ("short", "fewer or more tokens than asked for", 3),
        ("end", "ClientPayloadError", 2),
    ],
)
def test_what_goes_wrong_has_a_name_and_stops_no_other_request(fault: str, error: str, tokens: int) -> None:
    one, other = asked(Small({0: fault}), 2)
    assert one.error.startswith(error) and len(one.token_ids) == tokens
    assert other.error == "" and len(other.token_ids) == 4


def test_a_server_that_is_not_there_is_named() -> None:
    async def ask() -> None:
        async with connected(f"http://127.0.0.1:{free_port()}"):
            pass

    with pytest.raises(InputError, match=r"/v1/models does not answer as an OpenAI server: "):
        asyncio.run(ask())


def test_what_a_server_says_of_itself() -> None:
    async def ask(url: str) -> None:
        async with connected(f"{url}/v1/") as api:
            assert await api.describe() == ("small", 512)
            assert len(await api.tokenize("one two three")) == 3
            assert await api.gap([1, 2]) == 0.25
            counters = await api.counters()
            assert counters["vllm:kvpolicy_decisions_total"] == 2 and "vllm:prefix_cache_hits_created" not in counters

    with serving(Small()) as url:
        asyncio.run(ask(url))


@pytest.mark.parametrize("sizes", [[1], [3], [1000]])
def test_events_are_read_however_they_are_cut(sizes: Sequence[int]) -> None:
    text = b': ping\n\ndata: {"a": 1}\r\n\r\ndata:{"a": "\xc3\xa4"}\n\ndata: [DONE]\n\ndata: {"a": 3}\n\n'

    async def read() -> list[object]:
        async def chunks() -> AsyncIterator[bytes]:
            for begin in range(0, len(text), sizes[0]):
                yield text[begin : begin + sizes[0]]

        return [event["a"] async for event in events(chunks())]

    assert asyncio.run(read()) == [1, "ä"]


def test_a_stream_that_ends_early_is_an_error() -> None:
    async def read() -> None:
        async def chunks() -> AsyncIterator[bytes]:
            yield b'data: {"a": 1}\n\n'

        async for _ in events(chunks()):
            pass

    with pytest.raises(StreamError, match="the stream broke off"):
        asyncio.run(read())


def test_how_much_a_server_keeps_is_read_from_its_metrics() -> None:
    async def ask(url: str) -> int:
        async with connected(url) as api:
            return await api.kv_tokens()

    small = Small()
    with serving(small) as url:
        assert asyncio.run(ask(url)) == 16 * 63, "one block is vLLM's own"
        small.says_its_cache = False
        with pytest.raises(InputError, match="does not say in vllm:cache_config_info how many KV blocks there are"):
            asyncio.run(ask(url))
