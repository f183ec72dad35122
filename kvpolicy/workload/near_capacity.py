"""Loads relative to what a server can keep up with: its capacity, arrivals at a share of it, and two classes.

Live measurements and simulations make their requests here, so that both mean the same by a load.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

from kvpolicy.workload.lengths import DEEPSEEK_R1
from kvpolicy.workload.requests import Request, Source, Workload, WorkloadError
from kvpolicy.workload.synthetic import all_at_once

CONTEXT_TOKENS = 384
SCALE = 0.12
"""Of the public trace's lengths."""
URGENT, BATCH = "urgent", "batch"
"""Names of the two classes."""
BURST = 6
"""Urgent requests that come at a time."""
URGENT_TOKENS = (48, 12)
"""Prompt and output of an urgent request."""
URGENT_SHARE = 0.75
"""Urgent requests come for so much of the time that the batch takes at its capacity."""
MIN_REQUESTS = 4
"""With fewer, a run has no middle half."""


def at_once(requests: int, seed: int) -> Workload:
    """Requests with the lengths of deepseek-r1, scaled for a small model, all there from the beginning."""
    return all_at_once(DEEPSEEK_R1, requests, seed, CONTEXT_TOKENS, SCALE)


def middle_rate(ends_s: Iterable[float]) -> float:
    """Finishes per second between the first quarter of them and the last: the capacity, where all requests were there
    at once. Raises WorkloadError for fewer than :data:`MIN_REQUESTS` finishes, and where no time passes between."""
    ordered = sorted(ends_s)
    first, last = len(ordered) // 4, 3 * len(ordered) // 4
    if len(ordered) < MIN_REQUESTS or ordered[last] <= ordered[first]:
        raise WorkloadError(f"the middle rate of {len(ordered)} finishes: should be {MIN_REQUESTS} or more, in time")
    return (last - first) / (ordered[last] - ordered[first])


def arriving(source: Source, rate_per_s: float, seed: int) -> Workload:
    """The requests with Poisson arrivals, the same for everybody who serves them."""
    rng, now_s, made = random.Random(f"{seed} {rate_per_s}"), 0.0, []
    for request in source:
        now_s += rng.expovariate(rate_per_s)
        made.append(replace(request, arrival_s=now_s))
    return Workload(f"{source.name}, {rate_per_s:g}/s", tuple(made), seed, source.source)


def arriving_within(source: Source, seconds: float, seed: int) -> Workload:
    """The requests with the arrivals of a Poisson process that has so many in this time: uniform times, in order.

    The load of every draw is the same, and another time stretches the same draw.
    """
    requests = list(source)
    times_s = _uniform(len(requests), seconds, seed)
    made = tuple(replace(request, arrival_s=at_s) for request, at_s in zip(requests, times_s, strict=True))
    return Workload(f"{source.name}, within {seconds:g} s", made, seed, source.source)


def _uniform(count: int, seconds: float, seed: int) -> list[float]:
    rng = random.Random(f"arrivals {seed}")
    return sorted(seconds * rng.random() for _ in range(count))


def shuffled(source: Source, seed: int) -> Workload:
    """The same requests in an order drawn from ``seed``, from which their texts are drawn, too: what a server can keep
    up with stays as it is. Meant for requests that arrive at once."""
    requests = list(source)
    random.Random(f"order {seed}").shuffle(requests)
    return Workload(source.name, tuple(requests), seed, source.source)


def with_urgent(batch: Source, capacity_per_s: float, urgent_per_s: float, seed: int) -> Workload:
    """Batch work that is there from the beginning, and urgent requests of priority -1, :data:`BURST` at a time.

    ``capacity_per_s``: requests of the batch that finish in a second. ``urgent_per_s``: urgent ones on average.
    """
    rng, now_s = random.Random(f"{seed} {capacity_per_s}"), 0.0
    until_s, times_s = URGENT_SHARE * len(list(batch)) / capacity_per_s, []
    while now_s < until_s:
        now_s += rng.expovariate(urgent_per_s / BURST)
        times_s.append(now_s)
    return _two_classes(batch, times_s, seed)


def with_bursts(batch: Source, capacity_per_s: float, bursts: int, seed: int) -> Workload:
    """The same with so many bursts, at uniform times: every draw has as many urgent requests, and another capacity
    stretches the same draw."""
    until_s = URGENT_SHARE * len(list(batch)) / capacity_per_s
    return _two_classes(batch, _uniform(bursts, until_s, seed), seed)


def _two_classes(batch: Source, times_s: Iterable[float], seed: int) -> Workload:
    made = [replace(request, class_name=BATCH) for request in batch]
    for at_s in times_s:
        made += [Request(at_s, *URGENT_TOKENS, priority=-1, class_name=URGENT)] * BURST
    return Workload("two classes", tuple(made), seed, batch.source)
