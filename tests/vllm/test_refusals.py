"""What the plugin does not serve is refused when the engine starts, by name and with what would be right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import MambaConfig, PretrainedConfig, WhisperConfig

from kvpolicy_vllm.bench.models import make_tokenizer
from tests.vllm import harness
from tests.vllm.test_same_schedule import BASE, run_alone
from tests.vllm.versions import FIRST_WITH_TABLES, INSTALLED, quick_and_others

pytestmark = pytest.mark.scheduler

GOOD = harness.plugin("always-swap")
TRANSFER = GOOD["kv_transfer_config"]


def transfer(**changes: Any) -> dict[str, Any]:
    return GOOD | {"kv_transfer_config": TRANSFER | changes}


def extra(**changes: Any) -> dict[str, Any]:
    return transfer(kv_connector_extra_config=TRANSFER["kv_connector_extra_config"] | changes)


EXAMPLE = {
    "kv_connector": "ExampleConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {"shared_storage_path": "/nowhere"},
}  # fmt: skip


def several(*connectors: dict[str, Any], **changes: Any) -> dict[str, Any]:
    extra = {"connectors": list(connectors)}
    list_of = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return transfer(kv_connector_module_path=None, **list_of | changes)


REFUSALS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "scheduler without connector": ({"scheduler_cls": GOOD["scheduler_cls"]}, ("--kv-transfer-config", "connector")),
    "connector without scheduler": (
        {"kv_transfer_config": TRANSFER},
        ("--scheduler-cls kvpolicy_vllm.AdaptiveScheduler",),
    ),
    "consumer role": (transfer(kv_role="kv_both"), ("kv_both", "kv_producer")),
    "loads may fail requests": (transfer(kv_load_failure_policy="fail"), ("kv_load_failure_policy", "recompute")),
    "unknown key": (extra(polcy="always-swap"), ("'polcy'", "policy")),
    "unknown policy": (extra(policy="sometimes-swap"), ("sometimes-swap", "threshold:TOKENS")),
    "a module to run": (extra(policy="python:os:getcwd"), ("'python:os:getcwd'", '"allow_python_policies": true')),
    "a module to run, of a cost model": (
        extra(policy="cheapest:python:os:getcwd", allow_python_policies=False),
        ("'cheapest:python:os:getcwd'", '"allow_python_policies": true'),
    ),
    "a module that makes no policy": (
        extra(policy="python:os:getcwd", allow_python_policies=True),
        ("'python:os:getcwd'", "getcwd makes a str, should make a Policy"),
    ),
    "no such cost model": (extra(policy="cheapest:no-such-model"), ("no-such-model",)),
    "no data sheet of a CPU": (extra(policy="cheapest:analytic"), ("cpu", "kvpolicy profile")),
    "wrong type": (extra(host_gib="much"), ("host_gib", "number")),
    "nothing fits": (extra(host_gib=1e-9), ("host_gib", "holds no KV block")),
    "too much memory": (extra(host_gib=1e6), ("host_gib", "force_host_gib")),
    "bad link": (extra(link="fast"), ("link", "BYTES_PER_S")),
    "offloading as well": (GOOD | {"kv_offloading_size": 1.0}, ("kv-offloading-size",)),
    "offloading as well, by entry point": (
        transfer(kv_connector_module_path=None) | {"kv_offloading_size": 1.0},
        ("kv-offloading-size",),
    ),
    "another connector": (
        transfer(kv_connector="ExampleConnector", kv_connector_module_path=None),
        ("ExampleConnector", "KVPolicyConnector"),
    ),
    "several connectors, none ours": (several(EXAMPLE), ("ExampleConnector", "KVPolicyConnector should be there")),
    "several connectors, ours last": (several(EXAMPLE, TRANSFER), ("should be the first",)),
    "several connectors, a role in which none loads": (
        several(TRANSFER, EXAMPLE, kv_role="kv_producer"),
        ("ExampleConnector loads", '"kv_both"'),
    ),
    "several connectors, loads may fail requests": (
        several(TRANSFER, EXAMPLE, kv_load_failure_policy="fail"),
        ("MultiConnector", "recompute"),
    ),
    "several connectors, loads of ours may fail requests": (
        several({name: value for name, value in TRANSFER.items() if name != "kv_load_failure_policy"}, EXAMPLE),
        ("KVPolicyConnector in the list", "recompute"),
    ),
    "several connectors, ours in a consumer role": (
        several(TRANSFER | {"kv_role": "kv_both"}, EXAMPLE),
        ("kv_role of KVPolicyConnector is kv_both",),
    ),
    "several connectors, vLLM's offloading": (
        several(TRANSFER, {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}),
        ("OffloadingConnector should not be there",),
    ),
    "several connectors and an order": (
        several(TRANSFER | {"kv_connector_extra_config": {"policy": "always-swap", "order": "mlfq"}}, EXAMPLE),
        ("order mlfq", "ExampleConnector"),
    ),
    "a cache of prompts without prefix caching": (
        extra(cache="lru"),
        ("does not cache prompts without prefix caching", "leave --cache out"),
    ),
    "a cache of prompts with speculation": (
        extra(cache="lru") | {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        ("leave ",),
    ),
    "a cache of prompts beside another connector": (
        several(TRANSFER | {"kv_connector_extra_config": {"policy": "always-swap", "cache": "lru"}}, EXAMPLE),
        ("does not cache prompts beside ExampleConnector", "leave --cache out"),
    ),
    "speculation that no test has": (
        GOOD | {"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
        ("leave --speculative-config out",),
    ),
    "KV in another precision": (
        GOOD | {"kv_cache_dtype": "int8_per_token_head"},
        ("--kv-cache-dtype int8_per_token_head", "fp8"),
    ),
    "KV in another type than the model's": (
        GOOD | {"kv_cache_dtype": "bfloat16"},
        ("--kv-cache-dtype bfloat16", "only auto, fp8, fp8_e4m3, fp8_e5m2", "auto is the model's own type, float32"),
    ),
    "context parallelism": (GOOD | {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, ("context",)),
    "pipeline parallelism": (GOOD | {"pipeline_parallel_size": 2}, ("pipeline", "CPU build cannot run it")),
    "several nodes": (
        GOOD | {"tensor_parallel_size": 2, "nnodes": 2, "distributed_executor_backend": "mp"},
        ("nodes", "clocks"),
    ),
    "pooling": (GOOD | {"runner": "pooling"}, ("pooling",)),
}
FOREIGN: dict[str, tuple[PretrainedConfig, str]] = {
    "encoder-decoder": (
        WhisperConfig(
            vocab_size=2048, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_target_positions=2048,
            pad_token_id=1, bos_token_id=0, eos_token_id=1, decoder_start_token_id=0, suppress_tokens=None,
            begin_suppress_tokens=None, architectures=["WhisperForConditionalGeneration"],
        ),
        "encoder-decoder",
    ),
    "no attention": (
        MambaConfig(vocab_size=2048, hidden_size=64, num_hidden_layers=2, architectures=["MambaForCausalLM"]),
        "attention-free",
    ),
}  # fmt: skip
"""Models that are told by their configuration alone."""
LATE = {
    "scheduler without connector", "no data sheet of a CPU", "nothing fits", "too much memory", "another connector",
    "offloading as well, by entry point", "several connectors, none ours", "several connectors, ours last",
}  # fmt: skip
"""Told when the scheduler or a worker is made: what they need is not known before, or vLLM asks nobody of ours."""


@pytest.fixture(scope="module", params=quick_and_others(INSTALLED))
def messages(request: pytest.FixtureRequest, model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """All configurations tried in one process, by the scheduler's own start-up."""
    folder: Path = tmp_path_factory.mktemp("refusals")
    tried = {name: arguments for name, (arguments, _) in REFUSALS.items()}
    for name, (config, _) in FOREIGN.items():
        config.save_pretrained(folder / name)
        make_tokenizer(256).save_pretrained(folder / name)
        tried[name] = GOOD | {"model": str(folder / name)}
    result = run_alone(BASE | {"model": model, "refusals": tried}, folder, request.param)
    return dict(result["messages"])


FEATURES = {
    "context parallelism": "context parallelism", "pipeline parallelism": "pipeline parallelism",
    "several nodes": "an engine over several nodes", "pooling": "pooling models",
    "offloading as well": "--kv-offloading-size", "several connectors and an order": "MultiConnector with an order",
    "several connectors, vLLM's offloading": "beside OffloadingConnector",
    "speculation that no test has": "speculation by other methods",
    "KV in another precision": "KV cache of other precisions",
    "KV in another type than the model's": "KV cache of other precisions",
}  # fmt: skip
"""Refusals that the support matrix tells of."""


WITH_TABLES = ".".join(map(str, FIRST_WITH_TABLES))


def refused_feature(name: str, before: str | None = None) -> pytest.MarkDecorator:
    """``before``: the first version that serves it."""
    return pytest.mark.feature(name, refused=True, before=before)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=refused_feature(FEATURES[name]) if name in FEATURES else ()) for name in REFUSALS],
)
def test_refused_by_name(name: str, messages: dict[str, str]) -> None:
    for words in REFUSALS[name][1]:
        assert words in messages[name]


@pytest.mark.parametrize("name", [*sorted(REFUSALS.keys() - LATE), *FOREIGN])
def test_refused_while_the_configuration_is_made(name: str, messages: dict[str, str]) -> None:
    """Before any weight is read: vLLM reports whatever is raised then as its configuration's."""
    assert messages[name].startswith("ValidationError: 1 validation error for VllmConfig")


def test_a_configuration_derived_within_an_engine_is_not_judged_anew(messages: dict[str, str]) -> None:
    """As vLLM makes them for parts of a multimodal model, some of which could not be served alone."""
    assert messages["derived"] == ""


@pytest.mark.parametrize("name", [pytest.param(name, marks=refused_feature(f"{name} models")) for name in FOREIGN])
def test_models_it_does_not_serve(name: str, messages: dict[str, str]) -> None:
    assert f"kvpolicy does not serve {FOREIGN[name][1]} models" in messages[name]


@pytest.mark.feature("diffusion models", refused=True)
@pytest.mark.parametrize("name", ["diffusion by its model", "diffusion by its settings"])
def test_diffusion_models(name: str, messages: dict[str, str]) -> None:
    """vLLM's CPU build has a refusal of its own before ours; on a GPU they would lose the scheduler made for them."""
    assert "UnsupportedEngine: kvpolicy does not serve diffusion models" in messages[name]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=refused_feature(f"device: {name}")) for name in ("xpu", "tpu", "rocm", "oot")]
)
def test_devices_it_has_no_copies_for(name: str, messages: dict[str, str]) -> None:
    assert f"device: {name}" in messages[f"device {name}"] and "CUDA" in messages[f"device {name}"]


@pytest.mark.parametrize("name", ["cuda", "cpu"])
def test_devices_it_serves(name: str, messages: dict[str, str]) -> None:
    assert messages[f"device {name}"] == ""


UNKNOWN_COSTS = {
    "two-full": "its layers of full attention have several block tables",
    "window": "vLLM of 4 layers with a window of 40 tokens, 0 that keep a state",
    "full-window": "vLLM of 4 layers with a window of 40 tokens, 0 that keep a state",
    "full-windows": "vLLM of 8 layers with a window of 40 tokens, 0 that keep a state",
    "full-states": "vLLM of 0 layers with a window of 0 tokens, 8 that keep a state",
}
"""By the layers of a KV cache that a Llama's configuration says nothing of."""


@refused_feature("several KV cache groups", before=WITH_TABLES)
@pytest.mark.parametrize("layers", UNKNOWN_COSTS)
def test_several_block_tables(layers: str, messages: dict[str, str]) -> None:
    """From vLLM 0.32 on; below it the message names a flag where there is one. The configuration says of none of them
    what the layers are, so that costs are not known."""
    told, told_of_costs = messages[f"layers {layers}"], messages[f"layers {layers} cheapest:analytic"]
    if messages["serves block tables"]:
        assert told == ""
        assert "always-swap" in told_of_costs and "cheapest:analytic" in told_of_costs
        assert UNKNOWN_COSTS[layers] in told_of_costs
        return
    assert "older than 0.32" in told and "KV cache group" in told
    assert ("--disable-hybrid-kv-cache-manager" in told) == layers.startswith("full-window")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("MAMBA1", marks=refused_feature("Mamba1 states")),
        pytest.param("mode all", marks=refused_feature("--mamba-cache-mode all")),
        pytest.param("host", marks=refused_feature("KV cache groups in host memory")),
        "indexer",
    ],
)
def test_groups_it_does_not_serve(kind: str, messages: dict[str, str]) -> None:
    named = {"mode all": "--mamba-cache-mode all", "host": "host memory", "indexer": "UniformTypeKVCacheSpecs"}
    assert "kvpolicy does not serve" in messages[f"group {kind}"]
    assert named.get(kind, kind) in messages[f"group {kind}"]


def test_latent_kv_with_an_indexer_is_told_by_the_configuration(messages: dict[str, str]) -> None:
    """Before weights are read, and before its group, whose kind has no name that a user knows."""
    assert "kvpolicy does not serve MLA models with an indexer" in messages["MLA with an indexer"]


@refused_feature("latent KV (MLA), and states beside attention", before=WITH_TABLES)
def test_latent_kv_and_states_are_told_by_the_configuration(messages: dict[str, str]) -> None:
    """Before weights are read."""
    if messages["serves block tables"]:
        assert messages["MLA"] == "" and "VLLM_USE_V2_MODEL_RUNNER=0" in messages["states beside attention"]
        return
    for told in (messages["MLA"], messages["states beside attention"]):
        assert "older than 0.32" in told


def test_latent_kv_beside_states_is_told_by_the_configuration(messages: dict[str, str]) -> None:
    """As Kimi Linear has them, on every version and before weights are read."""
    assert "kvpolicy does not serve latent KV beside states" in messages["MLA and states"]


@pytest.mark.feature("states on model runner v2", refused=True)
def test_states_on_a_model_runner_that_overwrites_them(messages: dict[str, str]) -> None:
    """Unless a setting allows them, which does not help below vLLM 0.32."""
    by_group = "states on runner v2"
    allowed = f"{by_group}, allowed", "states beside attention, allowed"
    if messages["serves block tables"]:
        assert "VLLM_USE_V2_MODEL_RUNNER=0" in messages[by_group]
        assert '"allow_untested_states_v2": true' in messages[by_group]
        assert "--allow-untested-states-v2" in messages[by_group]
        assert [messages[name] for name in allowed] == ["", ""]
        assert "order urgent" in messages[f"{by_group}, allowed, in order urgent"]
        return
    for name in (by_group, *allowed, f"{by_group}, allowed, in order urgent"):
        what = "states beside attention" if name.startswith("states beside") else "1 KV cache groups (MambaSpec)"
        assert what in messages[name] and "older than 0.32" in messages[name], name


def test_an_order_of_service_over_several_block_tables(messages: dict[str, str]) -> None:
    told = messages["layers full-window in order urgent"]
    if messages["serves block tables"]:
        assert told == ""
        return
    assert "KV cache groups (FullAttentionSpec, SlidingWindowSpec) on a vLLM older than 0.32" in told


def test_a_device_with_a_data_sheet_needs_no_training(messages: dict[str, str]) -> None:
    assert messages["untrained"] == ""


@pytest.mark.feature("other versions of vLLM", refused=True)
def test_version_out_of_range(messages: dict[str, str]) -> None:
    assert "0.24 to 0.33" in messages["version"] and "allow_untested_version" in messages["version"]
    assert messages["version asked for"] == ""
