"""What decides the bytes of a rank's KV blocks beside their keys, as vLLM's configuration has it, for files of KV."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm
from huggingface_hub import snapshot_download
from vllm.platforms import current_platform
from vllm.v1.core import kv_cache_utils

from kvpolicy.errors import InputError
from kvpolicy.tiers import weights_digest
from kvpolicy_vllm.plugin.engine_config import device_name
from kvpolicy_vllm.plugin.kv_layout import is_plain, kind_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

NOT_CRYPTOGRAPHIC = "xxhash"
"""Names of hash functions that vLLM seeds at random begin so."""
DUMMY = "dummy"


def refuse_unnameable(config: VllmConfig, kv_cache: KVCacheConfig, shared: bool = False) -> None:
    """Raise InputError, with the remedy, where the keys and the configuration do not say all that decides the bytes, or
    another server would have other keys for the same tokens. ``shared``: whether the ranks have one host pool."""
    hash_seed(config)
    model = config.model_config
    reason = ""
    if config.lora_config is not None:
        reason = "the hash of a block has the name of its adapter and not its weights: leave out --enable-lora"
    elif model.is_multimodal_model:
        reason = "clients may name their images as they like, and the hash of a block has these names"
    elif not is_plain(kv_cache):
        reason = "this model keeps windows or states, or several block tables"
    elif shared:
        reason = "all ranks of this model have the same KV, and keep it once"
    if reason:
        raise InputError(f"cache_files: {reason}; or leave cache_files out")


def hash_seed(config: VllmConfig) -> str:
    """The seed of block hashes. Raises InputError where it differs from server to server."""
    seed = os.getenv("PYTHONHASHSEED")
    if seed is not None:
        return seed
    algorithm = str(config.cache_config.prefix_caching_hash_algo)
    fixed = getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None)
    if fixed is not None and not algorithm.startswith(NOT_CRYPTOGRAPHIC):
        return str(fixed)
    raise InputError(
        f"cache_files: vLLM {vllm.__version__} seeds block hashes ({algorithm}) at random, so that no later server "
        "would find a file; set the environment variable PYTHONHASHSEED to 0"
    )


def namespace_of(
    config: VllmConfig, kv_cache: KVCacheConfig, rank: int, segments: list[int], layers: list[Any]
) -> dict[str, Any]:
    """Of one rank. ``segments``: bytes of a block in each piece of device memory, as its copier has them; ``layers``:
    how each layer's part of a block lies there, see :func:`orders_in_memory`.

    Raises InputError where the model's weights are not found.
    """
    model, parallel = config.model_config, config.parallel_config
    return {
        "engine": f"vllm {vllm.__version__}",
        "device": [device_name(), *_instructions()],
        "attention": [str(getattr(config.attention_config, "backend", None)), os.getenv("VLLM_ATTENTION_BACKEND", "")],
        "weights": identity_of_weights(config, model),
        "drafter": _drafter(config),
        "model": json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_dtype": str(config.cache_config.cache_dtype),
        "hashes": [str(config.cache_config.prefix_caching_hash_algo), hash_seed(config)],
        "groups": [
            [kind_of(group), int(group.kv_cache_spec.block_size), int(group.kv_cache_spec.page_size_bytes),
             list(group.layer_names)]
            for group in kv_cache.kv_cache_groups
        ],
        "segments": segments,
        "layers": layers,
        "ranks": [
            rank, int(parallel.world_size), int(parallel.tensor_parallel_size), int(parallel.pipeline_parallel_size),
            int(getattr(parallel, "decode_context_parallel_size", 1)),
        ],
        "layout": os.getenv("VLLM_KV_CACHE_LAYOUT", ""),
    }  # fmt: skip


def orders_in_memory(kv_caches: dict[str, Any], blocks: int) -> list[Any]:
    """Sizes of the dimensions of each layer's tensors, the outermost in memory first, each with its place in the shape.
    That of the blocks, of which there may be more in the next server, counts as one. Attention backends differ in this:
    the bytes of a block are as many, and mean another thing."""
    tensors = [tensor for held in kv_caches.values() for tensor in (held if isinstance(held, list | tuple) else [held])]
    return [
        [
            [-1 if tensor.shape[dim] == blocks else int(tensor.shape[dim]), dim]
            for dim in sorted(range(tensor.ndim), key=lambda dim: -tensor.stride(dim))
        ]
        for tensor in tensors
    ]


def _instructions() -> list[str]:
    """What the CPU can do, by which vLLM's CPU backend packs keys."""
    if not current_platform.is_cpu():
        return []
    return [platform.machine(), torch.backends.cpu.get_cpu_capability(), str(torch.cpu._is_amx_tile_supported())]


def _drafter(config: VllmConfig) -> str:
    speculative = config.speculative_config
    drafter = getattr(speculative, "draft_model_config", None)
    if drafter is None:
        return "" if speculative is None else str(speculative.method)
    return f"{speculative.method} {identity_of_weights(config, drafter)}"


def identity_of_weights(config: VllmConfig, model: Any) -> str:
    """Digest of a model's weights. Raises InputError where they are not found on this machine."""
    if config.load_config.load_format == DUMMY:
        return f"{DUMMY} {model.seed}"
    path = Path(str(model.model))
    if not path.exists():
        path = _from_hub(str(model.model), model.revision)
    return weights_digest(path)


def _from_hub(name: str, revision: str | None) -> Path:
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    # Whatever a hub's client raises, the weights are not where they can be told apart.
    except Exception as error:
        raise InputError(
            f"cache_files: the weights of {name} are not found on this machine, so that files cannot be told from "
            f"those of other weights ({error}); give vLLM the folder of the model"
        ) from error
