"""What was tested beside the plugin and with it, and warnings of what was not. None of it is refused."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TESTED_BESIDE = ("ExampleConnector", "DecodeBenchConnector", "NixlConnector", "LMCacheMPConnector")
"""Connectors that were tested beside kvpolicy's."""
TESTED_MULTIMODAL = {"LlavaForConditionalGeneration": "", "Qwen2VLForConditionalGeneration": "videos"}
"""Architectures that were tested with pictures, and what else they take, which was not."""
TESTED_WITH_FP8 = "full attention and windows"
"""Layers whose keys and values in fp8 were compared after a swap."""

logger = logging.getLogger(f"vllm.{__name__}")


def warn_untested_connectors(names: Sequence[str], several_tables: bool) -> None:
    """Log a warning where connectors serve beside kvpolicy's that were not tested there. ``several_tables``: whether
    the model has several block tables, or windows."""
    untested = [name for name in names if name not in TESTED_BESIDE]
    if untested:
        logger.warning(
            "kvpolicy: %s was not tested beside it; tested are %s", ", ".join(untested), ", ".join(TESTED_BESIDE)
        )
    elif names and several_tables:
        logger.warning(
            "kvpolicy: %s was tested beside it with one KV cache group of full attention only, and this model has "
            "several, or windows", ", ".join(names),
        )  # fmt: skip


def untested_setup(config: VllmConfig) -> str:
    """What was not tested of a model with these settings; empty where all was."""
    return "; ".join(filter(None, (untested_inputs(config), untested_precision(config))))


def warn_untested_setup(config: VllmConfig) -> None:
    """Log a warning where the model, or a setting, was not tested."""
    untested = untested_setup(config)
    if untested:
        logger.warning("kvpolicy: %s", untested)


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


def warn_untested_states() -> None:
    """Log that blocks are held until they are saved."""
    logger.warning(
        "kvpolicy: states on vLLM's model runner v2 were never tested on a GPU; the blocks of a preempted request are "
        "held until they are saved, for a step or more, in which nobody can have them"
    )
