"""What was never tested with an engine of the running vLLM is named, as the support matrix has it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm

from kvpolicy_vllm.plugin import tested_versions
from kvpolicy_vllm.plugin.config_refusals import SERVED_DRAFTERS
from kvpolicy_vllm.plugin.layer_refusals import SERVED_GROUPS, SERVED_STATES
from kvpolicy_vllm.plugin.tested_setups import TESTED_BESIDE, untested_setup
from kvpolicy_vllm.plugin.tested_versions import COMPLETE, TESTED, untested_version
from kvpolicy_vllm.plugin.versions import NEWEST, OLDEST
from tests.feature_record import RECORD


def configured(**changed: Any) -> Any:
    """A server of a model of full attention, without prefix caching; ``changed``: what is otherwise."""
    of = {
        "experts": 0, "precision": "auto", "lora": None, "multimodal": None, "caching": False, "policy": "fcfs",
        "ranks": 1, "cores": 1, "method": None, "mla": False, "beside": (), "own": {}, "events": None,
    } | changed  # fmt: skip
    connectors = [{"kv_connector": "KVPolicyConnector", "kv_connector_extra_config": of["own"]}]
    connectors += [{"kv_connector": name} for name in of["beside"]]
    listed = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": connectors}}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            get_num_experts=lambda: of["experts"], multimodal_config=of["multimodal"], use_mla=of["mla"],
            is_hybrid=False, architectures=["LlavaForConditionalGeneration"], hf_text_config=SimpleNamespace(),
        ),
        cache_config=SimpleNamespace(cache_dtype=of["precision"], enable_prefix_caching=of["caching"]),
        scheduler_config=SimpleNamespace(policy=of["policy"]),
        parallel_config=SimpleNamespace(tensor_parallel_size=of["ranks"], data_parallel_size=of["cores"]),
        speculative_config=of["method"] and SimpleNamespace(method=of["method"]),
        lora_config=of["lora"],
        kv_events_config=of["events"] and SimpleNamespace(enable_kv_cache_events=of["events"] == "on"),
        kv_transfer_config=SimpleNamespace(**listed),
    )  # fmt: skip


def with_layers(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def spec(kind: str, **fields: Any) -> Any:
    return type(kind, (), fields)()


FULL = with_layers(spec("FullAttentionSpec"))
WHOLE_WINDOWS = with_layers(spec("FullAttentionSpec", sliding_window=64))
WHOLE_CHUNKS = with_layers(spec("FullAttentionSpec", attention_chunk_size=64))
PICTURES = SimpleNamespace(language_model_only=False)
LIKE_PLUGIN = {"order": "urgent", "cache": "cost", "cache_files": "kv"}


@pytest.mark.parametrize(
    ("called", "changed", "kv_cache", "names"),
    [
        ("0.32.1", {"experts": 8, "precision": "fp8"}, FULL, ""),
        ("0.31.0", {"caching": True, "policy": "priority", "ranks": 2, "beside": ["ExampleConnector"]}, FULL, ""),
        ("0.31.0", {}, WHOLE_WINDOWS, ""),
        ("0.31.0", {}, WHOLE_CHUNKS, "chunks stored whole"),
        ("0.31.0", {"experts": 8, "precision": "fp8_e5m2", "lora": {}}, FULL, "MoE, fp8 KV cache, LoRA"),
        ("0.31.0", {"multimodal": PICTURES}, FULL, "multimodal"),
        ("0.31.0", {"multimodal": SimpleNamespace(language_model_only=True)}, FULL, ""),
        ("0.31.0", {"own": LIKE_PLUGIN}, FULL, "orders of service, prompts in host memory, prompts in files, beyond"),
        ("0.31.0", {"cores": 2, "beside": ["NixlConnector"]}, None, "data parallelism, beside NixlConnector"),
        ("0.31.0", {"beside": ["MyConnector"]}, FULL, ""),
        ("0.31.0", {"events": "on"}, FULL, "KV events"),
        ("0.31.0", {"events": "off"}, FULL, ""),
        ("0.30.0", {}, None, ""),
        ("0.30.0", {}, FULL, "full attention"),
        ("0.24.0", {"caching": True, "ranks": 2}, WHOLE_WINDOWS, "windows stored whole, prefix caching, tensor par"),
        ("0.33.0", {"method": "eagle3"}, FULL, "full attention, speculation by EAGLE-3"),
        ("0.33.0", {"method": "mtp", "mla": True}, with_layers(spec("MLAAttentionSpec")), "MLA, speculation by MTP on"),
        ("0.33.0", {}, with_layers(*[spec("SlidingWindowSpec")] * 3), "sliding windows; with one of 0.32 it was"),
    ],
)
def test_what_no_engine_of_this_version_was_tested_with_is_told(
    monkeypatch: pytest.MonkeyPatch, called: str, changed: dict[str, Any], kv_cache: Any, names: str
) -> None:
    """A connector that was tested nowhere is told of as such. Layers are once they are known. As if little had been
    tested with 0.31, and nothing with other versions."""
    little = {"full attention", "windows stored whole", "prefix caching", "priority scheduling", "tensor parallelism"}
    of_old = frozenset({*little, "beside ExampleConnector"})
    monkeypatch.setattr(tested_versions, "TESTED", {COMPLETE: TESTED[COMPLETE], (0, 31): of_old})
    monkeypatch.setattr(vllm, "__version__", called)
    said = untested_version(configured(**changed), kv_cache)
    assert said.startswith(f"never tested with an engine of vLLM {called[:4]}: {names}" if names else "")
    assert bool(said) == bool(names)


def test_it_is_one_warning_with_what_else_was_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested_versions, "TESTED", {COMPLETE: TESTED[COMPLETE]})
    monkeypatch.setattr(vllm, "__version__", "0.30.0")
    said = untested_setup(configured(experts=8, beside=["MyConnector", "NixlConnector"]), FULL)
    assert said.startswith("MyConnector was not tested beside it; tested are ExampleConnector")
    ends = "never tested with an engine of vLLM 0.30: full attention, MoE, beside NixlConnector; with one of 0.32 each"
    assert said.endswith(f"; {ends} by itself was")


def test_it_says_what_the_support_matrix_does() -> None:
    """Of each version: that tests with engines passed, and which."""
    rows = json.loads(RECORD.read_text())
    shown: dict[str, set[str]] = {}
    for row in rows:
        if row["how"] == "engine" and row.get("passed"):
            shown.setdefault(row["version"], set()).add(row["feature"])
    assert TESTED[COMPLETE] <= shown[".".join(map(str, COMPLETE))]
    for minor in range(OLDEST[1], NEWEST[1] + 1):
        found = shown.get(f"{OLDEST[0]}.{minor}", set()) & TESTED[COMPLETE]
        assert found == TESTED.get((OLDEST[0], minor), set()), f"0.{minor}"


def test_whatever_is_served_has_a_name() -> None:
    states = [spec("MambaSpec", mamba_type=SimpleNamespace(name=name)) for name in SERVED_STATES]
    specs = [*states, *(spec(kind) for kind in SERVED_GROUPS if kind != "MambaSpec")]
    names = {tested_versions.layers_of(group) for group in with_layers(*specs).kv_cache_groups}
    assert len(names) == len(specs) and names <= TESTED[COMPLETE]
    assert set(tested_versions.DRAFTS) == set(SERVED_DRAFTERS)
    assert {f"beside {name}" for name in TESTED_BESIDE} <= TESTED[COMPLETE]
