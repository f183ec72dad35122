"""What was tested beside the plugin and with it, and warnings of what was not. None of it is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TESTED_BESIDE = ("ExampleConnector", "DecodeBenchConnector", "NixlConnector", "LMCacheMPConnector")
"""Connectors that were tested beside kvpolicy's."""
TESTED_MULTIMODAL = {"LlavaForConditionalGeneration": "", "Qwen2VLForConditionalGeneration": "videos"}
"""Architectures that were tested with pictures, and what else they take, which was not."""

logger = logging.getLogger(f"vllm.{__name__}")


def warn_untested_connectors(names: Iterable[str]) -> None:
    """Log a warning where connectors serve beside kvpolicy's that were not tested there."""
    untested = [name for name in names if name not in TESTED_BESIDE]
    if untested:
        logger.warning(
            "kvpolicy: %s was not tested beside it; tested are %s", ", ".join(untested), ", ".join(TESTED_BESIDE)
        )


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


def warn_untested_inputs(config: VllmConfig) -> None:
    """Log a warning where the model takes inputs that were not tested."""
    untested = untested_inputs(config)
    if untested:
        logger.warning("kvpolicy: %s", untested)


def warn_untested_states() -> None:
    """Log that blocks are held until they are saved."""
    logger.warning(
        "kvpolicy: states on vLLM's model runner v2 were never tested on a GPU; the blocks of a preempted request are "
        "held until they are saved, for a step or more, in which nobody can have them"
    )
