"""Makes a model's layers without memory and asks vLLM for their KV cache: ``python -m kvpolicy_vllm.check.lay_out``.

Takes jobs ``{"flags": [LLM, FLAG, ...]}``, as for ``vllm serve``, and answers with the fields of
:class:`kvpolicy_vllm.check.CheckReport`. The layers are made on torch's meta device, for one rank.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import vllm
from pydantic import ValidationError
from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends import utils
from vllm.v1.core import single_type_kv_cache_manager

from kvpolicy.errors import InputError, KVPolicyError
from kvpolicy.hardware import available_memory_bytes
from kvpolicy_vllm.bench.engine_process import jobs
from kvpolicy_vllm.plugin.assembly import controller_for
from kvpolicy_vllm.plugin.connector import cores_here, host_slots
from kvpolicy_vllm.plugin.engine_config import device_name
from kvpolicy_vllm.plugin.kv_layout import block_bytes
from kvpolicy_vllm.plugin.scheduler import refuse_order
from kvpolicy_vllm.plugin.settings import Settings
from kvpolicy_vllm.plugin.versions import refuse_unsupported

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

NOTHING: dict[str, Any] = {
    "engine": "", "device": "", "refused": "", "groups": [], "block_bytes": 0, "not_laid_out": ""
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
        arguments = parsed(flags)
        config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
        refuse_unsupported(config, None)
    # Whatever it is, the engine would end with the same.
    except Exception as error:  # noqa: BLE001
        return known | {"refused": words_of(error)}
    try:
        kv_cache = laid_out(config)
    # The model's own error, or one of a model that needs its weights or a device to be made: which is not known.
    except Exception as error:  # noqa: BLE001
        return known | {"not_laid_out": f"{type(error).__name__}: {error}"}
    known |= {"groups": groups_of(kv_cache)}
    try:
        return known | {"block_bytes": served_block_bytes(config, kv_cache)}
    except KVPolicyError as error:
        return known | {"refused": str(error)}


def served_block_bytes(config: VllmConfig, kv_cache: KVCacheConfig) -> int:
    """Bytes of one block over all ranks. Raises KVPolicyError as the plugin does when an engine starts."""
    refuse_unsupported(config, kv_cache)
    settings = Settings.read(config.kv_transfer_config.kv_connector_extra_config)
    ranks = int(config.parallel_config.tensor_parallel_size)
    rank_bytes = block_bytes(kv_cache) // min(ranks, kv_heads(config))
    slots = host_slots(settings, rank_bytes, config.parallel_config.world_size)
    settings.refuse_too_much_memory(available_memory_bytes(), cores_here(config))
    controller = controller_for(replace(settings, trace=None, online_state=None), config, kv_cache, slots, rank_bytes)
    refuse_order(controller.order, controller.tables is not None, config.scheduler_config.policy)
    return rank_bytes * ranks


def kv_heads(config: VllmConfig) -> int:
    """KV heads over all ranks. Where there are more ranks, several hold the same."""
    return 1 if config.model_config.use_mla else int(config.model_config.get_total_num_kv_heads())


def words_of(error: Exception) -> str:
    """The message; where vLLM's configuration reports it as an error of its own, that which was raised first."""
    if not isinstance(error, ValidationError):
        return str(error) or type(error).__name__
    return "; ".join(str(one.get("ctx", {}).get("error") or one["msg"]) for one in error.errors())


def parsed(flags: list[str]) -> Namespace:
    """As ``vllm serve`` reads them. Raises InputError with what argparse prints."""
    parser = FlexibleArgumentParser()
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers())
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            arguments = parser.parse_args(["serve", *flags])
    except SystemExit:
        raise InputError(printed.getvalue().strip().splitlines()[-1]) from None
    arguments.model = arguments.model_tag or arguments.model
    command.validate(arguments)
    return cast(Namespace, arguments)


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
            "window": getattr(group.kv_cache_spec, "sliding_window", None),
        }
        for group in kv_cache.kv_cache_groups
    ]


if __name__ == "__main__":
    main()
