"""Makes a model's layers without memory and asks vLLM for their KV cache: ``python -m kvpolicy_vllm.check.lay_out``.

Takes jobs ``{"flags": [LLM, FLAG, ...]}``, as for ``vllm serve``, and answers with the fields of
:class:`kvpolicy_vllm.check.CheckReport`. The layers are made on torch's meta device, for one rank.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import vllm
from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.v1.attention.backends import utils
from vllm.v1.core import single_type_kv_cache_manager

from kvpolicy.errors import KVPolicyError
from kvpolicy.hardware import available_memory_bytes
from kvpolicy_vllm.bench.engine_flags import RefusedByVllm, server_arguments, server_config
from kvpolicy_vllm.bench.engine_process import jobs
from kvpolicy_vllm.check.remedies import helping
from kvpolicy_vllm.plugin.assembly import controller_for
from kvpolicy_vllm.plugin.connector import cores_here, host_slots, pools
from kvpolicy_vllm.plugin.engine_config import device_name
from kvpolicy_vllm.plugin.kv_layout import block_bytes
from kvpolicy_vllm.plugin.scheduler import refuse_order
from kvpolicy_vllm.plugin.settings import Settings
from kvpolicy_vllm.plugin.versions import refuse_unsupported

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.kv_cache_interface import KVCacheConfig

NOTHING: dict[str, Any] = {
    "engine": "", "device": "", "refused": "", "groups": [], "block_bytes": 0, "not_laid_out": "", "helps": []
}  # fmt: skip
PLENTY = 1 << 50
"""Bytes of memory that the layout is made for; only the bytes of a block are read from it."""
PLANNING, UNTIL_0_32 = "vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils"
"""Where vLLM makes groups of layers: from 0.33 on, and before."""
planning = import_module(PLANNING if find_spec(PLANNING) else UNTIL_0_32)


def main() -> None:
    for job, answer in jobs():
        answer("result", NOTHING | looked_at(job["flags"]))


def looked_at(flags: list[str]) -> dict[str, Any]:
    """What is said of these flags; whatever vLLM or the plugin raises refuses them."""
    known: dict[str, Any] = {"engine": f"vllm {vllm.__version__}", "device": device_name()}
    try:
        arguments = server_arguments(flags)
    except RefusedByVllm as error:
        return known | {"refused": str(error)}
    try:
        return known | judged(arguments)
    except RefusedByVllm as error:  # which names vLLM's own flags
        return known | {"refused": str(error)}
    except NotServed as error:
        return known | {"refused": str(error), "groups": error.groups, "helps": helping(arguments, is_served)}


class NotServed(KVPolicyError):
    """The plugin does not serve it. ``groups``: of the layers, where they were made before it was refused."""

    def __init__(self, reason: KVPolicyError, groups: list[dict[str, Any]]) -> None:
        super().__init__(str(reason))
        self.groups = groups


def judged(arguments: AsyncEngineArgs) -> dict[str, Any]:
    """What is known of a server with these arguments. Raises RefusedByVllm, and NotServed where it is the plugin that
    refuses."""
    try:
        config = server_config(deepcopy(arguments))  # making a configuration fills in what is not given
    except RefusedByVllm:
        raise
    except KVPolicyError as error:
        raise NotServed(error, []) from error
    try:
        kv_cache = laid_out(config)
    # The model's own error, or one of a model that needs its weights or a device to be made: which is not known.
    except Exception as error:  # noqa: BLE001
        return {"not_laid_out": f"{type(error).__name__}: {error}"}
    groups = groups_of(kv_cache)
    try:
        return {"groups": groups, "block_bytes": served_block_bytes(config, kv_cache)}
    except KVPolicyError as error:
        raise NotServed(error, groups) from error


def is_served(arguments: AsyncEngineArgs) -> bool:
    """Whether the plugin serves it, for certain."""
    try:
        return "not_laid_out" not in judged(arguments)
    except KVPolicyError:
        return False


def served_block_bytes(config: VllmConfig, kv_cache: KVCacheConfig) -> int:
    """Bytes of host memory that one block takes, over all ranks that keep a part of it. Raises KVPolicyError as the
    plugin does when an engine starts."""
    refuse_unsupported(config, kv_cache)
    settings = Settings.read(config.kv_transfer_config.kv_connector_extra_config)
    ranks = int(config.parallel_config.tensor_parallel_size)
    rank_bytes = block_bytes(kv_cache) // min(ranks, kv_heads(config))
    slots = host_slots(settings, rank_bytes, pools(config, kv_cache, settings))
    settings.refuse_too_much_memory(available_memory_bytes(), cores_here(config))
    controller = controller_for(replace(settings, trace=None, online_state=None), config, kv_cache, slots, rank_bytes)
    refuse_order(controller.order, config.scheduler_config.policy)
    return rank_bytes * pools(config, kv_cache, settings)


def kv_heads(config: VllmConfig) -> int:
    """KV heads over all ranks. Where there are more ranks, several hold the same."""
    return 1 if config.model_config.use_mla else int(config.model_config.get_total_num_kv_heads())


def laid_out(config: VllmConfig) -> KVCacheConfig:
    """The KV cache of the model's layers, made without memory."""
    dtype = torch.get_default_dtype()
    with set_current_vllm_config(config):
        _be_the_one_rank()
        torch.set_default_dtype(config.model_config.dtype)
        try:
            with torch.device("meta"):
                initialize_model(config)
        finally:
            torch.set_default_dtype(dtype)
        # As a worker does once it has loaded the model: the size that the layers' backends take, unless one is given.
        current_platform.update_block_size_for_backend(config)
        layers = get_layers_from_vllm_config(config, cast(Any, AttentionLayerBase))
        spec_of = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
        specs = {name: spec for name, spec in spec_of.items() if spec is not None}
        _prepare(config, layers.values(), specs.values())
        groups = planning.get_kv_cache_groups(config, specs)
        return cast("KVCacheConfig", planning.get_kv_cache_config_from_groups(config, groups, PLENTY))


def _be_the_one_rank() -> None:
    """Layers ask for the ranks of their group."""
    if torch.distributed.is_initialized():
        return
    with tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, (Path(folder) / "rendezvous").as_uri(), 0, "gloo")
        ensure_model_parallel_initialized(1, 1)


def _prepare(config: VllmConfig, layers: Iterable[Any], specs: Iterable[Any]) -> None:
    """What an engine core does before it makes groups: from vLLM 0.28 and 0.29 on."""
    if register := getattr(single_type_kv_cache_manager, "register_all_kvcache_specs", None):
        register(config)
    if resolve := getattr(utils, "resolve_kv_cache_layout", None):
        backends = {layer.get_attn_backend() for layer in layers}
        names = [layout.name for layout in utils.get_supported_kv_cache_layouts(list(backends))]
        resolve(config, [names], specs)


def groups_of(kv_cache: KVCacheConfig) -> list[dict[str, Any]]:
    return [
        {
            "kind": type(group.kv_cache_spec).__name__,
            "layers": len(group.layer_names),
            "block_size": group.kv_cache_spec.block_size,
            "window": getattr(group.kv_cache_spec, "sliding_window", None)
            or getattr(group.kv_cache_spec, "attention_chunk_size", None),
        }
        for group in kv_cache.kv_cache_groups
    ]


if __name__ == "__main__":
    main()
