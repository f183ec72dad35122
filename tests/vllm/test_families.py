"""A request of every family that is served says the same after a swap, bit for bit, however long it was and whatever
the device's memory held in between. Real engines."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.vllm import families, harness

PROMPT, OUTPUT = 150, 150
BOUNDARY, INSIDE, LATER, IN_PREFILL = 256, 229, 291, 64
"""Computed tokens at a preemption: at the end of a block, whatever its size, or within one."""
CASES: dict[str, dict[str, Any]] = {
    "undisturbed": {"tokens": [], "kind": "swap"},
    "at a block's end": {"tokens": [BOUNDARY], "kind": "swap"},
    "inside a block": {"tokens": [INSIDE], "kind": "swap"},
    "twice": {"tokens": [INSIDE, LATER], "kind": "swap"},
    "in its prefill": {"tokens": [IN_PREFILL], "kind": "swap"},
    "its load fails": {"tokens": [INSIDE], "kind": "swap", "failing": True},
    "recomputed": {"tokens": [INSIDE], "kind": "recompute"},
}
SWAPPED = ["at a block's end", "inside a block", "twice", "in its prefill"]
ENGINE = {"max_model_len": 512, "max_num_seqs": 4, "num_gpu_blocks_override": 120}


def asked() -> dict[str, Any]:
    rng = random.Random(5)
    return {"prompt": [rng.randrange(10, 2000) for _ in range(PROMPT)], "max_tokens": OUTPUT}


def marked(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.feature(families.FAMILIES[name].feature))


@pytest.fixture(scope="module", params=[*map(marked, families.FAMILIES)])
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases of a family in one engine."""
    name, folder = request.param, tmp_path_factory.mktemp("family")
    family = families.FAMILIES[name]
    families.skip_unless_served(family)
    # Where vLLM computes each prompt whole there is no preemption in a prefill.
    chunks = {"max_num_batched_tokens": 64 if family.chunks else 512}
    job = {
        "scenario": "interrupted", "model": str(families.make(name, folder / "model")), "cases": CASES,
        "request": asked(), "engine": ENGINE | chunks | family.engine | {"dtype": family.dtype},
        "plugin": harness.plugin("always-swap"), "family": name,
    }  # fmt: skip
    return harness.run(job, folder, torchvision=family.torchvision) | {"family": name}


def test_its_layers_are_of_the_kinds_that_it_stands_for(result: dict[str, Any]) -> None:
    assert tuple(result["groups"]) == families.FAMILIES[result["family"]].groups


def test_its_text_is_no_repetition(result: dict[str, Any]) -> None:
    """Otherwise a wrong KV entry might change nothing."""
    assert len(set(result["cases"]["undisturbed"]["tokens"])) > 30


@pytest.mark.parametrize("case", SWAPPED)
def test_a_swap_changes_no_bit(case: str, result: dict[str, Any]) -> None:
    found, reference = result["cases"][case], result["cases"]["undisturbed"]
    wanted = CASES[case]["tokens"]
    if case == "in its prefill" and not families.FAMILIES[result["family"]].chunks:
        pytest.skip("vLLM computes this family's prompts whole")
    assert found["out_at"] == wanted
    assert harness.total(found["stats"], "loaded_tokens") == sum(wanted)
    assert harness.total(found["stats"], "fallbacks") == 0
    assert found["tokens"] == reference["tokens"]
    assert found["logprobs"] == reference["logprobs"]


def test_a_failed_load_is_a_recompute(result: dict[str, Any]) -> None:
    found, recomputed = result["cases"]["its load fails"], result["cases"]["recomputed"]
    assert harness.total(found["stats"], "fallbacks", reason="load_failed") == 1
    assert harness.total(found["stats"], "loaded_tokens") == 0
    assert (found["tokens"], found["logprobs"]) == (recomputed["tokens"], recomputed["logprobs"])


def test_nothing_is_left(result: dict[str, Any]) -> None:
    harness.assert_nothing_left(result)
