"""The layers that are served, and the refusal of a KV cache with others, which names what would be right. Called by
:mod:`kvpolicy_vllm.plugin.config_refusals`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpolicy.errors import InputError
from kvpolicy_vllm.plugin.connector_list import has_set
from kvpolicy_vllm.plugin.kv_layout import (
    FULL_ATTENTION,
    is_plain,
    kind_of,
    pieces,
    says_where_layers_lie,
    state_kind,
)
from kvpolicy_vllm.plugin.order_limits import order_of, ranks_itself
from kvpolicy_vllm.plugin.pinned_blocks import overwrites_before_saves
from kvpolicy_vllm.plugin.state_steps import beyond_a_block_of_states
from kvpolicy_vllm.plugin.versions import (
    WITHIN_A_BLOCK_OF_STATES,
    WITHOUT_PLUGIN,
    UnsupportedEngine,
    allows_untested,
    engine_version,
    older_message,
    platform,
    refuse_older,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

SERVED_GROUPS = (*FULL_ATTENTION, "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MambaSpec")
"""Specifications of KV cache groups, by vLLM's names."""
SERVED_STATES = ("MAMBA2", "GDN_ATTN")
STORED_WHOLE = {"SlidingWindowSpec", "ChunkedLocalAttentionSpec"}
"""Those of which vLLM stores every token with ``--disable-hybrid-kv-cache-manager``, where they are beside full
attention and nothing else."""
UNLIKE_LAYERS = "UniformTypeKVCacheSpecs"
"""That of one group of layers that attend alike, and whose keys and values differ in shape or type."""
LATENT_BESIDE_STATES = "latent KV beside states, as the layers of Kimi Linear and Kimi K3 keep"
"""Their states (KDA) have the same name in vLLM as those of GDN layers."""


def refuse_kv_cache(config: VllmConfig, kv_cache: KVCacheConfig) -> None:
    """Raise :class:`UnsupportedEngine` for the first layers that are not served, as vLLM has grouped them."""
    for group in kv_cache.kv_cache_groups:
        problem = _problem_of(group)
        if problem:
            drafts = kind_of(group) == UNLIKE_LAYERS and getattr(config, "speculative_config", None) is not None
            instead = "leave --speculative-config out, whose drafter may have such layers, or " * drafts
            raise UnsupportedEngine(f"kvpolicy does not serve {problem}; {instead}{WITHOUT_PLUGIN}")
    if is_plain(kv_cache):
        return
    kinds = {kind_of(group) for group in kv_cache.kv_cache_groups}
    if {"MLAAttentionSpec", "MambaSpec"} <= kinds:
        raise UnsupportedEngine(f"kvpolicy does not serve {LATENT_BESIDE_STATES}; {WITHOUT_PLUGIN}")
    named = f"{len(kv_cache.kv_cache_groups)} KV cache groups ({', '.join(sorted(kinds))})"
    instead = WITHOUT_PLUGIN
    if {"FullAttentionSpec"} < kinds <= {"FullAttentionSpec"} | STORED_WHOLE:
        instead = "install 0.32, or give --disable-hybrid-kv-cache-manager, which takes more memory"
    refuse_older(config, named, instead)
    if not all(hasattr(tensor, "layers") for tensor in kv_cache.kv_cache_tensors):  # a build without a version
        raise UnsupportedEngine(older_message(named, instead))
    if overwrites_before_saves(config, kv_cache):
        refuse_overwritten(config, f"{named} of several precisions, or with states,")
    may_end = platform().is_cpu() and engine_version(allow_untested=allows_untested(config)) >= WITHIN_A_BLOCK_OF_STATES
    if may_end and (problem := beyond_a_block_of_states(config, kv_cache)):
        raise UnsupportedEngine(problem)


def refuse_layout(kv_cache: KVCacheConfig) -> None:
    """Raise :class:`UnsupportedEngine` where a block of a layer is not whole in device memory, as where vLLM puts the
    heads (H) around the blocks or the layers. With one KV head every layout has it whole."""
    if not says_where_layers_lie(kv_cache):
        return
    try:
        pieces(kv_cache)
    except InputError as error:
        raise UnsupportedEngine(
            f"kvpolicy does not serve this layout of the KV cache ({error}); where VLLM_KV_CACHE_LAYOUT is set, set it "
            f"to one in which layers (L) and blocks (B) come first, as LBHNC or BLHNC, or {WITHOUT_PLUGIN}"
        ) from error


def _problem_of(group: Any) -> str:
    """What is not served about a KV cache group; empty where all is."""
    spec, kind = group.kv_cache_spec, kind_of(group)
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        return f"a KV cache group ({kind}) that is in host memory or may not be transferred"
    if kind not in SERVED_GROUPS:
        return f"KV cache groups of the kind {kind}, only {', '.join(SERVED_GROUPS)}"
    if not (state := state_kind(group)):
        return ""
    if state not in SERVED_STATES:
        return f"states of the kind {state}, only {', '.join(SERVED_STATES)}"
    if spec.mamba_cache_mode not in ("none", "align"):
        return f"--mamba-cache-mode {spec.mamba_cache_mode}, only none and align"
    return ""


def refuse_overwritten(config: VllmConfig, what: str) -> None:
    """Refuse to save from blocks that a step overwrites before it calls a connector, unless the settings have it, in an
    order of service that reckons with blocks which come free late."""
    if not has_set(config, "allow_untested_states_v2"):
        raise UnsupportedEngine(
            f"kvpolicy does not serve {what} on vLLM's model runner v2, which overwrites blocks before they can be "
            'saved; set VLLM_USE_V2_MODEL_RUNNER=0, or "allow_untested_states_v2": true in kv_connector_extra_config '
            "(kvpolicy's commands: --allow-untested-states-v2): blocks are held until they are saved, which was never "
            "tested on a GPU"
        )
    if ranks_itself(config):
        raise UnsupportedEngine(
            f"order {order_of(config)}: reckons with blocks that come free at once, and on vLLM's model runner v2 "
            "those of a model with states are held until they are saved: leave the order out, or set "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )
