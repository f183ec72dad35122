"""Workloads drawn from a seed: lengths by quantiles, arrivals by a process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from kvpolicy.workload.arrivals import ALLOWED_VALUES, MAX_VALUE, MIN_VALUE, Arrivals, AtOnce, stream
from kvpolicy.workload.lengths import Lengths, scale_to
from kvpolicy.workload.requests import Request, Workload, WorkloadError


@dataclass(frozen=True, slots=True)
class SyntheticRequests:
    """``count`` requests, drawn while they are iterated over."""

    lengths: Lengths
    count: int
    seed: int
    arrivals: Arrivals = field(default_factory=AtOnce)
    scale: float = 1.0
    """Factor on both lengths."""
    context_tokens: int | None = None
    """Requests that are longer after scaling lose prompt; None: no request is cut."""

    def __post_init__(self) -> None:
        if self.count < 0:
            raise WorkloadError(f"workload {self.name}: count is {self.count}, should be 0 or more")
        if not MIN_VALUE <= self.scale <= MAX_VALUE:
            raise WorkloadError(f"workload {self.name}: scale is {self.scale}, should be {ALLOWED_VALUES}")
        _check_context(self.context_tokens)

    @property
    def name(self) -> str:
        return self.lengths.name

    @property
    def source(self) -> str:
        return self.lengths.source

    def __iter__(self) -> Iterator[Request]:
        rng = random.Random(self.seed)
        for arrival_s in islice(self.arrivals.times_s(stream(self.seed, "arrivals")), self.count):
            yield _request(self.lengths, rng, self.scale, self.context_tokens, arrival_s)


def all_at_once(
    lengths: Lengths, count: int, seed: int, context_tokens: int, scale: float | None = None, name: str = ""
) -> Workload:
    """``count`` requests that all arrive at time 0.

    Lengths are multiplied by ``scale`` (None: :func:`scale_to` the context); requests still longer than
    ``context_tokens`` lose prompt. Raises WorkloadError for a context below 2 tokens.
    """
    _check_context(context_tokens)
    rng = random.Random(seed)
    factor = scale_to(lengths, context_tokens) if scale is None else scale
    requests = tuple(_request(lengths, rng, factor, context_tokens, 0.0) for _ in range(count))
    return Workload(name or lengths.name, requests, seed, lengths.source)


def _check_context(context_tokens: int | None) -> None:
    if context_tokens is not None and context_tokens < 2:
        raise WorkloadError(f"context_tokens is {context_tokens}: a request takes 2 at least")


def _request(
    lengths: Lengths, rng: random.Random, factor: float, context_tokens: int | None, arrival_s: float
) -> Request:
    prompt, output = lengths.draw(rng)
    prompt_tokens, output_tokens = max(1, round(prompt * factor)), max(1, round(output * factor))
    if context_tokens is not None:
        output_tokens = min(output_tokens, context_tokens - 1)
        prompt_tokens = min(prompt_tokens, context_tokens - output_tokens)
    return Request(arrival_s, prompt_tokens, output_tokens)
