"""What was not tested is named at the start of a server."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvpolicy_vllm.plugin import tested_setups
from tests.vllm import features
from tests.vllm.versions import ROOT


@pytest.mark.parametrize(
    ("beside", "several_tables", "words"),
    [
        ([], True, ""),
        (["NixlConnector"], False, ""),
        (["LMCacheMPConnector"], False, ""),
        (["NixlConnector", "MyConnector"], False, "MyConnector was not tested"),
        (["NixlConnector"], True, "NixlConnector was tested beside it with one KV cache group of full attention only"),
        (["NixlConnector", "MyConnector"], True, "MyConnector was not tested"),
    ],
)
def test_connectors_that_were_not_tested_are_told(
    caplog: pytest.LogCaptureFixture, beside: list[str], several_tables: bool, words: str
) -> None:
    with caplog.at_level(logging.WARNING):
        tested_setups.warn_untested_connectors(beside, several_tables)
    assert [record.getMessage().startswith(f"kvpolicy: {words}") for record in caplog.records] == [True] * bool(words)


def test_every_connector_that_is_called_tested_has_a_test_of_engines() -> None:
    """And is on the page."""
    tests = (ROOT / "tests" / "vllm" / "test_engines_beside.py").read_text()
    page = (ROOT / "docs" / "other-connectors.md").read_text()
    rows = "".join(line for line in page.splitlines() if line.startswith("| ") and "real engine" in line)
    rows += "".join(line for line in page.splitlines() if line.startswith("| ") and "two engines" in line)
    for name in tested_setups.TESTED_BESIDE:
        assert name in tests and name in rows


def taking(architecture: str, **multimodal: Any) -> Any:
    """A configuration of a model that takes more than text."""
    inputs = SimpleNamespace(**{"language_model_only": False} | multimodal)
    return configured(multimodal_config=inputs, architectures=[architecture])


def configured(precision: str = "auto", **model: Any) -> Any:
    """A configuration of a model of full attention that takes text alone, but for ``model``."""
    plain = {"multimodal_config": None, "use_mla": False, "is_hybrid": False, "attention_chunk_size": None}
    cache = SimpleNamespace(cache_dtype=precision)
    return SimpleNamespace(model_config=SimpleNamespace(**plain | model), cache_config=cache)


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("LlavaForConditionalGeneration", ""),
        ("Qwen2VLForConditionalGeneration", "Qwen2VLForConditionalGeneration was not tested with videos"),
        ("Gemma3ForConditionalGeneration", "Gemma3ForConditionalGeneration was not tested; of the models that take"),
    ],
)
def test_inputs_that_were_not_tested_are_told(caplog: pytest.LogCaptureFixture, architecture: str, words: str) -> None:
    config = taking(architecture)
    with caplog.at_level(logging.WARNING):
        tested_setups.warn_untested_setup(config)
    assert [record.getMessage().startswith(f"kvpolicy: {words}") for record in caplog.records] == [True] * bool(words)
    config.model_config.multimodal_config.language_model_only = True
    assert tested_setups.untested_inputs(config) == "", "it takes text alone"
    config.model_config.multimodal_config = None
    assert tested_setups.untested_inputs(config) == ""


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({}, ""),
        ({"use_mla": True}, "latent attention"),
        ({"is_hybrid": True}, "states beside attention"),
        ({"is_hybrid": True, "use_mla": True}, "latent attention or states beside attention"),
        ({"attention_chunk_size": 64}, "attention within chunks"),
    ],
)
@pytest.mark.parametrize("precision", ["auto", "bfloat16", "fp8", "fp8_e5m2"])
def test_keys_and_values_of_a_precision_that_was_not_tested_are_told(
    precision: str, model: dict[str, Any], words: str
) -> None:
    said = tested_setups.untested_setup(configured(precision, **model))
    is_told = precision.startswith("fp8") and bool(words)
    assert said.startswith(f"--kv-cache-dtype {precision} was not tested with {words};" if is_told else "")
    assert bool(said) == is_told


def test_both_are_told_where_neither_was_tested() -> None:
    config = taking("Gemma3ForConditionalGeneration")
    config.cache_config.cache_dtype, config.model_config.is_hybrid = "fp8", True
    first, second = tested_setups.untested_setup(config).split("; --kv-cache-dtype ")
    assert first.startswith("Gemma3ForConditionalGeneration was not tested") and second.startswith("fp8 was not tested")


def test_what_fp8_was_tested_with_is_on_the_page() -> None:
    page = (ROOT / "docs" / "model-families.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| `--kv-cache-dtype fp8`"))
    for words in ("latent attention", "states", "attention within chunks", "not tested"):
        assert words in row
    tested = {feature.family for name, feature in features.ENGINES.items() if name.startswith("fp8")}
    assert tested == {"llama", "gpt-oss"}
