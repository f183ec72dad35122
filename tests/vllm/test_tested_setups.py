"""What was not tested is named at the start of a server."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm
from vllm.config import SpeculativeConfig

from kvpolicy_vllm import connector
from kvpolicy_vllm.check import lay_out
from kvpolicy_vllm.plugin import tested_setups
from tests.feature_record import RECORD
from tests.vllm import families, features
from tests.vllm.bare_configs import bare
from tests.vllm.versions import ROOT


@pytest.fixture(autouse=True)
def not_warned_of() -> Iterator[None]:
    """What another test was warned of is warned of again."""
    tested_setups._warn_once.cache_clear()
    yield
    tested_setups._warn_once.cache_clear()


@pytest.fixture(autouse=True)
def version_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was tested on one version alone is in `tests/vllm/test_tested_versions.py`."""
    monkeypatch.setattr(vllm, "__version__", "0.32.0")


def with_layers(*groups: Any) -> Any:
    """A KV cache of these groups; with one of states, whose blocks are cleared."""
    has_states = any(type(group.kv_cache_spec).__name__ == "MambaSpec" for group in groups)
    return SimpleNamespace(kv_cache_groups=groups, needs_kv_cache_zeroing=has_states)


FULL, WINDOW, CHUNK, LATENT = (
    SimpleNamespace(kv_cache_spec=type(kind, (), {})())
    for kind in ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MLAAttentionSpec")
)
MAMBA2, GDN = (
    SimpleNamespace(kv_cache_spec=type("MambaSpec", (), {"mamba_type": SimpleNamespace(name=name)})())
    for name in ("MAMBA2", "GDN_ATTN")
)
WHOLE_WINDOW, WHOLE_CHUNK = (
    SimpleNamespace(kv_cache_spec=type("FullAttentionSpec", (), {name: 64})())
    for name in ("sliding_window", "attention_chunk_size")
)
"""Of which all blocks are stored, as with --disable-hybrid-kv-cache-manager."""
ONLY_FULL = "NixlConnector was tested beside it with one KV cache group of full attention only"
NO_OTHERS = (
    "DecodeBenchConnector was tested beside it with one KV cache group of full attention, with windows or with chunks "
    "or with Mamba2 states only, and this model has others"
)
ALONE = (
    "DecodeBenchConnector was tested beside it with Mamba2 states and one request alone: it writes made-up values to "
    "the states of all that run"
)
ONLY_WHOLE_WINDOWS = (
    "ExampleConnector was tested beside it with one KV cache group of full attention, with windows stored whole only, "
    "and this model has others"
)


@pytest.mark.parametrize(
    ("beside", "kv_cache", "words"),
    [
        ([], with_layers(MAMBA2), ""),
        (["NixlConnector"], with_layers(FULL), ""),
        (["LMCacheMPConnector"], None, ""),
        (["NixlConnector", "MyConnector"], with_layers(FULL), "MyConnector was not tested"),
        (["NixlConnector", "MyConnector"], with_layers(WINDOW), "MyConnector was not tested"),
        (["NixlConnector"], with_layers(FULL, WINDOW), ONLY_FULL),
        (["DecodeBenchConnector"], with_layers(FULL, WINDOW), ""),
        (["DecodeBenchConnector", "NixlConnector"], with_layers(FULL, WINDOW), ONLY_FULL),
        (["NixlConnector"], with_layers(FULL, MAMBA2), ONLY_FULL),
        (["DecodeBenchConnector"], with_layers(FULL, MAMBA2), ALONE),
        (["DecodeBenchConnector", "NixlConnector"], with_layers(FULL, MAMBA2), ONLY_FULL),
        (["DecodeBenchConnector"], with_layers(FULL, GDN), NO_OTHERS),
        (["DecodeBenchConnector"], with_layers(FULL, CHUNK), ""),
        (["DecodeBenchConnector"], with_layers(FULL, WINDOW, CHUNK), NO_OTHERS),
        (["DecodeBenchConnector"], with_layers(FULL, WINDOW, MAMBA2), NO_OTHERS),
        (["DecodeBenchConnector", "NixlConnector"], with_layers(FULL, CHUNK), ONLY_FULL),
        (["DecodeBenchConnector", "NixlConnector"], with_layers(FULL, GDN), f"DecodeBenchConnector, {ONLY_FULL}"),
        (["ExampleConnector"], with_layers(WHOLE_WINDOW), ""),
        (["ExampleConnector"], with_layers(WHOLE_CHUNK), ONLY_WHOLE_WINDOWS),
        (["DecodeBenchConnector", "NixlConnector"], with_layers(LATENT), f"DecodeBenchConnector, {ONLY_FULL}"),
    ],
)
def test_connectors_that_were_not_tested_are_told(beside: list[str], kv_cache: Any, words: str) -> None:
    said = tested_setups.untested_connectors(beside, kv_cache)
    assert said.startswith(words) and bool(said) == bool(words)


@pytest.mark.parametrize(
    ("kv_cache", "words"),
    [
        (None, ""),
        (with_layers(FULL), ""),
        (with_layers(), ONLY_FULL),
        (with_layers(WINDOW), ONLY_FULL),
        (with_layers(FULL, WINDOW), ONLY_FULL),
        (with_layers(LATENT), ONLY_FULL),
        (with_layers(WHOLE_WINDOW), ONLY_FULL),
        (with_layers(WHOLE_CHUNK), ONLY_FULL),
    ],
)
def test_layers_that_a_connector_was_not_tested_with_are_told(kv_cache: Any, words: str) -> None:
    """Where they are known: before, what can be said by its name alone is."""
    said = tested_setups.untested_setup(configured(beside=["NixlConnector"]), kv_cache)
    assert said.startswith(words) and bool(said) == bool(words)
    assert "MyConnector was not tested" in tested_setups.untested_setup(configured(beside=["MyConnector"]), kv_cache)


@pytest.mark.parametrize("use_v2_model_runner", [False, True])
@pytest.mark.parametrize("kv_cache", [None, with_layers(FULL, MAMBA2)])
def test_states_whose_blocks_are_held_are_told(kv_cache: Any, use_v2_model_runner: bool) -> None:
    """By the layers, or by the model's configuration where these are not known."""
    config = configured(is_hybrid=True)
    config.use_v2_model_runner = use_v2_model_runner
    said = tested_setups.untested_setup(config, kv_cache)
    assert said.startswith("states on vLLM's model runner v2 were never tested" if use_v2_model_runner else "")
    assert bool(said) == use_v2_model_runner
    config.model_config.is_hybrid = False
    assert tested_setups.untested_setup(config, with_layers(FULL)) == ""


def test_a_warning_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """For several configurations, as vLLM makes them of a server's flags."""
    with caplog.at_level(logging.WARNING):
        for name in ("Mine", "Mine", "Other"):
            tested_setups.warn_untested_setup(configured(beside=[name]), None)
        tested_setups.warn_untested_setup(configured(), None)
    said = [record.getMessage().partition(" was not tested beside it")[0] for record in caplog.records]
    assert said == ["kvpolicy: Mine", "kvpolicy: Other"]


def test_it_is_told_while_vllm_makes_its_configuration(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Long before its scheduler is made, with the weights in memory."""
    monkeypatch.setattr(connector, "refuse_early", lambda: configured(beside=["Mine"]))
    with caplog.at_level(logging.WARNING):
        assert connector.KVPolicyConnector
    assert [record.getMessage()[:30] for record in caplog.records] == ["kvpolicy: Mine was not tested "]
    monkeypatch.setattr(connector, "refuse_early", lambda: None)
    assert connector.KVPolicyConnector and len(caplog.records) == 1


def test_one_request_alone_is_told_beside_another_connector() -> None:
    said = tested_setups.untested_connectors(["DecodeBenchConnector", "NixlConnector"], with_layers(FULL, MAMBA2))
    assert said.startswith(ONLY_FULL) and said.endswith(f"; {ALONE}")


def test_every_connector_that_is_called_tested_has_a_test_of_engines() -> None:
    """And is on the page."""
    tests = (ROOT / "tests" / "vllm" / "test_engines_beside.py").read_text()
    page = (ROOT / "docs" / "other-connectors.md").read_text()
    rows = "".join(line for line in page.splitlines() if line.startswith("| ") and "real engine" in line)
    rows += "".join(line for line in page.splitlines() if line.startswith("| ") and "two engines" in line)
    for name in tested_setups.TESTED_BESIDE:
        assert name in tests and name in rows


def test_layers_that_a_connector_is_called_tested_with_are_in_the_record() -> None:
    """Of each family that passed beside it: neither told as tested where it was not, nor the other way round."""
    rows = json.loads(RECORD.read_text())
    passed = [
        case
        for row in rows
        if row["test"].endswith("::test_windows_beside_a_connector_that_makes_prompts_up")
        for case in row.get("passed", [])
    ]
    kinds = {"SlidingWindowSpec": "windows", "ChunkedLocalAttentionSpec": "chunks"}
    shown = {kinds[group] for case in passed for group in {*families.FAMILIES[case].groups} - {"FullAttentionSpec"}}
    states = "::test_states_beside_a_connector_that_makes_prompts_up"
    if any(row["test"].endswith(states) and row.get("passed") for row in rows):
        shown.add("Mamba2 states")
    told = {kind for kind, names in tested_setups.TESTED_WITH.items() if "DecodeBenchConnector" in names}
    assert shown == told


def taking(architecture: str, **multimodal: Any) -> Any:
    """A configuration of a model that takes more than text."""
    inputs = SimpleNamespace(**{"language_model_only": False} | multimodal)
    return configured(multimodal_config=inputs, architectures=[architecture])


def configured(precision: str = "auto", beside: Sequence[str] = (), **model: Any) -> Any:
    """A configuration of a model of full attention that takes text alone, but for ``model``. ``beside``: names of the
    connectors that serve beside kvpolicy's."""
    plain = {
        "multimodal_config": None, "use_mla": False, "is_hybrid": False, "attention_chunk_size": None,
        "hf_text_config": SimpleNamespace(), "get_num_experts": lambda: 0,
    }  # fmt: skip
    cache = SimpleNamespace(cache_dtype=precision, enable_prefix_caching=False)
    connectors = [{"kv_connector": name} for name in ("KVPolicyConnector", *beside)]
    listed = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": connectors}}
    return SimpleNamespace(
        model_config=SimpleNamespace(**plain | model), cache_config=cache, kv_transfer_config=SimpleNamespace(**listed),
        scheduler_config=SimpleNamespace(policy="fcfs"), speculative_config=None, lora_config=None,
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1), kv_events_config=None,
    )  # fmt: skip


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
        tested_setups.warn_untested_setup(config, None)
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
    said = tested_setups.untested_setup(configured(precision, **model), None)
    is_told = precision.startswith("fp8") and bool(words)
    assert said.startswith(f"--kv-cache-dtype {precision} was not tested with {words};" if is_told else "")
    assert bool(said) == is_told


def test_layers_with_types_of_their_own_are_told() -> None:
    config = configured("fp8")
    config.cache_config.kv_cache_dtype_skip_layers = []
    config.speculative_config = SimpleNamespace(method="draft_model", kv_cache_dtype="fp8")
    assert tested_setups.untested_setup(config, None) == ""
    config.cache_config.kv_cache_dtype_skip_layers = ["0"]
    config.speculative_config.kv_cache_dtype = "auto"
    assert tested_setups.untested_setup(config, None) == (
        "--kv-cache-dtype-skip-layers and kv_cache_dtype of --speculative-config: layers with keys and values of "
        "several types were not tested"
    )


@pytest.mark.parametrize(("shared", "is_told"), [(None, False), (0, False), (20, True)])
def test_layers_that_share_kv_are_told(shared: int | None, is_told: bool) -> None:
    config = configured(hf_text_config=SimpleNamespace(num_kv_shared_layers=shared))
    words = "layers that share the KV of others were not tested (num_kv_shared_layers is 20)"
    assert tested_setups.untested_setup(config, with_layers(FULL)) == words * is_told


@pytest.mark.parametrize(("layers", "is_told"), [(None, False), ({"kda_layers": [1]}, True)])
def test_states_that_vllm_calls_by_the_name_of_others_are_told(layers: Any, is_told: bool) -> None:
    config = configured(hf_text_config=SimpleNamespace(linear_attn_config=layers), is_hybrid=True)
    words = "KDA states were not tested (linear_attn_config); GDN states were"
    assert tested_setups.untested_setup(config, with_layers(FULL, GDN)) == words * is_told


LORA: dict[str, Any] = {"lora_config": SimpleNamespace()}
EVENTS, SILENT = (
    {"kv_events_config": SimpleNamespace(enable_kv_cache_events=is_enabled)} for is_enabled in (True, False)
)
CORES: dict[str, Any] = {"parallel_config": SimpleNamespace(tensor_parallel_size=1, data_parallel_size=2)}


def drafting(method: str) -> dict[str, Any]:
    return {"speculative_config": SimpleNamespace(method=method)}


@pytest.mark.parametrize(
    ("changed", "kv_cache", "words"),
    [
        (LORA | EVENTS | CORES | drafting("eagle"), with_layers(FULL), ""),
        (LORA | EVENTS | CORES, None, ""),
        (LORA, with_layers(FULL, WINDOW), "not tested: LoRA with sliding windows"),
        (LORA, with_layers(WHOLE_CHUNK), "not tested: LoRA with chunks stored whole"),
        (LORA, with_layers(FULL, GDN, MAMBA2), "not tested: LoRA with GDN states or Mamba2 states"),
        (EVENTS, with_layers(FULL, CHUNK), "not tested: KV events with chunked local attention"),
        (SILENT, with_layers(FULL, CHUNK), ""),
        (LORA | CORES, with_layers(LATENT), "not tested: LoRA with MLA, data parallelism with MLA"),
        (drafting("ngram"), with_layers(FULL, WINDOW), ""),
        (drafting("ngram"), with_layers(WHOLE_WINDOW), "not tested: speculation by ngram with windows stored whole"),
        (drafting("eagle"), with_layers(FULL, WINDOW), "not tested: speculation by EAGLE with sliding windows"),
        (drafting("mtp"), with_layers(FULL, CHUNK), "not tested: speculation by MTP with chunked local attention"),
    ],
)
def test_features_that_were_not_tested_with_such_layers_are_told(
    changed: dict[str, Any], kv_cache: Any, words: str
) -> None:
    config = configured()
    vars(config).update(changed)
    assert tested_setups.untested_setup(config, kv_cache) == words


@pytest.mark.parametrize(
    ("method", "more", "words"),
    [
        ("eagle", {"parallel_drafting": False}, ""),
        ("eagle", {"parallel_drafting": True}, "parallel_drafting, as of P-EAGLE and PARD, was not tested"),
        ("mtp", {"use_multi_module_mtp": lambda: False}, ""),
        ("mtp", {"use_multi_module_mtp": lambda: True}, "MTP of several modules was not tested"),
    ],
)
def test_ways_to_draft_that_were_not_tested_are_told(method: str, more: dict[str, Any], words: str) -> None:
    """Of methods that are served."""
    config = configured()
    config.speculative_config = SimpleNamespace(method=method, **more)
    said = f"--speculative-config: {words}" if words else ""
    assert tested_setups.untested_setup(config, with_layers(FULL)) == said


@pytest.mark.parametrize(("modules", "drafted", "is_told"), [(1, 3, False), (3, 1, False), (3, 2, True)])
def test_vllm_is_asked_whether_mtp_has_several_modules(modules: int, drafted: int, is_told: bool) -> None:
    config = configured()
    drafter = SimpleNamespace(hf_config=SimpleNamespace(num_nextn_predict_layers=modules))
    config.speculative_config = bare(
        SpeculativeConfig, method="mtp", draft_model_config=drafter, num_speculative_tokens=drafted
    )
    assert bool(tested_setups.untested_drafts(config)) == is_told


@pytest.mark.parametrize(("experts", "words"), [(0, ""), (8, "not tested: data parallelism with experts")])
def test_experts_over_several_cores_are_told(experts: int, words: str) -> None:
    """Before the layers are known, too."""
    config = configured(get_num_experts=lambda: experts)
    vars(config).update(CORES)
    assert tested_setups.untested_setup(config, None) == words


def test_drafts_are_called_tested_with_the_layers_that_tests_have() -> None:
    """And latent KV with MTP, which alone is served there."""
    config = configured(use_mla=True)
    vars(config).update(drafting("mtp"))
    assert tested_setups.untested_setup(config, with_layers(LATENT)) == ""
    shown: dict[str, set[str]] = {}
    for name, feature in features.ENGINES.items():
        if feature.drafts:
            layers = (families.PLAIN | families.FAMILIES)[feature.family].feature
            shown.setdefault(features.feature_of(name), set()).add(layers)
    told = {name: {*layers} for name, layers in tested_setups.TESTED_LAYERS.items() if name.startswith("speculation")}
    assert told == {name: layers - {"full attention"} for name, layers in shown.items()}


def test_both_are_told_where_neither_was_tested() -> None:
    config = taking("Gemma3ForConditionalGeneration")
    config.cache_config.cache_dtype, config.model_config.is_hybrid = "fp8", True
    first, second = tested_setups.untested_setup(config, None).split("; --kv-cache-dtype ")
    assert first.startswith("Gemma3ForConditionalGeneration was not tested") and second.startswith("fp8 was not tested")


def test_what_fp8_was_tested_with_is_on_the_page() -> None:
    page = (ROOT / "docs" / "model-families.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| `--kv-cache-dtype fp8`"))
    for words in ("latent attention", "states", "attention within chunks", "not tested"):
        assert words in row
    tested = {feature.family for name, feature in features.ENGINES.items() if name.startswith("fp8")}
    assert tested == {"llama", "gpt-oss"}


@pytest.mark.parametrize("is_laid_out", [True, False])
def test_what_was_not_tested_of_a_setup_is_in_the_answer(monkeypatch: pytest.MonkeyPatch, is_laid_out: bool) -> None:
    def laid_out(config: Any) -> Any:
        if not is_laid_out:
            raise RuntimeError("needs weights")
        return "layers"

    monkeypatch.setattr(lay_out, "server_config", lambda arguments: arguments)
    monkeypatch.setattr(lay_out, "laid_out", laid_out)
    monkeypatch.setattr(lay_out, "groups_of", lambda kv_cache: [])
    monkeypatch.setattr(lay_out, "served_block_bytes", lambda config, kv_cache: 4096)
    monkeypatch.setattr(lay_out, "host_gib_of", lambda config: 4.0)
    monkeypatch.setattr(lay_out, "untested_setup", lambda config, kv_cache: f"{config} was not tested, {kv_cache}")
    arguments: Any = "M"
    found = lay_out.judged(arguments)
    assert found["untested"] == f"M was not tested, {'layers' if is_laid_out else None}"
    assert ("block_bytes" in found) == is_laid_out
