"""Small models with random weights that take pictures, made from a seed; nothing is downloaded. Their shapes are those
of the families they are named after: an encoder of pictures before a small text model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from kvpolicy_vllm.bench.models import make_tokenizer
from tests.vllm import families
from tests.vllm.asking import PICTURE_PIXELS

PATCH_PIXELS = 14
PICTURE_TOKENS = (PICTURE_PIXELS // PATCH_PIXELS) ** 2
MARKS = ("<image>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
"""Tokens after those of the text, of either family."""
TOKEN_OF = {mark: families.VOCABULARY + number for number, mark in enumerate(MARKS)}
VOCABULARY = families.VOCABULARY + 64


@dataclass(frozen=True, slots=True)
class VisionModel:
    """How a family is made. Every picture comes to :data:`PICTURE_TOKENS` tokens."""

    make: Callable[[], Any]
    """The model, whose weights are drawn later."""
    files: dict[str, dict[str, Any]]
    """What prepares pictures, by file."""
    before: tuple[str, ...]
    """Marks that stand in a prompt before its picture's."""
    picture: str
    """The mark that stands for a picture."""
    renamed: tuple[str, str] = ("", "")
    """A part of the names of its weights that vLLM 0.32 does not know as transformers writes it, and its own."""


def llava() -> LlavaForConditionalGeneration:
    encoder = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, image_size=PICTURE_PIXELS,
        patch_size=PATCH_PIXELS, projection_dim=64,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=encoder.to_dict(), text_config=families.llama().to_dict() | {"vocab_size": VOCABULARY},
        image_token_index=TOKEN_OF["<image>"], image_seq_length=PICTURE_TOKENS, tie_word_embeddings=False,
    )  # fmt: skip
    return LlavaForConditionalGeneration(config)


def qwen2_vl() -> Qwen2VLForConditionalGeneration:
    """Positions of its text go on from the sides of a picture, not from the number of its tokens."""
    turned = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
    text = families.COMMON | {"vocab_size": VOCABULARY, "num_hidden_layers": 4, "rope_parameters": turned}
    encoder = {
        "depth": 2, "embed_dim": 64, "hidden_size": families.COMMON["hidden_size"], "num_heads": 4, "mlp_ratio": 2,
        "patch_size": PATCH_PIXELS, "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    config = Qwen2VLConfig(
        text_config=text, vision_config=encoder, image_token_id=TOKEN_OF["<|image_pad|>"],
        video_token_id=TOKEN_OF["<|video_pad|>"], vision_start_token_id=TOKEN_OF["<|vision_start|>"],
        vision_end_token_id=TOKEN_OF["<|vision_end|>"], tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen2VLForConditionalGeneration(config)


SQUARE = {"height": PICTURE_PIXELS, "width": PICTURE_PIXELS}
NORMAL = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
# Four patches are one token: a picture is made as large as it has to be for as many tokens as LLaVA's.
LARGER = {
    "patch_size": PATCH_PIXELS, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 4 * PICTURE_PIXELS**2,
    "max_pixels": 4 * PICTURE_PIXELS**2,
}  # fmt: skip
MODELS = {
    "llava": VisionModel(
        llava,
        {
            "preprocessor_config.json": {
                "image_processor_type": "CLIPImageProcessor", "processor_class": "LlavaProcessor",
                "size": {"shortest_edge": PICTURE_PIXELS}, "crop_size": SQUARE,
            } | NORMAL,
            "processor_config.json": {
                "processor_class": "LlavaProcessor", "image_token": "<image>", "patch_size": PATCH_PIXELS,
                "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1,
            },
        },
        (),
        "<image>",
        ("vision_tower.", "vision_tower.vision_model."),
    ),
    "qwen2-vl": VisionModel(
        qwen2_vl,
        {
            "preprocessor_config.json": {
                "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor",
            } | LARGER | NORMAL,
            "video_preprocessor_config.json": {
                "video_processor_type": "Qwen2VLVideoProcessor", "processor_class": "Qwen2VLProcessor",
            } | LARGER | NORMAL,
        },
        ("<|vision_start|>",),
        "<|image_pad|>",
    ),
}  # fmt: skip


def make(name: str, folder: Path) -> Path:
    """Write the model, a tokenizer and what prepares pictures to ``folder``; return the folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name].make()
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=families.SPREAD)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    weights = {key.replace(*MODELS[name].renamed): weight for key, weight in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    tokenizer = make_tokenizer(4096)
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS]})
    tokenizer.save_pretrained(folder)
    for other, content in MODELS[name].files.items():
        (folder / other).write_text(json.dumps(content))
    return folder
