"""A live OpenAI server over HTTP: streamed completions with their times, its counters, and its model.

Prompts are token ids and answers are read as token ids, so that lengths are exact and the answers of two servers can be
compared. Needs aiohttp, and no engine.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvpolicy.client import counters_in
from kvpolicy.errors import InputError, KVPolicyError

TIMEOUT_S = 3600.0
"""A request that takes longer is an error."""
CACHE, LABEL = "vllm:cache_config_info", re.compile(r'(\w+)="([^"]*)"')
"""The metric whose labels say how large the KV cache is, and what a label looks like."""
MESSAGE_LETTERS = 160
"""Letters of a server's error message that are kept."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request and what came back."""

    sent_s: float
    """By the clock."""
    ttft_s: float | None
    """From sending to the first token; None without one."""
    e2e_s: float
    """From sending to the end of the stream, or to the error."""
    token_ids: tuple[int, ...]
    error: str = ""
    """What went wrong; empty where nothing did."""
    token_s: tuple[float, ...] = ()
    """From sending to each token; those of one event of the stream have one time."""

    @property
    def end_s(self) -> float:
        return self.sent_s + self.e2e_s


class StreamError(KVPolicyError):
    """The server's stream said so, or ended before it was complete."""


class Api:
    """One server. ``clock``: seconds, by which answers are timed."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, model: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._session = session
        self._clock = clock

    async def complete(
        self,
        prompt: Sequence[int],
        output_tokens: int,
        salt: str = "",
        said: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> Answer:
        """Ask for exactly so many greedy tokens. Never raises for what a server or a network does: see ``error``.

        ``salt``: requests with different ones share no cached prefix. ``said``: of ``kv_transfer_params``.
        ``priority``: lower goes first; sent unless it is 0.
        """
        body = self._body(prompt, output_tokens, salt) | ({"kv_transfer_params": dict(said)} if said else {})
        body |= {"priority": priority} if priority else {}
        sent_s, error = self._clock(), ""
        token_ids: list[int] = []
        token_s: list[float] = []
        try:
            async with self._session.post(f"{self.url}/v1/completions", json=body) as response:
                await refuse_status(response)
                async for event in events(response.content.iter_any()):
                    new = _token_ids(event)
                    token_s += [self._clock() - sent_s] * len(new)
                    token_ids += new
            if len(token_ids) != output_tokens:
                error = "fewer or more tokens than asked for"
        except StreamError as failed:
            error = str(failed)
        except (TimeoutError, aiohttp.ClientError, json.JSONDecodeError) as failed:
            error = f"{type(failed).__name__}: {failed}"[:MESSAGE_LETTERS]
        end_s = self._clock()
        first_s = token_s[0] if token_s else None
        return Answer(sent_s, first_s, end_s - sent_s, tuple(token_ids), error, tuple(token_s))

    def _body(self, prompt: Sequence[int], output_tokens: int, salt: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        return body | ({"cache_salt": salt} if salt else {})

    async def gap(self, prompt: Sequence[int]) -> float | None:
        """The best log-probability of the next token minus the second best; None where the server does not say."""
        body = self._body(prompt, 1, "") | {"stream": False, "logprobs": 2}
        try:
            answer = await self._json("POST", "/v1/completions", body)
            top = sorted(answer["choices"][0]["logprobs"]["top_logprobs"][0].values(), reverse=True)
        except (InputError, LookupError, TypeError, AttributeError):
            return None
        return float(top[0] - top[1]) if len(top) > 1 else None

    async def describe(self) -> tuple[str, int | None]:
        """The served model's name, and its context in tokens where the server says so. Raises InputError."""
        models = (await self._json("GET", "/v1/models"))["data"]
        if not models:
            raise InputError(f"{self.url} serves no model")
        return str(models[0]["id"]), models[0].get("max_model_len")

    async def tokenize(self, text: str) -> list[int]:
        """Raises InputError where the server has no tokenizer."""
        answer = await self._json(
            "POST", "/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False}
        )
        return [int(token_id) for token_id in answer["tokens"]]

    async def counters(self) -> dict[str, float]:
        """The counters that :data:`kvpolicy.client.COUNTED` names, each summed over its labels. Raises InputError."""
        return counters_in(await self.metrics())

    async def kv_tokens(self) -> int:
        """Tokens that the server's KV cache holds, over its engine cores, each of which keeps a block for itself.

        Raises InputError where the server does not say.
        """
        tokens = 0
        for line in (await self.metrics()).splitlines():
            if line.startswith(f"{CACHE}{{"):
                labels = dict(LABEL.findall(line))
                try:
                    tokens += (int(labels["num_gpu_blocks"]) - 1) * int(labels["block_size"])
                except (KeyError, ValueError):
                    break
        if not tokens:
            raise InputError(f"{self.url}/metrics does not say in {CACHE} how many KV blocks there are")
        return tokens

    async def metrics(self) -> str:
        """The text of ``/metrics``. Raises InputError where it cannot be read."""
        try:
            async with self._session.get(f"{self.url}/metrics") as response:
                await refuse_status(response)
                return str(await response.text())
        except (TimeoutError, aiohttp.ClientError, StreamError) as error:
            raise InputError(f"{self.url}/metrics cannot be read: {error}") from error

    async def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            async with self._session.request(method, f"{self.url}{path}", json=body) as response:
                await refuse_status(response)
                return dict(await response.json())
        except (TimeoutError, aiohttp.ClientError, StreamError, ValueError) as error:
            raise InputError(f"{self.url}{path} does not answer as an OpenAI server: {error}") from error


@asynccontextmanager
async def connected(url: str, clock: Callable[[], float] = time.monotonic) -> AsyncIterator[Api]:
    """A server at ``url``, by the name of the model that it serves. Raises InputError where none answers."""
    # As many connections as there are requests, each used once: a server closes idle ones after some seconds, and a
    # request that is sent at that moment would fail.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=30.0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        api = Api(url, session, clock=clock)
        api.model, _ = await api.describe()
        yield api


async def refuse_status(response: aiohttp.ClientResponse) -> None:
    """Raise StreamError, with the server's message, for a status that is no success."""
    if response.status < 400:
        return
    text = await response.text()
    try:
        said = json.loads(text)
        message = str(said.get("error", said).get("message", text))
    except (ValueError, AttributeError):
        message = text
    raise StreamError(f"HTTP {response.status}: {' '.join(message.split())[:MESSAGE_LETTERS]}")


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to ``[DONE]``.

    Raises StreamError where the stream reports an error or ends without ``[DONE]``.
    """
    buffer = b""
    async for chunk in chunks:
        buffer += chunk
        while b"\n" in buffer:
            line, buffer = buffer.split(b"\n", 1)
            data = line.strip().removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            if not data or not line.startswith(b"data:"):
                continue
            event = json.loads(data)
            if "error" in event:
                said = event["error"]
                message = said.get("message", said) if isinstance(said, dict) else said
                raise StreamError(f"in the stream: {' '.join(str(message).split())[:MESSAGE_LETTERS]}")
            yield event
    raise StreamError("the stream broke off")


def _token_ids(event: Mapping[str, Any]) -> list[int]:
    choices = event.get("choices") or ()
    return [token_id for choice in choices for token_id in choice.get("token_ids") or ()]
