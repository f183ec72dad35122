"""What was tested beside the plugin and with it, and what was not: said by the check, and in the server's log. None of
it is refused."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from kvpolicy_vllm.plugin.connector_list import connectors_beside
from kvpolicy_vllm.plugin.kv_layout import WHOLE_WINDOWS, attends_to_everything, other_layers
from kvpolicy_vllm.plugin.pinned_blocks import overwrites_before_saves
from kvpolicy_vllm.plugin.tested_versions import DRAFTS, LAYERS, MLA_DRAFTS, STATES, features_of, untested_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

TESTED_BESIDE = ("ExampleConnector", "DecodeBenchConnector", "NixlConnector", "LMCacheMPConnector")
"""Connectors that were tested beside kvpolicy's."""
TESTED_WITH = {
    "windows": ("DecodeBenchConnector",),
    "chunks": ("DecodeBenchConnector",),
    "Mamba2 states": ("DecodeBenchConnector",),
    WHOLE_WINDOWS: ("ExampleConnector",),
}
"""Those of them that were tested with layers besides full attention, by :func:`other_layers`."""
TESTED_ALONE = {("DecodeBenchConnector", "Mamba2 states"): "it writes made-up values to the states of all that run"}
"""Those of which one request alone was tested with such layers, and why."""
TESTED_MULTIMODAL = {"LlavaForConditionalGeneration": "", "Qwen2VLForConditionalGeneration": "videos"}
"""Architectures that were tested with pictures, and what else they take, which was not."""
TESTED_WITH_FP8 = "full attention and windows"
"""Layers whose keys and values in fp8 were compared after a swap."""
OTHER_LAYERS = (*LAYERS.values(), *STATES.values(), "windows stored whole", "chunks stored whole")
"""All but those of full attention, by the names of :mod:`kvpolicy_vllm.plugin.tested_versions`, as what follows."""
TESTED_LAYERS: dict[str, tuple[str, ...]] = {
    "LoRA": (),
    "KV events": (),
    "data parallelism": (),
    **dict.fromkeys(DRAFTS.values(), ()),
    "speculation by ngram": ("sliding windows",),
    MLA_DRAFTS: ("MLA",),
}
"""Features that were tested with full attention, and with these layers besides."""

logger = logging.getLogger(f"vllm.{__name__}")


def untested_setup(config: VllmConfig, kv_cache: KVCacheConfig | None) -> str:
    """What was not tested of an engine with these settings; empty where all was. ``kv_cache``: None where not known."""
    parts = (
        untested_inputs(config),
        untested_precision(config),
        several_precisions(config),
        shared_layers(config),
        untested_drafts(config),
        untested_layers(config, kv_cache),
        untested_connectors(connectors_beside(config), kv_cache),
        untested_states(config, kv_cache),
        untested_kind_of_states(config),
        untested_version(config, kv_cache),
    )
    return "; ".join(filter(None, parts))


def warn_untested_setup(config: VllmConfig, kv_cache: KVCacheConfig | None) -> None:
    """Log a warning where the model, a setting or a connector was not tested, once in a process."""
    if untested := untested_setup(config, kv_cache):
        _warn_once(untested)


@cache
def _warn_once(untested: str) -> None:
    """vLLM makes several configurations of a server's flags."""
    logger.warning("kvpolicy: %s", untested)


def untested_connectors(names: Sequence[str], kv_cache: KVCacheConfig | None) -> str:
    """What was not tested of the connectors that serve beside kvpolicy's; empty where all was. ``kv_cache``: None where
    not known."""
    tested = ", ".join(TESTED_BESIDE)
    if untested := [name for name in names if name not in TESTED_BESIDE]:
        return f"{', '.join(untested)} was not tested beside it; tested are {tested}"
    if kv_cache is None or attends_to_everything(kv_cache):
        return ""
    kind = other_layers(kv_cache)
    said = [
        f"{name} was tested beside it with {kind} and one request alone: {why}"
        for (name, layers), why in TESTED_ALONE.items()
        if name in names and layers == kind
    ]
    others = [name for name in names if name not in TESTED_WITH.get(kind, ())]
    return "; ".join([_tested_with_others(others), *said] if others else said)


def _tested_with_others(names: Sequence[str]) -> str:
    """That these connectors were tested with other layers than the model's."""
    layers, here = "one KV cache group of full attention", "several, or windows, chunks, states or latent attention"
    if also := [kind for kind, connectors in TESTED_WITH.items() if set(names) <= set(connectors)]:
        layers, here = f"{layers}, with {' or with '.join(also)}", "others"
    return f"{', '.join(names)} was tested beside it with {layers} only, and this model has {here}"


def untested_inputs(config: VllmConfig) -> str:
    """What was not tested of a model that takes more than text; empty where all was."""
    multimodal = config.model_config.multimodal_config
    if multimodal is None or multimodal.language_model_only:
        return ""
    names = config.model_config.architectures
    untested = [name for name in names if name not in TESTED_MULTIMODAL]
    if untested:
        return (
            f"{', '.join(untested)} was not tested; of the models that take more than text, "
            f"{' and '.join(TESTED_MULTIMODAL)} were, with pictures"
        )
    others = [f"{name} was not tested with {TESTED_MULTIMODAL[name]}" for name in names if TESTED_MULTIMODAL[name]]
    return ", ".join(others)


def untested_precision(config: VllmConfig) -> str:
    """What was not tested of the precision of keys and values; empty where it was."""
    precision, model = str(config.cache_config.cache_dtype), config.model_config
    if not precision.startswith("fp8"):
        return ""
    kinds = (
        (model.use_mla, "latent attention"),
        (model.is_hybrid, "states beside attention"),
        (getattr(model, "attention_chunk_size", None) is not None, "attention within chunks"),
    )
    untested = [kind for has, kind in kinds if has]
    if not untested:
        return ""
    return f"--kv-cache-dtype {precision} was not tested with {' or '.join(untested)}; it was with {TESTED_WITH_FP8}"


def several_precisions(config: VllmConfig) -> str:
    """That layers keep keys and values in types of their own, which was not tested; empty where all have one."""
    cache, drafter = config.cache_config, getattr(config, "speculative_config", None)
    its_own = getattr(drafter, "kv_cache_dtype", None)
    flags = [
        "--kv-cache-dtype-skip-layers" * bool(getattr(cache, "kv_cache_dtype_skip_layers", None)),
        "kv_cache_dtype of --speculative-config" * (its_own not in (None, cache.cache_dtype)),
    ]
    named = " and ".join(filter(None, flags))
    return f"{named}: layers with keys and values of several types were not tested" if named else ""


def shared_layers(config: VllmConfig) -> str:
    """That layers have the keys and values of others, which was not tested; empty where none has."""
    shared = getattr(config.model_config.hf_text_config, "num_kv_shared_layers", None)
    return f"layers that share the KV of others were not tested (num_kv_shared_layers is {shared})" if shared else ""


def untested_drafts(config: VllmConfig) -> str:
    """What was not tested of how tokens are drafted; empty where all was. What is served goes by the method's name."""
    speculation = config.speculative_config
    of_several_modules = getattr(speculation, "use_multi_module_mtp", None)
    kinds = (
        (getattr(speculation, "parallel_drafting", False), "parallel_drafting, as of P-EAGLE and PARD,"),
        (of_several_modules is not None and of_several_modules(), "MTP of several modules"),
    )
    named = " and ".join(kind for is_there, kind in kinds if is_there)
    return f"--speculative-config: {named} was not tested" if named else ""


def untested_layers(config: VllmConfig, kv_cache: KVCacheConfig | None) -> str:
    """Which features were not tested with the model's layers, or its experts; empty where all were. ``kv_cache``: None
    where not known."""
    found = features_of(config, kv_cache)
    layers = [name for name in found if name in OTHER_LAYERS]
    parts = []
    for feature in (name for name in found if name in TESTED_LAYERS):
        others = [name for name in layers if name not in TESTED_LAYERS[feature]]
        if feature == "data parallelism" and "MoE" in found:
            others.append("experts")
        if others:
            parts.append(f"{feature} with {' or '.join(others)}")
    return f"not tested: {', '.join(parts)}" if parts else ""


def untested_states(config: VllmConfig, kv_cache: KVCacheConfig | None) -> str:
    """That blocks are held until they are saved; empty where they are not. ``kv_cache``: None where not known."""
    if kv_cache is None:
        held = config.model_config.is_hybrid and getattr(config, "use_v2_model_runner", False)
    else:
        held = overwrites_before_saves(config, kv_cache)
    if not held:
        return ""
    return (
        "states on vLLM's model runner v2 were never tested on a GPU; the blocks of a preempted request are held until "
        "they are saved, for a step or more, in which nobody can have them"
    )


def untested_kind_of_states(config: VllmConfig) -> str:
    """That the states are of a kind which was not tested, though vLLM calls them as one that was; else empty. Beside
    latent KV, as Kimi Linear has them unless that is switched off (``VLLM_MLA_DISABLE``), they are refused."""
    layers = getattr(config.model_config.hf_text_config, "linear_attn_config", None)
    return "KDA states were not tested (linear_attn_config); GDN states were" if layers else ""
