"""What was not tested is named at the start of a server."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvpolicy_vllm.plugin import tested_setups
from tests.vllm.versions import ROOT


@pytest.mark.parametrize(
    ("beside", "warned"),
    [(["NixlConnector"], False), (["LMCacheMPConnector"], False), (["NixlConnector", "MyConnector"], True)],
)
def test_connectors_that_were_not_tested_are_told(
    caplog: pytest.LogCaptureFixture, beside: list[str], warned: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        tested_setups.warn_untested_connectors(beside)
    assert ("MyConnector was not tested" in caplog.text) == warned == bool(caplog.text)


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
    return SimpleNamespace(model_config=SimpleNamespace(multimodal_config=inputs, architectures=[architecture]))


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
        tested_setups.warn_untested_inputs(config)
    assert [record.getMessage().startswith(f"kvpolicy: {words}") for record in caplog.records] == [True] * bool(words)
    config.model_config.multimodal_config.language_model_only = True
    assert tested_setups.untested_inputs(config) == "", "it takes text alone"
    config.model_config.multimodal_config = None
    assert tested_setups.untested_inputs(config) == ""
