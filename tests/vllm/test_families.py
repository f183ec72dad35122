"""A request of every family that is served says the same after a swap, bit for bit, however long it was and whatever
the device's memory held in between. Real engines."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.feature_record import FIGURES
from tests.vllm import families, harness

PROMPT, OUTPUT, SEED = 150, 150, 5
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
LAST_BITS = 2e-5
"""Of a log-probability in float32."""
SWAPPED = ["at a block's end", "inside a block", "twice", "in its prefill"]
ENGINE = {"max_model_len": 512, "max_num_seqs": 4, "num_gpu_blocks_override": 120, "max_num_batched_tokens": 64}
"""Where vLLM computes prompts whole it raises the token budget by itself."""


def asked(seed: int = SEED) -> dict[str, Any]:
    rng = random.Random(seed)
    return {"prompt": [rng.randrange(10, 2000) for _ in range(PROMPT)], "max_tokens": OUTPUT}


COMPARED = families.FAMILIES | {name: families.PLAIN[name] for name in ("llama", "llama, bfloat16")}
"""With full attention alone in both types, beside which recomputes of the others are to be seen."""


LIKE_OTHERS = ("gpt-oss, windows stored whole", "llama-4, chunks stored whole", "glm-4.7")
"""Families whose layers another one has as well: these are of the long suite alone."""


def marked(name: str) -> Any:
    slow = [pytest.mark.slow] if name in LIKE_OTHERS else []
    return pytest.param(name, marks=[pytest.mark.feature(COMPARED[name].feature), *slow])


@pytest.fixture(scope="module", params=[*map(marked, COMPARED)])
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases of a family in one engine."""
    name, folder = request.param, tmp_path_factory.mktemp("family")
    family = COMPARED[name]
    families.skip_unless_served(family)
    job = {
        "scenario": "interrupted", "model": str(families.make(name, folder / "model")), "cases": CASES,
        "request": asked(), "engine": ENGINE | family.engine | {"dtype": family.dtype},
        "plugin": harness.plugin("always-swap"), "family": name,
    }  # fmt: skip
    return harness.run(job, folder, torchvision=family.torchvision) | {"family": name}


def test_its_layers_are_of_the_kinds_that_it_stands_for(result: dict[str, Any]) -> None:
    assert tuple(result["groups"]) == COMPARED[result["family"]].groups


def test_its_text_is_no_repetition(result: dict[str, Any]) -> None:
    """Otherwise a wrong KV entry might change nothing."""
    assert len(set(result["cases"]["undisturbed"]["tokens"])) > 30


Record = Callable[[str, object], None]
"""pytest's `record_property`; what is told by it gets into the table of docs/model-families.md."""


@pytest.mark.parametrize("case", SWAPPED)
def test_a_swap_changes_no_bit(case: str, result: dict[str, Any], record_property: Record) -> None:
    found, reference = result["cases"][case], result["cases"]["undisturbed"]
    wanted = CASES[case]["tokens"]
    if case == "in its prefill" and not result["chunks"]:
        pytest.skip("vLLM computes this family's prompts whole on this machine")
    assert found["out_at"] == wanted
    assert harness.total(found["stats"], "loaded_tokens") == sum(wanted)
    assert harness.total(found["stats"], "fallbacks") == 0
    assert found["tokens"] == reference["tokens"]
    assert found["logprobs"] == reference["logprobs"]
    record_property(FIGURES, figures(result["family"], case, "swap", found, reference))


def test_a_failed_load_is_a_recompute(result: dict[str, Any]) -> None:
    found, recomputed = result["cases"]["its load fails"], result["cases"]["recomputed"]
    assert harness.total(found["stats"], "fallbacks", reason="load_failed") == 1
    assert harness.total(found["stats"], "loaded_tokens") == 0
    assert (found["tokens"], found["logprobs"]) == (recomputed["tokens"], recomputed["logprobs"])


def test_a_recompute_in_float32_says_the_same(result: dict[str, Any], record_property: Record) -> None:
    """Up to the last bits, as its tokens are computed in other groups than before. In bfloat16 it need not."""
    found, reference = (result["cases"][case] for case in ("recomputed", "undisturbed"))
    assert found["out_at"] == [INSIDE] and harness.total(found["stats"], "loaded_tokens") == 0
    record_property(FIGURES, figures(result["family"], "recomputed", "recompute", found, reference))
    same, difference = compared(found, reference)
    if COMPARED[result["family"]].dtype == "float32":
        assert same == OUTPUT and difference <= LAST_BITS


LENGTHS = ((155,), (176,), (192,), (229,), (256,), (290,), (INSIDE, LATER))
"""Computed tokens at the preemptions of each recompute of Llama in bfloat16."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5, 6])
def test_recomputes_of_full_attention_in_bfloat16(seed: int, tmp_path: Path, record_property: Record) -> None:
    """Without AMX they lose no bit, so that what others lose is to be seen beside it; with AMX they lose some."""
    name = "llama, bfloat16"
    families.skip_unless_served(families.PLAIN[name])
    cases = {
        f"recomputed at {' and '.join(map(str, lengths))}": {"tokens": [*lengths], "kind": "recompute"}
        for lengths in LENGTHS
    }
    job = {
        "scenario": "interrupted", "model": str(families.make(name, tmp_path / "model")), "request": asked(seed),
        "cases": cases | {"undisturbed": CASES["undisturbed"]}, "plugin": harness.plugin("always-swap"),
        "engine": ENGINE | families.PLAIN[name].engine | {"dtype": "bfloat16"},
    }  # fmt: skip
    found = harness.run(job, tmp_path)["cases"]
    for case, wanted in cases.items():
        assert found[case]["out_at"] == wanted["tokens"]
        assert harness.total(found[case]["stats"], "loaded_tokens") == 0
        told = figures(name, case, "recompute", found[case], found["undisturbed"], seed)
        record_property(FIGURES, told)
        assert told["amx"] or told["identical"], case


def figures(
    family: str, case: str, kind: str, found: dict[str, Any], reference: dict[str, Any], seed: int = SEED
) -> dict[str, Any]:
    """What docs/exactness.json has of a case: by how much it differs from the undisturbed run. An output's tokens are
    counted from 0."""
    same, difference = compared(found, reference)
    return {
        "family": family, "dtype": COMPARED[family].dtype, "case": case, "kind": kind, "seed": seed,
        "amx": torch.cpu._is_amx_tile_supported(), "prompt_tokens": PROMPT, "output_tokens": OUTPUT,
        "at": found["out_at"], "first_different": None if same == OUTPUT else same, "difference": difference,
        "identical": (found["tokens"], found["logprobs"]) == (reference["tokens"], reference["logprobs"]),
    }  # fmt: skip


def compared(found: dict[str, Any], reference: dict[str, Any]) -> tuple[int, float]:
    """How many tokens are the same, and by how much their log-probabilities differ at most."""
    pairs = zip(found["tokens"], reference["tokens"], strict=True)
    same = next((i for i, (one, other) in enumerate(pairs) if one != other), OUTPUT)
    return same, largest_difference(found["logprobs"][:same], reference["logprobs"][:same])


def largest_difference(found: list[Any], reference: list[Any]) -> float:
    """Between log-probabilities of the same tokens."""
    pairs = [(dict(one), dict(other)) for one, other in zip(found, reference, strict=True)]
    return max(abs(one[token] - other[token]) for one, other in pairs for token in one.keys() & other.keys())


def test_nothing_is_left(result: dict[str, Any]) -> None:
    harness.assert_nothing_left(result)
