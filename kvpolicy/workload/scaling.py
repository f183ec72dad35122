"""The same requests sooner, longer, or fewer of them; each made of a source as it is read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from kvpolicy.workload.arrivals import LEAST, MOST, WITHIN
from kvpolicy.workload.files import Counts
from kvpolicy.workload.requests import Request, Source, WorkloadError

NEAR = 0.01
"""How far, as a share, a prefix block's own factor may be from the one that was asked for."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """What all of them share: the source they are made of."""

    inner: Source

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def source(self) -> str:
        return self.inner.source

    @property
    def seed(self) -> int:
        return self.inner.seed


@dataclass(frozen=True, slots=True)
class Faster(Scaled):
    """All times divided by a factor: arrivals and, in sessions, pauses."""

    factor: float

    def __post_init__(self) -> None:
        if not LEAST <= self.factor <= MOST:
            raise WorkloadError(f"{self.inner.name}: speed is {self.factor}, should be {WITHIN}")

    @property
    def name(self) -> str:
        return f"{self.inner.name},speed={self.factor:.6g}"

    def __iter__(self) -> Iterator[Request]:
        for request in self.inner:
            think_s = None if request.think_s is None else request.think_s / self.factor
            yield replace(request, arrival_s=request.arrival_s / self.factor, think_s=think_s)


def at_rate(source: Source, rate_per_s: float) -> Faster:
    """The source at a mean rate: its gaps' number over the time from the first arrival to the last.

    Reads the source once. Raises :class:`WorkloadError` where it has no such rate: fewer than two arrivals, all at
    once, or a closed loop, whose rate is what the server makes of it.
    """
    if not LEAST <= rate_per_s <= MOST:
        raise WorkloadError(f"{source.name}: rate is {rate_per_s}, should be {WITHIN}")
    count, first_s, last_s = 0, 0.0, 0.0
    for request in source:
        if request.think_s is not None:
            raise WorkloadError(
                f"{source.name}: a closed loop has no rate of its own; give speed, or when sessions start"
            )
        first_s, last_s = (first_s if count else request.arrival_s), request.arrival_s
        count += 1
    if last_s <= first_s:
        raise WorkloadError(f"{source.name}: {count} requests, none later than the first: no rate to scale")
    return Faster(source, rate_per_s * (last_s - first_s) / (count - 1))


@dataclass(frozen=True, slots=True)
class Resized(Scaled):
    """Lengths multiplied, rounded to the nearest whole number (1 at least), and cut to a context.

    What is longer than ``context_tokens`` loses prompt, from its end; only where the output alone is longer than the
    context less one, the output is cut to that. Prefix blocks are scaled whole, so that requests share what they
    shared: a block of 512 at a factor of 0.3 becomes one of 154, and prompts follow (0.3008). Raises
    :class:`WorkloadError` where that is over 1% from the factor asked for.
    """

    prompt_factor: float = 1.0
    output_factor: float = 1.0
    context_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("prompt", self.prompt_factor), ("output", self.output_factor)):
            if not LEAST <= value <= MOST:
                raise WorkloadError(
                    f"{self.inner.name}: the factor on {name} lengths (scale, {name}) is {value}, should be {WITHIN}"
                )
        if self.context_tokens is not None and self.context_tokens < 2:
            raise WorkloadError(f"{self.inner.name}: context is {self.context_tokens}: a request takes 2 at least")

    @property
    def name(self) -> str:
        parts = [self.inner.name]
        parts += [f"prompt={self.prompt_factor:.6g}"] if self.prompt_factor != 1 else []
        parts += [f"output={self.output_factor:.6g}"] if self.output_factor != 1 else []
        parts += [f"context={self.context_tokens}"] if self.context_tokens is not None else []
        return ",".join(parts)

    def __iter__(self) -> Iterator[Request]:
        for request in self.inner:
            yield self._cut(self._scaled(request))

    def _scaled(self, request: Request) -> Request:
        if self.prompt_factor == self.output_factor == 1:
            return request
        output = max(1, round(request.output_tokens * self.output_factor))
        if not request.prefix:
            prompt = max(1, round(request.prompt_tokens * self.prompt_factor))
            return replace(request, prompt_tokens=prompt, output_tokens=output)
        old, new = request.prefix_block_tokens, self._block(request.prefix_block_tokens)
        named = min(request.prompt_tokens, len(request.prefix) * old)
        full, rest = divmod(named, old)
        prompt = full * new + math.ceil(rest * new / old) + round((request.prompt_tokens - named) * self.prompt_factor)
        # Ids past the prompt name output tokens, which a factor of their own puts elsewhere than the next prompt has
        # them: they are kept only where all of the request is scaled alike.
        alike = self.prompt_factor == self.output_factor
        if alike and len(request.prefix) * old >= request.total_tokens:
            total, over = divmod(request.total_tokens, old)
            output = max(1, total * new + math.ceil(over * new / old) - prompt)
        kept = request.prefix if alike else request.prefix[: -(-named // old)]
        return replace(request, prompt_tokens=prompt, output_tokens=output, prefix=kept, prefix_block_tokens=new)

    def _block(self, tokens: int) -> int:
        new = round(tokens * self.prompt_factor)
        if new < 1 or abs(new / tokens / self.prompt_factor - 1) > NEAR:
            below, above = max(1, math.floor(tokens * self.prompt_factor)), math.ceil(tokens * self.prompt_factor)
            raise WorkloadError(
                f"{self.inner.name}: prompts share blocks of {tokens} tokens, which a factor of {self.prompt_factor:g} "
                f"makes no whole number; {below / tokens:.6g} and {above / tokens:.6g} do"
            )
        return new

    def _cut(self, request: Request) -> Request:
        if self.context_tokens is None or request.total_tokens <= self.context_tokens:
            return request
        output = min(request.output_tokens, self.context_tokens - 1)
        prompt = min(request.prompt_tokens, self.context_tokens - output)
        if not request.prefix:
            return replace(request, prompt_tokens=prompt, output_tokens=output)
        # What follows a cut prompt is no longer what the ids past it said.
        kept = request.prefix[: -(-prompt // request.prefix_block_tokens)]
        return replace(request, prompt_tokens=prompt, output_tokens=output, prefix=kept)


@dataclass(frozen=True, slots=True)
class Window(Scaled):
    """Requests that arrive from ``start_s`` on and before ``end_s``, at times counted from ``start_s``.

    A session of which only the later part is inside begins, without a pause, where that part begins. In a closed loop
    it is the earliest possible arrivals that are inside.
    """

    start_s: float
    end_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.start_s < self.end_s:
            raise WorkloadError(f"{self.inner.name}: window {self.start_s}-{self.end_s}: should be 0 <= start < end")

    @property
    def name(self) -> str:
        return f"{self.inner.name},window={self.start_s:g}-{self.end_s:g}"

    def __iter__(self) -> Iterator[Request]:
        begun: set[str] = set()
        for request in self.inner:
            if request.arrival_s >= self.end_s:
                return
            if request.arrival_s < self.start_s:
                continue
            think_s = request.think_s if request.session in begun else None
            if request.session:
                begun.add(request.session)
            yield replace(request, arrival_s=request.arrival_s - self.start_s, think_s=think_s)


@dataclass(frozen=True, slots=True)
class First(Scaled):
    """The first ``count`` requests."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise WorkloadError(f"{self.inner.name}: n is {self.count}, should be 0 or more")

    @property
    def name(self) -> str:
        return f"{self.inner.name},n={self.count}"

    def __iter__(self) -> Iterator[Request]:
        return islice(iter(self.inner), self.count)


def counts_of(source: Source) -> Counts | None:
    """What became of the rows of the file under a source, in its latest iteration; None where there is no file."""
    while isinstance(source, Scaled):
        source = source.inner
    counts = getattr(source, "counts", None)
    return counts if isinstance(counts, Counts) else None
