"""A model that takes pictures: a request says the same after a swap, bit for bit, wherever in its picture it was forced
out, and nobody is given what another picture came to. Real engines."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import families, harness, vision
from tests.vllm.test_families import BOUNDARY, ENGINE, INSIDE, LATER, OUTPUT
from tests.vllm.test_features import assert_same, assert_swapped

BEFORE, AFTER = 60, 26
"""Tokens of text around a picture."""
IN_PICTURE = 80
"""Computed tokens after the first step: within the picture, and within a block."""
BLOCK = 32
CASES: dict[str, dict[str, Any]] = {
    "undisturbed": {"tokens": [], "kind": "swap"},
    "at a block's end": {"tokens": [BOUNDARY], "kind": "swap"},
    "inside a block": {"tokens": [INSIDE], "kind": "swap"},
    "twice": {"tokens": [INSIDE, LATER], "kind": "swap"},
    "within its picture": {"tokens": [IN_PICTURE], "kind": "swap"},
    "within its picture and later": {"tokens": [IN_PICTURE, LATER], "kind": "swap"},
    "its load fails": {"tokens": [INSIDE], "kind": "swap", "failing": True},
    "recomputed": {"tokens": [INSIDE], "kind": "recompute"},
}
SWAPPED = ["at a block's end", "inside a block", "twice", "within its picture", "within its picture and later"]
VISION = ENGINE | {
    "max_num_batched_tokens": IN_PICTURE, "block_size": BLOCK, "enable_prefix_caching": False,
    "skip_tokenizer_init": False,
}  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.feature("multimodal")]


def asked(name: str, picture: int, max_tokens: int = OUTPUT) -> dict[str, Any]:
    """The same text with any picture."""
    rng, model = random.Random(5), vision.MODELS[name]
    before, after = ([rng.randrange(10, 2000) for _ in range(count)] for count in (BEFORE, AFTER))
    marks = [vision.TOKEN_OF[mark] for mark in model.before]
    prompt = [*before[len(marks) :], *marks, vision.TOKEN_OF[model.picture], *after]
    return {"prompt": prompt, "picture": picture, "max_tokens": max_tokens}


@pytest.fixture(scope="module", params=["llava", "qwen2-vl"])
def name(request: pytest.FixtureRequest) -> str:
    families.skip_without_torchvision()
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(vision.make(name, tmp_path_factory.mktemp("vision")))


@pytest.fixture(scope="module")
def result(name: str, model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases in one engine."""
    cases = CASES | {"another picture": {"tokens": [], "kind": "swap", "request": asked(name, 2)}}
    job = {
        "scenario": "interrupted", "model": model, "cases": cases, "request": asked(name, 1), "engine": VISION,
        "plugin": harness.plugin("always-swap"),
    }  # fmt: skip
    return harness.run(job, tmp_path_factory.mktemp("interrupted"), torchvision=True)


@pytest.mark.parametrize("case", SWAPPED)
def test_a_swap_changes_no_bit(case: str, result: dict[str, Any]) -> None:
    reference = result["cases"]["undisturbed"]
    assert len(set(reference["tokens"])) > 30, "a text that repeats itself may hide a wrong KV entry"
    assert_swapped(result["cases"][case], CASES[case]["tokens"])
    assert_same(result["cases"][case], reference)


def test_a_picture_matters(result: dict[str, Any]) -> None:
    """Otherwise its KV might be anything."""
    assert result["cases"]["another picture"]["tokens"] != result["cases"]["undisturbed"]["tokens"]


def test_a_failed_load_is_a_recompute(result: dict[str, Any]) -> None:
    found, recomputed = result["cases"]["its load fails"], result["cases"]["recomputed"]
    assert harness.total(found["stats"], "fallbacks", reason="load_failed") == 1
    assert harness.total(found["stats"], "loaded_tokens") == 0
    assert_same(found, recomputed)
    harness.assert_nothing_left(result)


def test_the_same_text_with_another_picture_shares_nothing(name: str, model: str, tmp_path: Path) -> None:
    """Blocks of the prefix cache, and of host memory, are found by their tokens and by the pictures among these. Memory
    for three requests of six."""
    requests = [asked(name, picture, max_tokens=70) for picture in (1, 2, 3, 1, 2, 3)]
    caching = VISION | {"enable_prefix_caching": True, "max_num_seqs": 8}
    plenty = {"scenario": "plain", "model": model, "requests": requests, "engine": caching, "gaps": True}
    reference = harness.run(plenty, tmp_path, torchvision=True)
    assert len({tuple(text) for text in reference["tokens"].values()}) == 3
    scarce = plenty | {"scenario": "album", "engine": caching | {"num_gpu_blocks_override": 23}}
    result = harness.run(scarce | {"plugin": harness.plugin("always-swap")}, tmp_path, torchvision=True)
    harness.assert_exact(reference, result)
    harness.assert_nothing_left(result)
    assert harness.total(result["stats"], "loaded_tokens") > 0
    shared = result["shared"]
    assert any(index == 0 and len(pictures) > 1 for index, _, pictures in shared), "not even the text before it"
    assert any(index > 0 for index, _, _ in shared), "nobody shared a block with somebody of the same picture"
    assert all(len(pictures) == 1 for index, _, pictures in shared if index >= BEFORE // BLOCK)
