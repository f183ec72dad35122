"""Sources derived from other sources while they are read: other speed, rate or lengths, or a part of the requests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from kvpolicy.workload.arrivals import ALLOWED_VALUES, MAX_VALUE, MIN_VALUE
from kvpolicy.workload.files import Counts
from kvpolicy.workload.requests import Request, Source, WorkloadError

MAX_DEVIATION = 0.01
"""Largest relative deviation of a prefix block's factor, after rounding, from the requested one."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """Base class: holds the original source."""

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
        if not MIN_VALUE <= self.factor <= MAX_VALUE:
            raise WorkloadError(f"{self.inner.name}: speed is {self.factor}, should be {ALLOWED_VALUES}")

    @property
    def name(self) -> str:
        return f"{self.inner.name},speed={self.factor:.6g}"

    def __iter__(self) -> Iterator[Request]:
        for request in self.inner:
            think_s = None if request.think_s is None else request.think_s / self.factor
            yield replace(request, arrival_s=request.arrival_s / self.factor, think_s=think_s)


def at_rate(source: Source, rate_per_s: float) -> Faster:
    """The source at a mean rate: the number of gaps over the time from first to last arrival.

    Reads the source once. Raises :class:`WorkloadError` where it has no rate: fewer than two arrivals, all at once, or
    a closed loop, whose rate depends on the server.
    """
    if not MIN_VALUE <= rate_per_s <= MAX_VALUE:
        raise WorkloadError(f"{source.name}: rate is {rate_per_s}, should be {ALLOWED_VALUES}")
    count, first_s, last_s = 0, 0.0, 0.0
    for request in source:
        if request.think_s is not None or request.loop is not None:
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

    A request longer than ``context_tokens`` loses the end of its prompt; an output longer than the context less one
    token is cut to that. Prefix blocks are scaled as a whole, so that requests still share what they shared: at a
    factor of 0.3 a block of 512 becomes one of 154, and prompts are scaled alike (by 0.3008). Raises
    :class:`WorkloadError` where this deviates by over 1% from the requested factor.
    """

    prompt_factor: float = 1.0
    output_factor: float = 1.0
    context_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("prompt", self.prompt_factor), ("output", self.output_factor)):
            if not MIN_VALUE <= value <= MAX_VALUE:
                raise WorkloadError(
                    f"{self.inner.name}: the factor on {name} lengths (scale, {name}) is {value}, "
                    f"should be {ALLOWED_VALUES}"
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
        block, new_block = request.prefix_block_tokens, self._block(request.prefix_block_tokens)
        prefix_tokens = min(request.prompt_tokens, len(request.prefix) * block)
        full, rest = divmod(prefix_tokens, block)
        prompt = (
            full * new_block
            + math.ceil(rest * new_block / block)
            + round((request.prompt_tokens - prefix_tokens) * self.prompt_factor)
        )
        # Ids past the prompt name output tokens. With a factor of their own these move relative to the next prompt,
        # so such ids are valid only where prompt and output are scaled alike.
        same_factor = self.prompt_factor == self.output_factor
        if same_factor and len(request.prefix) * block >= request.total_tokens:
            total, remainder = divmod(request.total_tokens, block)
            output = max(1, total * new_block + math.ceil(remainder * new_block / block) - prompt)
        prefix = request.prefix if same_factor else request.prefix[: -(-prefix_tokens // block)]
        return replace(
            request, prompt_tokens=prompt, output_tokens=output, prefix=prefix, prefix_block_tokens=new_block
        )

    def _block(self, tokens: int) -> int:
        new_tokens = round(tokens * self.prompt_factor)
        if new_tokens < 1 or abs(new_tokens / tokens / self.prompt_factor - 1) > MAX_DEVIATION:
            below, above = max(1, math.floor(tokens * self.prompt_factor)), math.ceil(tokens * self.prompt_factor)
            raise WorkloadError(
                f"{self.inner.name}: prompts share blocks of {tokens} tokens, which a factor of {self.prompt_factor:g} "
                f"makes no whole number; {below / tokens:.6g} and {above / tokens:.6g} do"
            )
        return new_tokens

    def _cut(self, request: Request) -> Request:
        if self.context_tokens is None or request.total_tokens <= self.context_tokens:
            return request
        output = min(request.output_tokens, self.context_tokens - 1)
        prompt = min(request.prompt_tokens, self.context_tokens - output)
        if not request.prefix:
            return replace(request, prompt_tokens=prompt, output_tokens=output)
        # After a cut prompt, ids past it no longer name the tokens that follow.
        prefix = request.prefix[: -(-prompt // request.prefix_block_tokens)]
        return replace(request, prompt_tokens=prompt, output_tokens=output, prefix=prefix)


def lengthening(source: Source) -> float:
    """By what the outputs of a source are longer, for the lengths of its prompts, than it was recorded with: the
    prompts of a session hold its earlier outputs as they were recorded."""
    longer = 1.0
    while isinstance(source, Scaled):
        if isinstance(source, Resized):
            longer *= source.output_factor / source.prompt_factor
        source = source.inner
    return longer


@dataclass(frozen=True, slots=True)
class Window(Scaled):
    """Requests that arrive from ``start_s`` on and before ``end_s``, at times counted from ``start_s``.

    A session that is only partly inside begins, without a pause, with its first request inside. In a closed loop the
    earliest possible arrivals decide.
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
        open_sessions: set[str] = set()
        for request in self.inner:
            if request.arrival_s >= self.end_s:
                return
            if request.arrival_s < self.start_s:
                continue
            think_s = request.think_s if request.session in open_sessions else None
            if request.session:
                open_sessions.add(request.session)
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
    """Counts of the file's rows under a source, in its latest iteration; None where there is no file."""
    while isinstance(source, Scaled):
        source = source.inner
    counts = getattr(source, "counts", None)
    return counts if isinstance(counts, Counts) else None
