"""Workloads: requests to serve, by arrival and length. Made from a seed and the length quantiles of public traces."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Protocol

LEVELS = (0.0, 0.01, *(percent / 100 for percent in range(5, 100, 5)), 0.99, 1.0)
"""Where the quantiles of :class:`Lengths` are taken: every 5%, the ends and the 1% tails."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request to serve."""

    arrival_s: float
    """Since the workload's start."""
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    """Ids of the prompt's leading blocks, each of ``prefix_block_tokens`` tokens, the last one perhaps partly filled.
    Requests whose ids are equal up to some block share every token up to there; without ids they share none."""
    prefix_block_tokens: int = 0
    session: str = ""
    """Requests of one session follow each other; empty where there is none."""
    think_s: float | None = None
    """Where set, it arrives this long after the request before it in its session has finished, and not before
    ``arrival_s``; None where ``arrival_s`` alone says when."""
    priority: int = 0
    """Lower goes first, as in vLLM; only under priority scheduling."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


class Source(Protocol):
    """Requests in the order of ``arrival_s``, read anew at every iteration; perhaps more than memory holds."""

    @property
    def name(self) -> str: ...

    @property
    def source(self) -> str:
        """Where they come from, with licence."""
        ...

    @property
    def seed(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their arrival, and what they were made from."""

    name: str
    requests: tuple[Request, ...]
    seed: int
    """What the requests were drawn from; whoever needs their text draws it from the same seed."""
    source: str = ""
    """Where the lengths come from, with licence."""

    def __post_init__(self) -> None:
        arrivals = [request.arrival_s for request in self.requests]
        if arrivals != sorted(arrivals) or (arrivals and arrivals[0] < 0):
            raise ValueError(f"workload {self.name}: arrival_s should rise and not be negative")
        for number, request in enumerate(self.requests):
            if request.prompt_tokens < 1 or request.output_tokens < 1:
                raise ValueError(f"workload {self.name}, request {number}: {request}: both lengths should be 1 or more")

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)

    @property
    def longest_tokens(self) -> int:
        """Prompt and output of the longest request together; 0 without requests."""
        return max((request.total_tokens for request in self.requests), default=0)

    def arriving(self, arrivals_s: Sequence[float]) -> Workload:
        """The same requests at other times. Raises ValueError unless there is a time for each."""
        pairs = zip(self.requests, arrivals_s, strict=True)
        return replace(self, requests=tuple(replace(request, arrival_s=at) for request, at in pairs))

    def first(self, count: int) -> Workload:
        """Its first ``count`` requests."""
        return replace(self, requests=self.requests[:count])


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt and output lengths as quantiles at :data:`LEVELS`; the two are drawn independently."""

    name: str
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    source: str

    def __post_init__(self) -> None:
        for values in (self.prompt_tokens, self.output_tokens):
            if len(values) != len(LEVELS) or list(values) != sorted(values):
                raise ValueError(f"lengths {self.name}: {len(LEVELS)} rising quantiles are needed, got {values}")

    def draw(self, rng: random.Random) -> tuple[float, float]:
        """Prompt and output tokens of one request, by inversion: linear between the quantiles."""
        prompt_at, output_at = rng.random(), rng.random()
        return quantile(self.prompt_tokens, prompt_at), quantile(self.output_tokens, output_at)

    def mean_tokens(self) -> tuple[float, float]:
        """Mean of what :meth:`draw` gives: the trapezoids under the quantiles."""
        return _area(self.prompt_tokens), _area(self.output_tokens)


AZURE_CONVERSATION = Lengths(
    "azure-conversation-2023",
    prompt_tokens=(
        *(2, 39, 181, 310, 379, 389, 398, 406, 426, 944, 1009, 1033),
        *(1055, 1080, 1106, 1142, 1204, 1322, 2221, 4076, 4086, 4123, 14050),
    ),
    output_tokens=(
        *(7, 16, 38, 49, 60, 71, 80, 87, 93, 100, 110, 134),
        *(162, 198, 374, 390, 396, 403, 414, 427, 460, 610, 1000),
    ),
    source=(
        "quantiles of the first 1800 s (10,108 requests) of AzureLLMInferenceTrace_conv.csv, "
        "Azure/AzurePublicDataset, CC-BY-4.0"
    ),
)
"""Conversations; rank correlation of prompt and output 0.03, variation of the times between arrivals 1.07."""

SHAREGPT = Lengths(
    "sharegpt-8k",
    prompt_tokens=(
        *(1, 12, 28, 73, 176, 384, 591, 784, 981, 1214, 1469, 1739),
        *(2068, 2408, 2811, 3236, 3737, 4291, 4918, 5696, 6560, 7420, 8141),
    ),
    output_tokens=(
        *(2, 6, 43, 84, 130, 180, 228, 272, 313, 347, 381, 414),
        *(453, 493, 534, 583, 629, 687, 756, 834, 920, 997, 1024),
    ),
    source=(
        "quantiles of every second row (15,366 requests) of the ShareGPT lengths (Llama-2 tokens, 8K context) of "
        "project-etalon/etalon, Apache-2.0"
    ),
)
"""Conversations sent with their whole history; rank correlation of prompt and output 0.05."""

DEEPSEEK_R1 = Lengths(
    "deepseek-r1",
    prompt_tokens=(
        *(4, 9, 12, 15, 18, 22, 27, 30, 39, 51, 65, 84),
        *(114, 171, 210, 234, 387, 436, 1019, 2419, 6876, 22876, 54954),
    ),
    output_tokens=(
        *(9, 150, 247, 343, 413, 473, 548, 662, 812, 966, 1106, 1223),
        *(1324, 1425, 1538, 1702, 2029, 2686, 3538, 4721, 6993, 13482, 32768),
    ),
    source=(
        "quantiles of the first 12 h of data/reason/deepseek-r1 of alibaba/ServeGen, Apache-2.0: its clients' length "
        "distributions weighted by their rates"
    ),
)
"""Reasoning: short questions, long answers. Memory grows while requests run, which is what brings preemptions."""


def quantile(values: Sequence[float], level: float) -> float:
    """The value at ``level``, 0 to 1, linear between the quantiles at :data:`LEVELS`."""
    if not 0.0 <= level <= 1.0:
        raise ValueError(f"quantile level {level}: should be from 0 to 1")
    upper = min(bisect_right(LEVELS, level), len(LEVELS) - 1)
    low, high = LEVELS[upper - 1], LEVELS[upper]
    share = (level - low) / (high - low)
    return values[upper - 1] + share * (values[upper] - values[upper - 1])


def _area(values: Sequence[float]) -> float:
    widths = (high - low for low, high in pairwise(LEVELS))
    return sum(width * (a + b) / 2 for width, (a, b) in zip(widths, pairwise(values), strict=True))


def scale_to(lengths: Lengths, context_tokens: int) -> float:
    """The factor that brings the 99% quantiles of prompt and output together to ``context_tokens``; at most 1."""
    ninety_nine = LEVELS.index(0.99)
    return min(1.0, context_tokens / (lengths.prompt_tokens[ninety_nine] + lengths.output_tokens[ninety_nine]))


def all_at_once(
    lengths: Lengths, count: int, seed: int, context_tokens: int, scale: float | None = None, name: str = ""
) -> Workload:
    """``count`` requests that all arrive at time 0.

    Lengths are multiplied by ``scale`` (None: :func:`scale_to` the context); what is still longer than
    ``context_tokens`` loses prompt. Raises ValueError for a context that holds no request.
    """
    if context_tokens < 2:
        raise ValueError(f"context_tokens is {context_tokens}: a request takes 2 at least")
    rng = random.Random(seed)
    factor = scale_to(lengths, context_tokens) if scale is None else scale
    requests = tuple(_request(lengths, rng, factor, context_tokens) for _ in range(count))
    return Workload(name or lengths.name, requests, seed, lengths.source)


def _request(lengths: Lengths, rng: random.Random, factor: float, context_tokens: int) -> Request:
    prompt, output = lengths.draw(rng)
    output_tokens = min(max(1, round(output * factor)), context_tokens - 1)
    prompt_tokens = min(max(1, round(prompt * factor)), context_tokens - output_tokens)
    return Request(0.0, prompt_tokens, output_tokens)


def random_arrivals(count: int, rate_per_s: float, rng: random.Random, variation: float = 1.0) -> tuple[float, ...]:
    """Arrival times with gamma-distributed gaps; ``variation`` is the gaps' standard deviation over their mean.

    1 is a Poisson process; above 1 arrivals come in bursts. Raises ValueError for a rate or variation not above 0.
    """
    if rate_per_s <= 0 or variation <= 0:
        raise ValueError(f"rate_per_s {rate_per_s} and variation {variation}: both should be above 0")
    shape = 1.0 / variation**2
    gaps = (rng.gammavariate(shape, 1.0 / (shape * rate_per_s)) for _ in range(count))
    return tuple(accumulate(gaps))
