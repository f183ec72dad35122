"""Describes an engine from vLLM's configuration: its specification, its loader of cost models, its traces' header."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import vllm
from vllm.platforms import current_platform

from kvpolicy.cost import CostModel, FittedModel, engine_loader
from kvpolicy.hardware import EngineSpec, Geometry, describe
from kvpolicy.hardware.link import header_link
from kvpolicy.shape import ConfigError, ModelShape
from kvpolicy.trace import Header
from kvpolicy_vllm.plugin.kv_layout import (
    NO_OTHERS,
    KeptLayers,
    attends_to_everything,
    block_size,
    is_plain,
    kept_layers,
    layer_kv_values,
)

if TYPE_CHECKING:
    from vllm.config import SchedulerConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvpolicy_vllm.plugin.settings import Settings


def device_name() -> str:
    return "cpu" if current_platform.is_cpu() else str(current_platform.get_device_name())


def engine_spec(config: VllmConfig, kv_cache: KVCacheConfig, block_bytes: int, settings: Settings) -> EngineSpec:
    """The engine as cost models are checked against it: one rank, with the plugin's link and host pool."""
    return EngineSpec(
        block_size=block_size(kv_cache),
        token_budget=token_budget(config.scheduler_config),
        ranks=config.parallel_config.tensor_parallel_size,
        pinned=settings.pin_memory,
        block_bytes=block_bytes,
        geometry=geometry_of(config, kv_cache).to_dict(),
        hardware=describe(device_name()),
        link=header_link(settings.link),
    )


def token_budget(scheduler: SchedulerConfig) -> int:
    """Most tokens that a step computes. vLLM heeds both limits; the second is None where nothing has set it."""
    batched = int(scheduler.max_num_batched_tokens)
    return min(batched, getattr(scheduler, "max_num_scheduled_tokens", None) or batched)  # not in all versions


def model_loader(config: VllmConfig, engine: EngineSpec) -> Callable[[str], FittedModel]:
    """The loader of cost models for this engine: by name or folder, or its own untrained one."""
    return engine_loader(config.model_config.hf_config.to_dict(), engine, config.cache_config.cache_dtype)


def why_not_priced(config: VllmConfig, kv_cache: KVCacheConfig) -> str:
    """Why the costs of this model's layers are not known; empty where they are.

    Where all of them are of full attention, and keep as much of a token, costs follow from what is measured, whatever
    else the model has.
    """
    if attends_to_everything(kv_cache):
        return _other_heads(config, kv_cache)
    try:
        geometry = Geometry.from_config(config.model_config.hf_config.to_dict())
    except ConfigError as error:
        return str(error)
    kept = kept_layers(kv_cache)
    described = KeptLayers(
        geometry.window_layers, geometry.window_tokens, geometry.state_layers, geometry.pair_flops > 0
    )
    if is_plain(kv_cache):  # windows that are stored whole are in the group of the other layers
        kept = kept._replace(window_layers=described.window_layers if kept.window_tokens else 0)
    if kept != described:
        return f"its configuration tells of {described.text()}, vLLM of {kept.text()}"
    if kept == NO_OTHERS:
        return "its layers of full attention have several block tables"
    return _other_heads(config, kv_cache)


def _other_heads(config: VllmConfig, kv_cache: KVCacheConfig) -> str:
    """Where vLLM keeps more or less of a token in some layer than the geometry says of all of them; else empty."""
    geometry, kept = geometry_of(config, kv_cache), layer_kv_values(kv_cache)
    described = 2 * geometry.kv_heads * geometry.head_dim
    if kept == {described}:
        return ""
    found = " or ".join(map(str, sorted(kept)))
    return f"its configuration tells of {described} values of a token in each layer that attends, vLLM of {found}"


def geometry_of(config: VllmConfig, kv_cache: KVCacheConfig | None = None) -> Geometry:
    """The model's shape on one rank. Where every layer is one of full attention it is as vLLM tells it; of others, it
    is what their configuration says of them, where that is understood (see :func:`why_not_priced`).

    ``kv_cache``: None where it is not known yet; every layer is taken as one of full attention, then.
    """
    plain = _of_like_layers(config)
    if kv_cache is None or attends_to_everything(kv_cache):
        return plain
    try:
        shape = ModelShape.from_config(config.model_config.hf_config.to_dict())
        geometry = Geometry.of_shape(shape, config.parallel_config.tensor_parallel_size)
    except ConfigError:
        return plain
    return replace(geometry, weight_bytes=plain.weight_bytes, kv_bytes=plain.kv_bytes, dtype=plain.dtype)


def refuse_other_model(cost_model: CostModel | None, config: VllmConfig) -> None:
    """Raise ModelError where a trained cost model was made for another model than this engine's, before its layers are
    made; see :meth:`kvpolicy.cost.FittedModel.check_geometry`.

    Only where the model's own configuration says what vLLM says, that all layers are alike and of full attention. Of
    others, the layers have to be made to know, and ``check_fit`` tells later, as it tells what else does not fit.
    """
    if not isinstance(cost_model, FittedModel):
        return
    # What the cache keeps of a value may still be settled by the checkpoint.
    geometry = replace(_of_like_layers(config), kv_bytes=cost_model.provenance.geometry.kv_bytes)
    try:
        shape = ModelShape.from_config(config.model_config.hf_config.to_dict())
        described = Geometry.of_shape(shape, config.parallel_config.tensor_parallel_size)
    except ConfigError:
        return
    served = replace(
        described, weight_bytes=geometry.weight_bytes, kv_bytes=geometry.kv_bytes, dtype=geometry.dtype
    )  # whatever type the checkpoint has
    if served == geometry:
        cost_model.check_geometry(geometry.to_dict())


def _of_like_layers(config: VllmConfig) -> Geometry:
    """The shape of identical layers, as vLLM tells it of this model.

    The MLP's width is that of :class:`Geometry`, so that mixtures of experts and families with their own field names
    are counted the same with and without an engine.
    """
    model, parallel = config.model_config, config.parallel_config
    dtype = str(model.dtype).removeprefix("torch.")
    ranks = parallel.tensor_parallel_size
    return Geometry(
        layers=model.get_num_layers(parallel),
        hidden=model.get_hidden_size(),
        heads=model.get_num_attention_heads(parallel),
        kv_heads=model.get_num_kv_heads(parallel),
        head_dim=model.get_head_size(),
        intermediate=_mlp_width(config) // ranks,
        vocab=model.get_vocab_size(),
        weight_bytes=model.dtype.itemsize,
        kv_bytes=_kv_itemsize(config),
        dtype=dtype,
    )


def _mlp_width(config: VllmConfig) -> int:
    """Width according to :class:`Geometry`; where it does not understand the model, ``intermediate_size``, or 0."""
    try:
        return Geometry.from_config(config.model_config.hf_config.to_dict()).intermediate
    except ConfigError:
        return int(getattr(config.model_config.hf_text_config, "intermediate_size", 0))


def _kv_itemsize(config: VllmConfig) -> int:
    cache_dtype = config.cache_config.cache_dtype
    return int(config.model_config.dtype.itemsize) if cache_dtype in ("auto", "float32", "bfloat16", "float16") else 1


def header_of(
    settings: Settings, engine: EngineSpec, core: str, policy: str, device_blocks: int, host_blocks: int
) -> Header:
    """The header of this engine core's trace."""
    now_s, clock_s = time.time(), time.monotonic()
    header = Header.recorded_on(
        engine,
        run_id=core,
        source=settings.source,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now_s)),
        engine=f"vllm {vllm.__version__}",
        device_blocks=device_blocks,
        host_blocks=host_blocks,
        policy=policy,
    )
    return replace(header, seed=settings.seed, clock_s=clock_s - now_s % 1)  # created is of whole seconds
