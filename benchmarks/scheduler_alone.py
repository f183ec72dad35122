"""vLLM's own scheduler for a small model that is never loaded, with or without the plugin: nothing is executed."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.structured_output import StructuredOutputManager

BLOCK, LAYERS, KV_HEADS, HEAD = 16, 4, 4, 32
BLOCK_BYTES = BLOCK * LAYERS * 2 * KV_HEADS * HEAD * 4


def make_scheduler(
    context: int, blocks: int, running: int, budget: int, log_stats: bool = False, **arguments: Any
) -> Any:
    """The scheduler that vLLM makes for these sizes; ``arguments``: more of :class:`EngineArgs`."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as folder:
        shape = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": KV_HEADS * HEAD,
            "intermediate_size": 256, "num_attention_heads": KV_HEADS, "num_key_value_heads": KV_HEADS,
            "num_hidden_layers": LAYERS, "max_position_embeddings": context, "vocab_size": 1024, "head_dim": HEAD,
        }  # fmt: skip
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        config = EngineArgs(
            model=folder, dtype="float32", skip_tokenizer_init=True, block_size=BLOCK, max_model_len=context,
            max_num_seqs=running, max_num_batched_tokens=budget, enable_prefix_caching=False, **arguments,
        ).create_engine_config()  # fmt: skip
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=HEAD, dtype=torch.float32)
    groups = [KVCacheGroupSpec([f"layer.{i}" for i in range(LAYERS)], spec)]
    cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    if hasattr(cache, "hash_block_size"):
        cache.hash_block_size = BLOCK
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config, kv_cache_config=cache, structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK, log_stats=log_stats,
    )  # fmt: skip
