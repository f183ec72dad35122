"""An engine that only schedules, as far as the plugin sees it: requests, outputs of steps and when tokens come."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass(eq=False)
class Request:
    """As much of vLLM's as is asked for."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    placeholders: int = 0
    """Tokens of steps in flight."""
    generation: int = 0
    """How often it lost its blocks."""
    stale: int = 0
    """Tokens in flight from before it lost its blocks; it does not come back before they have."""
    dropped: bool = False
    """Whether such tokens are thrown away instead, as at a reset."""

    @property
    def known(self) -> int:
        return self.prompt_tokens + self.num_output_tokens + self.placeholders


@dataclass
class Flight:
    """A scheduled step whose output is not back."""

    output: Any
    sampled: dict[str, int]
    """Who gets a token of it, and in which generation."""


@dataclass
class Engine:
    """``depth``: steps in flight. Draws arrivals, chunks, pauses, preemptions and aborts."""

    rng: random.Random
    depth: int
    arrived: Callable[[Request, float], None] = lambda request, now: None
    ended: Callable[[Request, float], None] = lambda request, now: None
    preempted: Callable[[Request], None] = lambda request: None
    done: Callable[[Any, dict[str, Request], float], None] = lambda output, requests, now: None
    requests: dict[str, Request] = field(default_factory=dict)
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    flying: deque[Flight] = field(default_factory=deque)
    now: float = 0.0
    _count: int = 0
    _known: set[str] = field(default_factory=set)
    """Who was scheduled before: not a new request to the workers."""

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.now += self.rng.choice((0.25, 1.0))
            self._disturb()
            self.flying.append(self.schedule())
            if len(self.flying) == self.depth:
                self._update(self.flying.popleft())
        while self.flying:
            self._update(self.flying.popleft())
        for request in list(self.requests.values()):
            self._end(request)

    def schedule(self) -> Flight:
        for request in [one for one in self.waiting if not one.stale and self.rng.random() < 0.5]:
            self.waiting.remove(request)
            self.running.append(request)
        scheduled: dict[str, int] = {}
        sampled: dict[str, int] = {}
        new, cached = [], []
        for request in self.running:
            left = request.known - request.num_computed_tokens
            if (
                self.rng.random() < 0.1
                or left <= 0
                or request.num_output_tokens + request.placeholders >= request.max_tokens
            ):
                continue
            name, tokens = request.request_id, left if self.rng.random() < 0.7 else self.rng.randint(1, left)
            scheduled[name] = tokens
            if name not in self._known:
                self._known.add(name)
                new.append(SimpleNamespace(req_id=name, num_computed_tokens=request.num_computed_tokens))
            else:
                cached.append((name, request.num_computed_tokens))
            if tokens == left:
                sampled[name] = request.generation
                request.placeholders += 1
            request.num_computed_tokens += tokens
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[name for name, _ in cached],
                num_computed_tokens=[begin for _, begin in cached],
            ),
        )
        return Flight(output, sampled)

    def _update(self, flight: Flight) -> None:
        self.now += 0.5
        for name, generation in flight.sampled.items():
            request = self.requests.get(name)
            if request is None:
                continue
            if request.generation == generation:
                request.placeholders -= 1
            elif request.dropped:
                continue
            else:
                request.stale -= 1
            request.num_output_tokens += 1
            if request.num_output_tokens >= request.max_tokens or self.rng.random() < 0.03:
                self._end(request)
        self.done(flight.output, self.requests, self.now)

    def _disturb(self) -> None:
        if self.rng.random() < 0.3:
            self._count += 1
            request = Request(f"r{self._count}", self.rng.randint(1, 40), self.rng.randint(1, 30))
            self.requests[request.request_id] = request
            self.waiting.append(request)
            self.arrived(request, self.now)
        if self.running and self.rng.random() < 0.15:
            request = self.rng.choice(self.running)
            self.preempted(request)
            self.running.remove(request)
            request.dropped = self.rng.random() < 0.5
            request.stale += 0 if request.dropped else request.placeholders
            request.num_computed_tokens, request.placeholders = 0, 0
            request.generation += 1
            self.waiting.append(request)
        if self.requests and self.rng.random() < 0.05:
            self._end(self.rng.choice(list(self.requests.values())))

    def _end(self, request: Request) -> None:
        del self.requests[request.request_id]
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self.ended(request, self.now)
