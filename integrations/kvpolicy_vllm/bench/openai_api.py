"""A live OpenAI server over HTTP: streamed completions with their times, its counters, and its model.

Prompts are token ids and answers are read as token ids, so that lengths are exact and the answers of two servers can be
compared. Needs aiohttp, and no engine.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Any

import aiohttp

from kvpolicy.client import authorization, counters_in
from kvpolicy.errors import InputError, KVPolicyError
from kvpolicy.stored_values import is_number, json_of, list_at, text_at, whole_at

TIMEOUT_S = 3600.0
"""A request that takes longer is an error."""
CACHE, LABEL = "vllm:cache_config_info", re.compile(r'(\w+)="([^"]*)"')
"""The metric whose labels say how large the KV cache is, and what a label looks like."""
MAX_ANSWER_BYTES = 64 << 20
MAX_EVENT_BYTES = 16 << 20
"""Of an answer, and of one event of a stream: vLLM's are some megabytes and some kilobytes."""
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
        except (TimeoutError, aiohttp.ClientError) as failed:
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
            top = list(answer["choices"][0]["logprobs"]["top_logprobs"][0].values())
        except (InputError, LookupError, TypeError, AttributeError):
            return None
        if len(top) < 2 or not all(map(is_number, top)):
            return None
        best, second = sorted(map(float, top), reverse=True)[:2]
        return best - second if isfinite(best - second) else None

    async def describe(self) -> tuple[str, int | None]:
        """The served model's name, and its context in tokens where the server says so. Raises InputError."""
        answer = await self._json("GET", "/v1/models")
        with self._answering("/v1/models"):
            models = list_at(answer, "data")
            if not models:
                raise InputError("serves no model")
            has_context = isinstance(models[0], dict) and models[0].get("max_model_len") is not None
            return text_at(models[0], "id"), whole_at(models[0], "max_model_len") if has_context else None

    async def tokenize(self, text: str) -> list[int]:
        """At least one token. Raises InputError where the server has no tokenizer."""
        answer = await self._json(
            "POST", "/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False}
        )
        with self._answering("/tokenize"):
            tokens = list_at(answer, "tokens")
            if not tokens or not all(type(token_id) is int for token_id in tokens):
                raise InputError("its tokens should be whole numbers, one at least")
            return tokens

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
        if tokens <= 0:
            raise InputError(f"{self.url}/metrics does not say in {CACHE} how many KV blocks there are")
        return tokens

    async def metrics(self) -> str:
        """The text of ``/metrics``. Raises InputError where it cannot be read."""
        try:
            async with self._session.get(f"{self.url}/metrics") as response:
                await refuse_status(response)
                return (await content_of(response)).decode(errors="replace")
        except (TimeoutError, aiohttp.ClientError, StreamError) as error:
            raise InputError(f"{self.url}/metrics cannot be read: {error}") from error

    async def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        with self._answering(path):
            async with self._session.request(method, f"{self.url}{path}", json=body) as response:
                await refuse_status(response)
                return json_of(await content_of(response))

    @contextmanager
    def _answering(self, path: str) -> Iterator[None]:
        """Raises InputError with the address for whatever is wrong with an answer."""
        try:
            yield
        except (TimeoutError, aiohttp.ClientError, ValueError) as error:
            raise InputError(f"{self.url}{path} does not answer as an OpenAI server: {error}") from error


@asynccontextmanager
async def connected(url: str, clock: Callable[[], float] = time.monotonic) -> AsyncIterator[Api]:
    """A server at ``url``, by the name of the model that it serves. Where the environment has OPENAI_API_KEY, requests
    carry it. Raises InputError where none answers."""
    # As many connections as there are requests, each used once: a server closes idle ones after some seconds, and a
    # request that is sent at that moment would fail.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=30.0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=authorization()) as session:
        api = Api(url, session, clock=clock)
        api.model, _ = await api.describe()
        yield api


async def refuse_status(response: aiohttp.ClientResponse) -> None:
    """Raise StreamError, with the server's message, for a status that is no success."""
    if response.status < 400:
        return
    text = (await content_of(response)).decode(errors="replace")
    try:
        said = json_of(text)
        message = str(said.get("error", said).get("message", text))
    except (InputError, AttributeError):
        message = text
    raise StreamError(f"HTTP {response.status}: {' '.join(message.split())[:MESSAGE_LETTERS]}")


async def content_of(response: aiohttp.ClientResponse) -> bytes:
    """The whole answer. Raises StreamError where it is larger than :data:`MAX_ANSWER_BYTES`."""
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > MAX_ANSWER_BYTES:
            raise StreamError(f"has more than {MAX_ANSWER_BYTES:,} bytes, which is the most that is read")
        parts.append(part)
    return b"".join(parts)


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to ``[DONE]``.

    Raises StreamError where the stream reports an error, has an event that is none, or ends without ``[DONE]``.
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
            event = _event(data)
            if "error" in event:
                said = event["error"]
                message = said.get("message", said) if isinstance(said, dict) else said
                raise StreamError(f"in the stream: {' '.join(str(message).split())[:MESSAGE_LETTERS]}")
            yield event
        if len(buffer) > MAX_EVENT_BYTES:
            raise StreamError(f"in the stream: an event has more than {MAX_EVENT_BYTES:,} bytes")
    raise StreamError("the stream broke off")


def _event(data: bytes) -> Mapping[str, Any]:
    try:
        event = json_of(data)
    except InputError as error:
        raise StreamError(f"in the stream: an event {error}"[:MESSAGE_LETTERS]) from None
    if not isinstance(event, dict):
        raise StreamError("in the stream: an event is no object")
    return event


def _token_ids(event: Mapping[str, Any]) -> list[int]:
    """Of all choices. Raises StreamError for what is no token id."""
    try:
        found = [token_id for choice in event.get("choices") or () for token_id in choice.get("token_ids") or ()]
    except (TypeError, AttributeError):
        found = [None]
    if not all(type(token_id) is int for token_id in found):
        raise StreamError("in the stream: token_ids should be a list of whole numbers")
    return found
