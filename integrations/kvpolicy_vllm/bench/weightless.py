"""The KV cache of a model whose layers are made without weights, on torch's meta device, as the first rank has it.

The check and the inspection before a profile call it; it imports vLLM, and sets its process up as a rank of an engine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    get_tp_group,
    init_distributed_environment,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.v1.attention.backends import utils
from vllm.v1.core import single_type_kv_cache_manager
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.eagle import EagleProposer

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

PLENTY = 1 << 50
"""Bytes of memory that the layout is made for; only the bytes of a block are read from it."""
PLANNING, UNTIL_0_32 = "vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils"
"""Where vLLM makes groups of layers: from 0.33 on, and before."""
planning = import_module(PLANNING if find_spec(PLANNING) else UNTIL_0_32)


def laid_out(config: VllmConfig) -> KVCacheConfig:
    """The KV cache of the model's layers and of its drafter's as the server's first rank has it, without memory."""
    dtype, parallel = torch.get_default_dtype(), config.parallel_config
    with _one_core(parallel), set_current_vllm_config(config), _first_of(int(parallel.tensor_parallel_size)):
        torch.set_default_dtype(config.model_config.dtype)
        try:
            with torch.device("meta"):
                initialize_model(config)
                _make_drafter(config)
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


def _make_drafter(config: VllmConfig) -> None:
    """Add the layers of a drafter that has keys and values of its own, as a draft model, EAGLE's head and MTP have.

    They have a configuration of their own, which vLLM's proposer makes. Only versions whose drafters are served are
    asked for it.
    """
    speculation = config.speculative_config
    if speculation is None or speculation.draft_model_config is None or speculation.method == "ngram":
        return
    if speculation.use_gemma4_mtp() or speculation.use_step3p5_mtp():
        raise NotImplementedError(f"the layers of {speculation.draft_model_config.model} that draft")
    meta = torch.device("meta")
    if speculation.uses_draft_model():
        drafting = DraftModelProposer(config, meta)._create_draft_vllm_config()
        initialize_model(drafting, prefix="draft_model")
    else:
        drafting = EagleProposer(config, meta)._create_draft_vllm_config()
        initialize_model(drafting, model_config=speculation.draft_model_config)


@contextmanager
def _one_core(parallel: ParallelConfig) -> Iterator[None]:
    """Data-parallel engine cores have the same layers each. vLLM would wait for the others when it makes this process's
    group, and none is there."""
    cores, parallel.data_parallel_size = parallel.data_parallel_size, 1
    try:
        yield
    finally:
        parallel.data_parallel_size = cores


@contextmanager
def _first_of(ranks: int) -> Iterator[None]:
    """Layers ask their group how many ranks share them, and keep the first one's heads and states. They say nothing to
    the others while they are made, so there need be none: this process is a group of its own. vLLM makes the group of
    experts for a model that has some, and for no other: so each model has groups of its own."""
    with tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, (Path(folder) / "rendezvous").as_uri(), 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    get_tp_group().world_size = ranks
    try:
        yield
    finally:
        destroy_model_parallel()
        destroy_distributed_environment()


def _prepare(config: VllmConfig, layers: Iterable[Any], specs: Iterable[Any]) -> None:
    """What an engine core does before it makes groups: from vLLM 0.28 and 0.29 on."""
    if register := getattr(single_type_kv_cache_manager, "register_all_kvcache_specs", None):
        register(config)
    if resolve := getattr(utils, "resolve_kv_cache_layout", None):
        backends = {layer.get_attn_backend() for layer in layers}
        names = [layout.name for layout in utils.get_supported_kv_cache_layouts(list(backends))]
        resolve(config, [names], specs)
