"""How long collecting the state takes: `situation_of` on vLLM's own scheduler, without an engine.

Requests of 1 to 4096 blocks are given blocks by vLLM's KVCacheManager; nothing is executed. Measured is the first
preemption of a step, which looks through all running requests; the others of the step do not. Needs vllm.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvpolicy_vllm.plugin.copies import CopyBook
from kvpolicy_vllm.plugin.situation import RunningView, situation_of

BLOCK, LAYERS, KV_HEADS, HEAD = 16, 4, 4, 32
MOST_BLOCKS = 4096
LENGTHS = (1, 16, 64, 256, 512, 1024, 2048, 3072, MOST_BLOCKS)
RUNNING = (0, 1, 4, 16, 64, 256, 512, 1024)
CALLS = 200

Interval = Callable[[Sequence[float], random.Random], dict[str, float]]


def collecting(rounds: int, rng: random.Random, with_interval: Interval) -> dict[str, Any]:
    """Slopes per round over blocks held and over running requests, microseconds; their medians and intervals."""
    scheduler = _scheduler()
    copies = CopyBook(MOST_BLOCKS, 1, BLOCK * LAYERS * 2 * KV_HEADS * HEAD * 4)
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
        "least_us": with_interval(least, rng),
        "blocks": list(LENGTHS),
        "running": list(RUNNING),
    }


def _median_us(scheduler: Any, copies: CopyBook, victim: Request) -> float:
    spans = []
    for _ in range(CALLS):
        begun = perf_counter_ns()
        view = RunningView(scheduler, victim)
        situation_of(victim, scheduler, view, "memory", copies, copies.block_bytes // LAYERS, 0.0)
        spans.append(perf_counter_ns() - begun)
    return median(spans) / 1e3


def _request(scheduler: Any, name: str, blocks: int) -> Request:
    """A request that holds that many blocks, all its prompt computed."""
    tokens = blocks * BLOCK
    parameters = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    one = Request(name, list(range(tokens)), parameters, None, arrival_time=0.0)
    given = scheduler.kv_cache_manager.allocate_slots(one, tokens)
    if given is None:
        raise RuntimeError(f"vLLM's block pool has no {blocks} blocks left")
    one.num_computed_tokens = tokens
    scheduler.requests[name] = one
    return one


def _scheduler() -> Any:
    """vLLM's scheduler for a small model, of which nothing but its shape is needed."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    context = 2 * MOST_BLOCKS * BLOCK
    blocks = sum(LENGTHS) + 2 * max(RUNNING) + 64
    with tempfile.TemporaryDirectory() as folder:
        shape = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": KV_HEADS * HEAD,
            "intermediate_size": 256, "num_attention_heads": KV_HEADS, "num_key_value_heads": KV_HEADS,
            "num_hidden_layers": LAYERS, "max_position_embeddings": context, "vocab_size": 1024, "head_dim": HEAD,
        }  # fmt: skip
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        config = EngineArgs(
            model=folder, dtype="float32", skip_tokenizer_init=True, block_size=BLOCK, max_model_len=context,
            max_num_seqs=512, max_num_batched_tokens=context, enable_prefix_caching=False,
        ).create_engine_config()  # fmt: skip
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=HEAD, dtype=torch.float32)
    groups = [KVCacheGroupSpec([f"layer.{i}" for i in range(LAYERS)], spec)]
    cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    if hasattr(cache, "hash_block_size"):
        cache.hash_block_size = BLOCK
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config, kv_cache_config=cache, structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK, log_stats=False,
    )  # fmt: skip
