"""How long collecting the state takes: `situation_of` on vLLM's own scheduler, without an engine.

Requests of 1 to 4096 blocks are given blocks by vLLM's KVCacheManager; nothing is executed. Measured is the first
preemption of a step, which looks through all running requests; the others of the step do not. Needs vllm.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter_ns
from typing import Any

import numpy as np
from scheduler_alone import BLOCK, BLOCK_BYTES, make_scheduler
from vllm import SamplingParams
from vllm.v1.request import Request

from kvpolicy.survival import Survival
from kvpolicy_vllm.plugin.host_copies import CopyBook
from kvpolicy_vllm.plugin.situation import RunningView, situation_of

MAX_BLOCKS = 4096
LENGTHS = (1, 16, 64, 256, 512, 1024, 2048, 3072, MAX_BLOCKS)
RUNNING = (0, 1, 4, 16, 64, 256, 512, 1024)
CALLS = 200

Interval = Callable[[Sequence[float], random.Random], dict[str, float]]


def collecting(rounds: int, rng: random.Random, with_interval: Interval) -> dict[str, Any]:
    """Slopes per round over blocks held and over running requests, microseconds; their medians and intervals."""
    context = 2 * MAX_BLOCKS * BLOCK
    scheduler = make_scheduler(context, sum(LENGTHS) + 2 * max(RUNNING) + 64, 512, context)
    copies = CopyBook(MAX_BLOCKS, 1, BLOCK_BYTES)
    victims = [_request(scheduler, f"blocks-{blocks}", blocks) for blocks in LENGTHS]
    others = [_request(scheduler, f"other-{i}", 2) for i in range(max(RUNNING))]
    per_block, per_running, least = [], [], []
    for _ in range(rounds):
        scheduler.running = []
        by_blocks = [_median_us(scheduler, copies, victim) for victim in victims]
        by_running = []
        for count in RUNNING:
            scheduler.running = others[:count]
            by_running.append(_median_us(scheduler, copies, victims[0]))
        per_block.append(float(np.polyfit(LENGTHS, by_blocks, 1)[0]))
        per_running.append(float(np.polyfit(RUNNING, by_running, 1)[0]))
        least.append(by_blocks[0])
    return {
        "us_per_block": with_interval(per_block, rng),
        "us_per_running": with_interval(per_running, rng),
        "min_us": with_interval(least, rng),
        "blocks": list(LENGTHS),
        "running": list(RUNNING),
    }


def _median_us(scheduler: Any, copies: CopyBook, victim: Request) -> float:
    spans, survival = [], Survival()
    for _ in range(CALLS):
        begun = perf_counter_ns()
        view = RunningView(scheduler, victim)
        situation_of(victim, scheduler, view, "memory", copies, survival, 0.0)
        spans.append(perf_counter_ns() - begun)
    return median(spans) / 1e3


def _request(scheduler: Any, name: str, blocks: int) -> Request:
    """A request that holds that many blocks, all its prompt computed."""
    tokens = blocks * BLOCK
    parameters = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    request = Request(name, list(range(tokens)), parameters, None, arrival_time=0.0)
    allocated = scheduler.kv_cache_manager.allocate_slots(request, tokens)
    if allocated is None:
        raise RuntimeError(f"vLLM's block pool has no {blocks} blocks left")
    request.num_computed_tokens = tokens
    scheduler.requests[name] = request
    return request
