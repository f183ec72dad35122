"""The load of a rate: requests that arrive by a process, or that clients send one after the other.

Called by :mod:`kvpolicy_vllm.bench.rate_kind`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from kvpolicy.bench_settings import RECORDED, RateLoad
from kvpolicy.client import request_body
from kvpolicy.errors import InputError
from kvpolicy.request_marks import DEFAULT_CLASS
from kvpolicy.workload import Request, Resized, SyntheticRequests, Workload, arrivals_at, at_rate, open_workload
from kvpolicy.workload.arrivals import stream
from kvpolicy.workload.lengths import SHAREGPT
from kvpolicy_vllm.bench.chat_load import Server
from kvpolicy_vllm.bench.openai_api import Answer
from kvpolicy_vllm.bench.reservation import Memory, reserved_tokens


def requests_of(load: RateLoad, context_tokens: int, rate: float | None, seed: int) -> list[Request]:
    """The requests of a run, at the times at which they arrive; ``rate``: None for clients that wait.

    Sessions are taken apart: every request is sent by itself. Raises InputError for a workload without requests, and
    WorkloadError for one that cannot be read.
    """
    if load.workload is None:
        drawn = SyntheticRequests(SHAREGPT, load.requests, seed, context_tokens=context_tokens)
        requests = list(drawn)
    else:
        source = open_workload(load.workload)
        requests = [_alone(load, one) for one in islice(Resized(source, 1.0, 1.0, context_tokens), load.requests)]
    if not requests:
        raise InputError(f"workload {load.workload}: has no requests")
    if load.workload is not None and requests[0].arrival_s == requests[-1].arrival_s:
        stream(seed, "order").shuffle(requests)  # of a join, else all of the first part came first
    if rate is None:
        return requests
    if load.arrivals == RECORDED:
        timed = list(at_rate(Workload(str(load.workload), tuple(requests), seed), rate))
        requests = [replace(one, arrival_s=one.arrival_s - timed[0].arrival_s) for one in timed]
    else:
        times_s = arrivals_at(load.arrivals, rate).times_s(stream(seed, "arrivals"))
        requests = [replace(one, arrival_s=at_s) for one, at_s in zip(requests, times_s, strict=False)]
    in_time = [one for one in requests if one.arrival_s <= load.seconds]
    return in_time or requests[:1]


def has_hints(load: RateLoad) -> bool:
    """Whether any request of a run says something of its KV. Raises WorkloadError as :func:`requests_of`."""
    return load.workload is not None and any(one.hints for one in islice(open_workload(load.workload), load.requests))


def _alone(load: RateLoad, request: Request) -> Request:
    if request.loop is not None:
        raise InputError(f"workload {load.workload}: has a concurrency of its own: give --concurrency in its place")
    return replace(request, session="", think_s=None)


def prompt_of(request: Request, number: int, vocabulary: Sequence[int], seed: int) -> list[int]:
    """Token ids of a prompt: blocks that requests share are the same in all of them, the rest is its own."""
    tokens: list[int] = []
    for block in request.prefix:
        if len(tokens) >= request.prompt_tokens:
            break
        tokens += stream(seed, f"block {block}").choices(vocabulary, k=request.prefix_block_tokens)
    del tokens[request.prompt_tokens :]
    return tokens + stream(seed, f"text {number}").choices(vocabulary, k=request.prompt_tokens - len(tokens))


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that was sent, and what came back. Times are seconds since the run's begin."""

    number: int
    request: Request
    due_s: float
    """When it arrived: latency counts from here."""
    lag_s: float
    """How much later than that the client woke up."""
    sent_s: float
    answer: Answer

    @property
    def waited_s(self) -> float:
        """From its arrival until it was sent."""
        return self.sent_s - self.due_s


@dataclass(slots=True)
class RateRun:
    """What one run gave."""

    begin_s: float
    before: dict[str, float]
    """The server's counters at the begin, and at the end."""
    after: dict[str, float] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RateSender:
    """Sends requests to one server. ``salt``: of its cached prefixes. ``memory``: what requests reserve before they are
    sent, by ``reserve``; None where they reserve nothing. ``hints``: whether they carry theirs."""

    server: Server
    vocabulary: Sequence[int]
    seed: int
    salt: str
    clock: Callable[[], float]
    progress: Callable[[], None] = lambda: None
    memory: Memory | None = None
    reserve: str = ""
    context_tokens: int = 0
    hints: bool = False

    async def run(self, requests: Sequence[Request], concurrency: int | None = None) -> RateRun:
        """Send each request when it arrives; with ``concurrency`` so many at a time, the next one when one is back."""
        prompts = [prompt_of(one, number, self.vocabulary, self.seed) for number, one in enumerate(requests)]
        before = await self.server.counters()
        run = RateRun(self.clock(), before)
        jobs = list(zip(range(len(requests)), requests, prompts, strict=True))
        if concurrency is None:
            await asyncio.gather(*(self._arrive(job, run) for job in jobs))
        else:
            waiting = deque(jobs)
            await asyncio.gather(*(self._client(waiting, run) for _ in range(concurrency)))
        run.after = await self.server.counters()
        run.sent.sort(key=lambda one: one.number)
        return run

    async def _arrive(self, job: tuple[int, Request, list[int]], run: RateRun) -> None:
        due_s = job[1].arrival_s
        await asyncio.sleep(max(0.0, run.begin_s + due_s - self.clock()))
        await self._send(job, due_s, run)

    async def _client(self, waiting: deque[tuple[int, Request, list[int]]], run: RateRun) -> None:
        while waiting:
            await self._send(waiting.popleft(), self.clock() - run.begin_s, run)

    async def _send(self, job: tuple[int, Request, list[int]], due_s: float, run: RateRun) -> None:
        number, request, prompt = job
        lag_s = self.clock() - run.begin_s - due_s
        reserved = 0
        if self.memory is not None:
            reserved = await self.memory.reserve(reserved_tokens(self.reserve, request, self.context_tokens))
        try:
            answer = await self.server.complete(
                prompt, request.output_tokens, self.salt, said_by(request, self.hints), request.priority
            )
        finally:
            if self.memory is not None:
                self.memory.release(reserved)
        run.sent.append(Sent(number, request, due_s, lag_s, answer.sent_s - run.begin_s, answer))
        self.progress()


def said_by(request: Request, hints: bool = False) -> dict[str, Any] | None:
    """A request's class and deadlines, and with ``hints`` what it says of its KV, as ``kv_transfer_params``; None where
    that is nothing."""
    name = None if request.class_name == DEFAULT_CLASS else request.class_name
    of_kv = request.hints.said() if hints else {}
    body = request_body(class_name=name, ttft_s=request.ttft_s, tpot_s=request.tpot_s, **of_kv)
    said: dict[str, Any] | None = body.get("kv_transfer_params")
    return said
