"""A small server that speaks the OpenAI API as vLLM does, for tests of the loads that are put on one."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

VOCABULARY = 1000


def next_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """What the model answers: a function of the prompt alone."""
    seed = sum((place + 1) * token for place, token in enumerate(prompt))
    return [(seed + 7 * number) % VOCABULARY for number in range(count)]


@dataclass
class Small:
    """The server. ``fault``: what it does to the request of that number, counted from 0."""

    fault: dict[int, str] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    """Of these requests; empty where one had none."""
    cached: set[tuple[int, ...]] = field(default_factory=set)
    looked_up: int = 0
    found: int = 0
    wrong: bool = False
    """Whether its answers differ from those of other servers."""
    gap: float = 0.25
    """Between the two best log-probabilities."""
    served: int = 0
    says_its_cache: bool = True
    has_plugin: bool = True
    """Whether it shows counters of the plugin's."""
    hinted: dict[str, int] = field(default_factory=dict)
    """Blocks that it counts by event at every request with a pin."""
    unread: tuple[int, ...] = ()
    """Readings of its metrics that fail, counted from 1."""
    readings: int = 0
    at_once: int = 0
    most_at_once: int = 0

    def application(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.add_routes([
            web.get("/v1/models", self.models), web.post("/tokenize", self.tokenize),
            web.post("/v1/completions", self.complete), web.post("/v1/chat/completions", self.complete),
            web.get("/metrics", self.metrics),
        ])  # fmt: skip
        return app

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "small", "max_model_len": 512}]})

    async def tokenize(self, request: web.Request) -> web.Response:
        text = (await request.json())["prompt"]
        return web.json_response({"tokens": [hash_of(word) for word in text.split()]})

    async def metrics(self, request: web.Request) -> web.Response:
        self.readings += 1
        if self.readings in self.unread:
            return web.Response(status=503)
        return web.Response(text=(
            "# HELP vllm:prefix_cache_queries_total tokens\n"
            f'vllm:prefix_cache_queries_total{{engine="0",model_name="small"}} {float(self.looked_up)}\n'
            f'vllm:prefix_cache_hits_total{{engine="0",model_name="small"}} {float(self.found)}\n'
            'vllm:prefix_cache_hits_created{engine="0"} 1.7e9\n'
            + ('vllm:cache_config_info{block_size="16",num_gpu_blocks="64"} 1.0\n' if self.says_its_cache else "") +
            (self.of_plugin() if self.has_plugin else "")
        ))  # fmt: skip

    def of_plugin(self) -> str:
        pins = sum("pin" in body.get("kv_transfer_params", {}).get("kvpolicy", {}) for body in self.bodies)
        hinted = (f'vllm:kvpolicy_hinted_blocks_total{{event="{event}",tier="{tier}"}} {pins * blocks * times}\n'
                  for event, blocks in self.hinted.items() for tier, times in (("host", 1), ("files", 10)))  # fmt: skip
        kinds = (f'vllm:kvpolicy_decisions_total{{kind="{kind}"}} {self.served}\n' for kind in ("swap", "recompute"))
        return "".join((*kinds, *hinted))

    def look_up(self, body: dict[str, Any]) -> None:
        salt, prompt = hash_of(body.get("cache_salt", "")), tuple(prompt_of(body))
        self.looked_up += len(prompt)
        known = (length for length in range(len(prompt), 0, -1) if (salt, *prompt[:length]) in self.cached)
        self.found += next(known, 0)
        self.cached.update((salt, *prompt[:length]) for length in range(1, len(prompt) + 1))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        fault = self.fault.get(number)
        if fault == "status":
            return web.json_response({"error": {"message": "the pool\nis full"}}, status=503)
        self.look_up(body)
        self.served += 1
        tokens = next_tokens(prompt_of(body), body["max_tokens"])
        if self.wrong:
            tokens[-1] = (tokens[-1] + 1) % VOCABULARY
        if not body.get("stream"):
            logprobs = {"top_logprobs": [{"a": -0.5, "b": -0.5 - self.gap}]}
            usage = {"prompt_tokens": len(prompt_of(body))}
            return web.json_response({"choices": [{"logprobs": logprobs}], "usage": usage})
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self.stream(request, tokens[:-1] if fault == "short" else tokens, fault)
        finally:
            self.at_once -= 1

    async def stream(self, request: web.Request, tokens: list[int], fault: str | None) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for place, token in enumerate(tokens):
            await asyncio.sleep(0)
            await response.write(event({"choices": [{"token_ids": [token], "text": "x"}]}))
            if place == 1 and fault == "in the stream":
                await response.write(event({"error": {"message": "it broke"}}))
            if place == 1 and fault == "end":
                assert request.transport is not None
                request.transport.close()
                return response
        if fault != "no end":
            await response.write(b"data: [DONE]\n\n")
        return response


def hash_of(word: str) -> int:
    return sum((place + 1) * ord(letter) for place, letter in enumerate(word)) % VOCABULARY


def prompt_of(body: dict[str, Any]) -> list[int]:
    if "messages" in body:
        return [hash_of(word) for message in body["messages"] for word in message["content"].split()]
    prompt = body["prompt"]
    return [hash_of(word) for word in prompt.split()] if isinstance(prompt, str) else list(prompt)


def event(values: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(values).encode() + b"\n\n"


@contextmanager
def serving(small: Small, port: int = 0) -> Iterator[str]:
    """The server's URL, in a thread of its own. ``port``: 0 for a free one."""
    loop, ready, url = asyncio.new_event_loop(), threading.Event(), []

    async def start() -> web.AppRunner:
        runner = web.AppRunner(small.application(), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        url.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        return runner

    def run() -> None:
        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(30)
        yield url[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
