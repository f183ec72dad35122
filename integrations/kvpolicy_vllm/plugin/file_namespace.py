"""What decides the bytes of KV blocks beside their keys, as vLLM's configuration has it, for files of KV."""

from __future__ import annotations

import inspect
import logging
import os
import platform
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.v1.core import kv_cache_utils

from kvpolicy.errors import InputError
from kvpolicy_vllm.plugin.engine_config import device_name
from kvpolicy_vllm.plugin.kv_layout import is_plain, kind_of
from kvpolicy_vllm.plugin.kv_settings import environment, settings_of
from kvpolicy_vllm.plugin.served_weights import (
    identity_of_drafter,
    identity_of_weights,
    loaded_from_elsewhere,
    weights_changed,
)

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

NOT_CRYPTOGRAPHIC = "xxhash"
"""Names of hash functions that vLLM seeds at random begin so."""

TRANSFERRED = (
    "other weights than those on disk may come to this server while it runs, and the next one would take their KV for "
    "that of those on disk: leave out --weight-transfer-config"
)

NAMED_BY_CLIENTS = "clients may name their images as they like, and the hash of a block has these names"

logger = logging.getLogger(f"vllm.{__name__}")


def refuse_unnameable(config: VllmConfig, kv_cache: KVCacheConfig | None, shared: bool = False) -> None:
    """Raise InputError, with the remedy, where the keys and the configuration do not say all that decides the bytes, or
    another server would have other keys for the same tokens. ``kv_cache``: None where not known yet; ``shared``:
    whether the ranks have one host pool."""
    hash_seed(config)
    model = config.model_config
    reason = ""
    if config.lora_config is not None:
        reason = "the hash of a block has the name of its adapter and not its weights: leave out --enable-lora"
    elif model.is_multimodal_model:
        reason = NAMED_BY_CLIENTS
    elif _transfers_weights(config):
        reason = TRANSFERRED
    elif elsewhere := loaded_from_elsewhere(config):
        reason = elsewhere
    elif getattr(config.cache_config, "calculate_kv_scales", False):  # vLLM 0.27 and before
        reason = "each server takes the scales of --calculate-kv-scales from its own first step: leave that out"
    elif kv_cache is not None and not is_plain(kv_cache):
        reason = "this model keeps windows or states, or several block tables"
    elif shared:
        reason = "all ranks of this model have the same KV, and keep it once"
    if reason:
        raise InputError(f"cache_files: {reason}; or leave cache_files out")
    settings_of(config)  # which raises for one that cannot be read


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
    how each layer's part of a block lies there, see :func:`orders_in_memory`. No other server finds what is stored
    under it where the weights were seen to change while they were loaded.

    Raises InputError where the model's weights are not found, or a setting cannot be read.
    """
    namespace = computed_by(config) | {
        "hashes": [str(config.cache_config.prefix_caching_hash_algo), hash_seed(config)],
        "groups": [
            [kind_of(group), int(group.kv_cache_spec.block_size), int(group.kv_cache_spec.page_size_bytes),
             list(group.layer_names)]
            for group in kv_cache.kv_cache_groups
        ],
        "segments": segments,
        "layers": layers,
        "rank": rank,
    }  # fmt: skip
    if weights_changed(config):  # asked after the digest was taken
        logger.warning(
            "kvpolicy: the files of the model's weights changed while this server started, so that it is not known "
            "which it has loaded: prompts in files are found by this server alone; start it again to find them later"
        )
        namespace["server"] = uuid.uuid4().hex
    return namespace


def computed_by(config: VllmConfig, folder: Path | None = None) -> dict[str, Any]:
    """What decides keys and values whoever keeps them: the engine, its device, settings and weights. ``folder``: where
    the weights are, if not where vLLM's ModelConfig says. Raises InputError as :func:`namespace_of`, where vLLM may be
    given other weights while it runs, or loads them from elsewhere, and for models of images."""
    if _transfers_weights(config):
        raise InputError(f"files of KV: {TRANSFERRED}, or serve without files")
    if elsewhere := loaded_from_elsewhere(config):
        raise InputError(f"files of KV: {elsewhere}, or serve without files")
    if config.model_config.is_multimodal_model:
        raise InputError(f"files of KV: {NAMED_BY_CLIENTS}; serve without files")
    return {
        "engine": f"vllm {vllm.__version__}",
        "device": [device_name(), *_instructions()],
        "weights": identity_of_weights(config, config.model_config, folder),
        "drafter": identity_of_drafter(config, folder),
        "settings": settings_of(config),
        "environment": environment(),
    }


def configuration_of_callers() -> VllmConfig:
    """vLLM's configuration, as the callers of the function that asks have it; vLLM passes none to tiers of its
    OffloadingConnector. Raises InputError where none has."""
    frame = inspect.currentframe()
    while frame is not None:
        found = next((value for value in frame.f_locals.values() if isinstance(value, VllmConfig)), None)
        if found is not None:
            return found
        frame = frame.f_back
    current = get_current_vllm_config_or_none()
    if current is None:
        raise InputError(
            f"kvpolicy-files: vLLM {vllm.__version__} makes its tiers without its configuration at hand, by which "
            "files of other settings would be told apart; leave kvpolicy-files out"
        )
    return current


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


def _transfers_weights(config: VllmConfig) -> bool:
    """Whether vLLM may be given other weights while it runs."""
    return getattr(config, "weight_transfer_config", None) is not None


def _instructions() -> list[str]:
    """What the CPU can do, by which vLLM's CPU backend packs keys."""
    if not current_platform.is_cpu():
        return []
    return [platform.machine(), torch.backends.cpu.get_cpu_capability(), str(torch.cpu._is_amx_tile_supported())]
