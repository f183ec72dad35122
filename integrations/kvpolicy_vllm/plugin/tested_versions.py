"""What was tested with real engines of which vLLM, of what a server has. Called by
:mod:`kvpolicy_vllm.plugin.tested_setups`.

Features are called as in docs/features.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvpolicy.caching import spec as caching
from kvpolicy_vllm.plugin.connector_list import connectors_beside, own_settings
from kvpolicy_vllm.plugin.kv_layout import kind_of, state_kind
from kvpolicy_vllm.plugin.order_limits import ranks_itself
from kvpolicy_vllm.plugin.versions import engine_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

COMPLETE = (0, 32)
"""The vLLM with whose engines all was tested that is called tested."""
LAYERS = {
    "SlidingWindowSpec": "sliding windows",
    "ChunkedLocalAttentionSpec": "chunked local attention",
    "MLAAttentionSpec": "MLA",
}
"""By vLLM's specification of a group of their own."""
STATES = {"MAMBA2": "Mamba2 states", "GDN_ATTN": "GDN states"}
DRAFTS = {
    "ngram": "speculation by ngram",
    "draft_model": "speculation by a draft model",
    "eagle": "speculation by EAGLE",
    "eagle3": "speculation by EAGLE-3",
    "mtp": "speculation by MTP",
}
"""By the method of ``--speculative-config``."""
MLA_DRAFTS = "speculation by MTP on MLA"
OTHERS = (
    "full attention", "windows stored whole", "chunks stored whole", "MoE", "fp8 KV cache", "LoRA", "multimodal",
    "prefix caching", "priority scheduling", "orders of service", "prompts in host memory",
    "prompts in files, beyond restarts", "tensor parallelism", "data parallelism", "KV events",
    "beside ExampleConnector", "beside DecodeBenchConnector", "beside NixlConnector", "beside LMCacheMPConnector",
)  # fmt: skip
TESTED = {
    COMPLETE: frozenset({*LAYERS.values(), *STATES.values(), *DRAFTS.values(), MLA_DRAFTS, *OTHERS}),
    (0, 31): frozenset(
        {
            "full attention", "windows stored whole", "MoE", "fp8 KV cache", "LoRA", "prefix caching",
            "priority scheduling", "orders of service", "tensor parallelism", "data parallelism", "KV events",
            "beside ExampleConnector", "beside DecodeBenchConnector",
        }
    ),
    (0, 28): frozenset(
        {
            "full attention", "MoE", "fp8 KV cache", "LoRA", "prefix caching", "priority scheduling",
            "tensor parallelism",
        }
    ),
    (0, 24): frozenset(
        {
            "full attention", "MoE", "fp8 KV cache", "LoRA", "prefix caching", "priority scheduling",
            "tensor parallelism",
        }
    ),
}  # fmt: skip
"""Features that tests with real engines passed, by the version of vLLM. Of others no engine was tested, but their
schedulers."""


def untested_version(config: VllmConfig, kv_cache: KVCacheConfig | None) -> str:
    """What was never tested with an engine of the running vLLM, though it was with one of another version; empty where
    there is nothing. ``kv_cache``: None where not known."""
    version = engine_version(allow_untested=True)
    if version == COMPLETE:
        return ""
    here: frozenset[str] = TESTED.get(version, frozenset())
    untested = [name for name in features_of(config, kv_cache) if name in TESTED[COMPLETE] - here]
    if not untested:
        return ""
    each = "it was" if len(untested) == 1 else "each by itself was"
    running, complete = (".".join(map(str, one)) for one in (version, COMPLETE))
    return f"never tested with an engine of vLLM {running}: {', '.join(untested)}; with one of {complete} {each}"


def features_of(config: VllmConfig, kv_cache: KVCacheConfig | None) -> list[str]:
    """The features that a server has by its settings and layers, each once."""
    model, parallel, transfer = config.model_config, config.parallel_config, config.kv_transfer_config
    own: Mapping[str, Any] = {} if transfer is None else own_settings(transfer)
    multimodal = model.multimodal_config
    has = (
        (model.get_num_experts() > 0, "MoE"),
        (str(config.cache_config.cache_dtype).startswith("fp8"), "fp8 KV cache"),
        (config.lora_config is not None, "LoRA"),
        (multimodal is not None and not multimodal.language_model_only, "multimodal"),
        (bool(config.cache_config.enable_prefix_caching), "prefix caching"),
        (config.scheduler_config.policy == "priority", "priority scheduling"),
        (ranks_itself(config), "orders of service"),
        (own.get("cache", caching.OFF) != caching.OFF, "prompts in host memory"),
        (own.get("cache_files") is not None, "prompts in files, beyond restarts"),
        (parallel.tensor_parallel_size > 1, "tensor parallelism"),
        (parallel.data_parallel_size > 1, "data parallelism"),
        (config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events, "KV events"),
    )
    layers = [] if kv_cache is None else [layers_of(group) for group in kv_cache.kv_cache_groups]
    found = [*layers, *(name for is_there, name in has if is_there), *_drafts(config)]
    return list(dict.fromkeys([*found, *(f"beside {name}" for name in connectors_beside(config))]))


def _drafts(config: VllmConfig) -> Iterator[str]:
    if (speculation := config.speculative_config) is not None:
        method = str(speculation.method)
        yield MLA_DRAFTS if config.model_config.use_mla and method == "mtp" else DRAFTS.get(method, method)


def layers_of(group: Any) -> str:
    """The kind of the group's layers; vLLM's name of one that is not served."""
    if state := state_kind(group):
        return STATES.get(state, state)
    spec, kind = group.kv_cache_spec, kind_of(group)
    if kind != "FullAttentionSpec":
        return LAYERS.get(kind, kind)
    if getattr(spec, "sliding_window", None):
        return "windows stored whole"
    return "chunks stored whole" if getattr(spec, "attention_chunk_size", None) else "full attention"
