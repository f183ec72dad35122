"""What is asked of an engine, from what JSON can hold: prompts, sampling parameters and adapters."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

EMBEDDING_SPREAD = 0.15
PICTURE_PIXELS = 112
"""Width and height."""


def prompt_of(request: dict[str, Any]) -> dict[str, Any]:
    """``prompt``: token ids, with ``picture``: the seed of a picture that one of them stands for; or ``embeds``:
    [tokens, width, seed] of embeddings drawn in their place."""
    if "picture" in request:
        return {"prompt_token_ids": request["prompt"], "multi_modal_data": {"image": picture(request["picture"])}}
    if "embeds" not in request:
        return {"prompt_token_ids": request["prompt"]}
    tokens, width, seed = request["embeds"]
    drawn = torch.Generator().manual_seed(seed)
    return {"prompt_embeds": torch.randn(tokens, width, generator=drawn) * EMBEDDING_SPREAD}


def picture(seed: int) -> Image.Image:
    """Noise in colour."""
    drawn = np.random.default_rng(seed).integers(0, 256, (PICTURE_PIXELS, PICTURE_PIXELS, 3), dtype=np.uint8)
    return Image.fromarray(drawn)


def parameters_of(request: dict[str, Any], logprobs: int | None = None) -> SamplingParams:
    """``pattern``: a regular expression that the answer follows; ``says``: of itself, what kvpolicy reads."""
    pattern, says = request.get("pattern"), request.get("says")
    return SamplingParams(
        temperature=request.get("temperature", 0.0),
        seed=request.get("seed"),
        n=request.get("n", 1),
        max_tokens=request["max_tokens"],
        ignore_eos=True,
        detokenize=False,
        logprobs=logprobs,
        prompt_logprobs=request.get("prompt_logprobs"),
        structured_outputs=None if pattern is None else StructuredOutputsParams(regex=pattern),
        extra_args=None if says is None else {"kv_transfer_params": {"kvpolicy": says}},
    )


def adapter_of(request: dict[str, Any]) -> LoRARequest | None:
    """``adapter``: [number, folder]."""
    if "adapter" not in request:
        return None
    number, folder = request["adapter"]
    return LoRARequest(f"adapter-{number}", number, folder)
