"""Workloads made from a seed: lengths drawn from quantiles, arriving by a process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from kvpolicy.workload.arrivals import LEAST, MOST, WITHIN, Arrivals, AtOnce, stream
from kvpolicy.workload.lengths import Lengths, scale_to
from kvpolicy.workload.requests import Request, Workload, WorkloadError


@dataclass(frozen=True, slots=True)
class Drawn:
    """``count`` requests, made as they are asked for."""

    lengths: Lengths
    count: int
    seed: int
    arrivals: Arrivals = field(default_factory=AtOnce)
    scale: float = 1.0
    """Factor on both lengths."""
    context_tokens: int | None = None
    """What is longer after scaling loses prompt; None: nothing is cut."""

    def __post_init__(self) -> None:
        if self.count < 0:
            raise WorkloadError(f"workload {self.name}: count is {self.count}, should be 0 or more")
        if not LEAST <= self.scale <= MOST:
            raise WorkloadError(f"workload {self.name}: scale is {self.scale}, should be {WITHIN}")
        _room(self.context_tokens)

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

    Lengths are multiplied by ``scale`` (None: :func:`scale_to` the context); what is still longer than
    ``context_tokens`` loses prompt. Raises ValueError for a context that holds no request.
    """
    _room(context_tokens)
    rng = random.Random(seed)
    factor = scale_to(lengths, context_tokens) if scale is None else scale
    requests = tuple(_request(lengths, rng, factor, context_tokens, 0.0) for _ in range(count))
    return Workload(name or lengths.name, requests, seed, lengths.source)


def _room(context_tokens: int | None) -> None:
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
