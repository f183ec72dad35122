"""`kvpolicy check`: what an engine would say at its start, without its weights.

The child is :mod:`kvpolicy_vllm.check.lay_out`, whose layers are made by ``kvpolicy_vllm.bench.weightless``. Its
answers are compared with what engines of the same flags have.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma4Config, MistralConfig

from kvpolicy.settings import ServerSettings
from kvpolicy_vllm import launch
from kvpolicy_vllm.bench.engine_process import EngineProcess
from kvpolicy_vllm.bench.models import make_tokenizer
from kvpolicy_vllm.check import LIMIT_S, CheckReport, Group, check
from tests.test_launch import run
from tests.vllm import families, features
from tests.vllm.harness import ROOT, environment
from tests.vllm.versions import before_tables, skip_before_tables

pytestmark = pytest.mark.scheduler

SWAP = ServerSettings("always-swap", host_gib=0.5)
BLOCK_SIZE = 32
SMALL_STEPS = ("--max-num-batched-tokens", "64")
"""Within a block of states, beyond which vLLM 0.32's CPU build ends with prefix caching, its default."""


@pytest.fixture(scope="module")
def process() -> Iterator[EngineProcess]:
    with EngineProcess("kvpolicy_vllm.check.lay_out") as started:
        yield started


def asked(process: EngineProcess, llm: str, *flags: str, settings: ServerSettings = SWAP) -> dict[str, Any]:
    job = {"flags": [llm, *launch.serve_flags(llm, launch.options(settings), flags)]}
    return process.ask_in_time(job, LIMIT_S)


def bytes_of_a_block(llm: str) -> int:
    """From the configuration alone: keys and values, float32."""
    config = json.loads((Path(llm) / "config.json").read_text())
    width = config["hidden_size"] // config["num_attention_heads"] * config["num_key_value_heads"]
    return int(2 * config["num_hidden_layers"] * width * 4 * BLOCK_SIZE)


@pytest.mark.feature("kvpolicy check")
def test_a_model_that_is_served(process: EngineProcess, model: str) -> None:
    found = asked(process, model, "--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--port", "8001")
    layers = json.loads((Path(model) / "config.json").read_text())["num_hidden_layers"]
    group = {"kind": "FullAttentionSpec", "layers": layers, "block_size": BLOCK_SIZE, "window": None}
    assert found["groups"] == [group] and found["block_bytes"] == bytes_of_a_block(model)
    assert found["refused"] == found["not_laid_out"] == ""


@pytest.mark.feature("kvpolicy check")
def test_a_model_with_experts_after_one_without(process: EngineProcess, model: str, tmp_path: Path) -> None:
    """In one process: vLLM makes groups of ranks for a model, and those of the first had no place for experts."""
    flags = ("--dtype", "float32", "--block-size", str(BLOCK_SIZE))
    experts = str(families.make("mixtral", tmp_path / "experts"))
    for llm in (model, experts, model):
        found = asked(process, llm, *flags)
        assert found["refused"] == found["not_laid_out"] == "" and found["groups"]


@pytest.mark.parametrize(("family", "words"), [("granite-4", "states beside attention"), ("llama", "")])
def test_fp8_with_layers_that_it_was_not_tested_with_is_told(
    process: EngineProcess, family: str, words: str, tmp_path: Path
) -> None:
    families.skip_unless_served((families.PLAIN | families.FAMILIES)[family])
    llm = str(families.make(family, tmp_path))
    untested = asked(process, llm, "--dtype", "float32", "--kv-cache-dtype", "fp8", *SMALL_STEPS)["untested"]
    assert untested.startswith(f"--kv-cache-dtype fp8 was not tested with {words};" if words else "")
    assert ("was not tested with" in untested) == bool(words)


@pytest.mark.parametrize(("named", "is_served"), [("bfloat16", False), ("auto", True), ("fp8", True)])
def test_keys_and_values_in_another_type_than_the_models(
    process: EngineProcess, model: str, named: str, is_served: bool
) -> None:
    found = asked(process, model, "--dtype", "float32", "--kv-cache-dtype", named, "--block-size", str(BLOCK_SIZE))
    if is_served:
        assert found["refused"] == found["not_laid_out"] == "" and found["groups"]
        return
    assert f"does not serve --kv-cache-dtype {named}, only auto" in found["refused"]
    assert "auto is the model's own type, float32" in found["refused"]
    assert found["groups"] == [], "before the layers are made"
    assert found["helps"] == ["--kv-cache-dtype auto"]


def test_no_weights_are_read(process: EngineProcess, model: str, tmp_path: Path) -> None:
    """And no memory is taken for them: the layers of a model of many GiB are made as fast."""
    config = json.loads((Path(model) / "config.json").read_text())
    config |= {"num_hidden_layers": 64, "intermediate_size": 1 << 17, "hidden_size": 1 << 13}
    config |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    shutil.copytree(model, tmp_path / "large", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "large" / "config.json").write_text(json.dumps(config))
    found = asked(process, str(tmp_path / "large"), "--dtype", "float32", "--block-size", str(BLOCK_SIZE))
    assert not found["refused"] and found["block_bytes"] == 2 * 64 * 8 * 128 * 4 * BLOCK_SIZE


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--no-such-flag",), "unrecognized arguments: --no-such-flag"),
        (("--block-size", "many"), "argument --block-size: invalid"),
        (("--pipeline-parallel-size", "2"), "kvpolicy does not serve pipeline parallelism: --pipeline-parallel-size"),
        (("--max-model-len", "1000000"), "max_model_len"),
    ],
)
def test_flags_that_would_end_the_engine(
    process: EngineProcess, model: str, flags: tuple[str, ...], words: str
) -> None:
    found = asked(process, model, *flags)
    assert words in found["refused"] and "validation error" not in found["refused"]
    assert "error:" not in found["refused"], "no program's name is before it"
    assert found["groups"] == [] and found["engine"].startswith("vllm ")
    helps = ["--pipeline-parallel-size 1"] if "--pipeline-parallel-size" in flags else []
    assert found["helps"] == helps, "of what vLLM itself refuses, its message says what is right"


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_package_that_the_models_code_lacks_is_named(process: EngineProcess, tmp_path: Path) -> None:
    """vLLM names its log, which nobody sees."""
    Gemma4Config(architectures=["Gemma4ForConditionalGeneration"]).save_pretrained(tmp_path)
    make_tokenizer(256).save_pretrained(tmp_path)
    refused = asked(process, str(tmp_path), "--max-model-len", "512")["refused"]
    assert refused.endswith("failed to be inspected: ModuleNotFoundError: No module named 'torchvision'")


def test_a_folder_without_a_model(process: EngineProcess, tmp_path: Path) -> None:
    assert "config.json" in asked(process, str(tmp_path))["refused"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (ServerSettings("cheapest:analytic"), "device 'cpu'"),
        (ServerSettings("cheapest:cpu-llama-native"), "measured on"),
        (ServerSettings("always-swap", host_gib=1e-9), "holds no KV block"),
        (ServerSettings("always-swap", host_gib=1e6), "more than half of the"),
    ],
)
def test_settings_that_the_engine_would_refuse_at_its_start(
    process: EngineProcess, model: str, settings: ServerSettings, words: str
) -> None:
    found = asked(process, model, "--dtype", "float32", "--block-size", str(BLOCK_SIZE), settings=settings)
    assert words in found["refused"] and found["block_bytes"] == 0
    assert bool(found["groups"]) != (words == "measured on"), "of another model's, before the layers are made"
    assert found["helps"] == (["--policy always-swap"] if settings.policy != "always-swap" else [])


@pytest.mark.parametrize("order", ["fcfs", "urgent"])
def test_groups_that_share_memory_are_counted_once(process: EngineProcess, tmp_path: Path, order: str) -> None:
    """Two layers with a window and two without: a block is two layers' tokens, whichever group it belongs to."""
    skip_before_tables("several KV cache groups are")
    config = MistralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=2048, sliding_window=128, max_position_embeddings=2048, architectures=["MistralForCausalLM"],
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    make_tokenizer(256).save_pretrained(tmp_path)
    settings = ServerSettings("always-swap", host_gib=0.5, order=order)
    found = asked(process, str(tmp_path), "--dtype", "float32", "--block-size", str(BLOCK_SIZE), settings=settings)
    assert sorted(group["kind"] for group in found["groups"]) == ["FullAttentionSpec", "SlidingWindowSpec"]
    assert not found["refused"] and found["helps"] == []
    assert found["block_bytes"] == 2 * 2 * 2 * 32 * 4 * BLOCK_SIZE


@pytest.mark.parametrize(
    ("family", "prepare", "layers"),
    [
        ("llama", features.itself_as_drafter, 4),
        ("llama", features.eagle_head, 1),
        ("llama", features.eagle3_head, 1),
        ("qwen2", features.further_layer, 1),
    ],
    ids=["draft model", "EAGLE", "EAGLE-3", "MTP"],
)
def test_a_drafters_layers_are_in_the_same_blocks(
    process: EngineProcess, family: str, prepare: Any, layers: int, tmp_path: Path
) -> None:
    skip_before_tables("speculation is")
    model = families.make(family, tmp_path / "model")
    speculation = prepare(tmp_path, model)["speculative_config"]
    flags = ("--dtype", "float32", "--block-size", str(BLOCK_SIZE))
    alone = asked(process, str(model), *flags)
    beside = asked(process, str(model), *flags, "--speculative-config", json.dumps(speculation))
    assert beside["refused"] == beside["not_laid_out"] == ""
    (group,) = beside["groups"]
    assert group["layers"] == features.LAYERS + layers
    assert beside["block_bytes"] * features.LAYERS == alone["block_bytes"] * (features.LAYERS + layers)


@pytest.mark.feature("speculation on MLA in steps below the model's length", refused=True)
def test_drafts_beside_prompts_that_fit_into_no_step(process: EngineProcess, tmp_path: Path) -> None:
    """vLLM computes these prompts whole, also without kvpolicy, and such a one waits forever. Its default for a server,
    2,048 tokens in a step, is too few, too."""
    if torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM computes these prompts in chunks on this machine")
    families.skip_unless_served(families.FAMILIES["deepseek-v3"])
    model = str(families.make("deepseek-v3", tmp_path / "model"))
    drafts = json.dumps(features.further_latent_layer(tmp_path, Path(model))["speculative_config"])
    flags, few = ("--dtype", "bfloat16", "--max-model-len", "4096"), ("--max-num-batched-tokens", "128")
    drafting = (*flags, "--speculative-config", drafts)
    for given, tokens in (((), "2048"), (few, "128")):
        found = asked(process, model, *drafting, *given)
        assert f"at most {tokens} tokens in a step" in found["refused"]
        assert "Give --max-num-batched-tokens 4096" in found["refused"]
        assert found["helps"] == ["--max-num-batched-tokens 4096", "no --speculative-config"]
    limit = ("--max-num-scheduled-tokens", "128")
    for given in ((*flags, *limit), (*drafting, *limit)):
        found = asked(process, model, *given)
        assert "at most 128 tokens in a step" in found["refused"]
        assert "--max-num-scheduled-tokens 4096" in found["refused"]
        assert found["helps"] == ["--max-num-scheduled-tokens 4096"]
        raised = asked(process, model, *given[:-1], "4096")
        assert raised["refused"] == raised["not_laid_out"] == "" and raised["groups"]
    assert not asked(process, model, *flags, *few)["refused"], "without drafts"
    enough = asked(process, model, *drafting, "--max-num-batched-tokens", "4096")
    assert enough["refused"] == enough["not_laid_out"] == "" and enough["groups"]


@pytest.mark.feature("steps beyond a block of Mamba2 states, with prefix caching on a CPU", refused=True)
def test_steps_beyond_a_block_of_states(process: EngineProcess, tmp_path: Path) -> None:
    """At which vLLM ends, also without kvpolicy (`tests/vllm/test_state_steps.py`): so do a server's defaults, 2,048
    tokens in a step and prefix caching. Attention and states of the model have blocks of 128 tokens."""
    families.skip_unless_served(families.FAMILIES["granite-4"])
    llm = str(families.make("granite-4", tmp_path))
    for given, tokens in (((), "2048"), (("--max-num-batched-tokens", "129"), "129")):
        found = asked(process, llm, "--dtype", "float32", *given)
        assert f"128 here, and a step may have {tokens}" in found["refused"]
        assert len(found["groups"]) == 4 and found["block_bytes"] == 0
        assert found["helps"] == ["--max-num-batched-tokens 128", "--no-enable-prefix-caching"]
    for given in (("--max-num-batched-tokens", "128"), ("--no-enable-prefix-caching",)):
        found = asked(process, llm, "--dtype", "float32", *given)
        assert found["refused"] == found["not_laid_out"] == "" and len(found["groups"]) == 4


def test_the_mode_of_states_that_is_not_served_is_no_choice(process: EngineProcess, tmp_path: Path) -> None:
    """vLLM has ``all`` up to 0.31, where states are not served at all. What else a layer may say is refused by it
    (`tests/vllm/test_refusals.py`)."""
    llm = str(families.make("granite-4", tmp_path))
    found = asked(process, llm, "--dtype", "float32", *SMALL_STEPS, "--mamba-cache-mode", "all")
    older = "states beside attention on a vLLM older than 0.32"
    assert (older if before_tables() else "argument --mamba-cache-mode: invalid choice: 'all'") in found["refused"]
    assert found["groups"] == [] and found["helps"] == []


@pytest.mark.feature("a cache of prompts over windows, states or several KV cache groups", refused=True)
@pytest.mark.parametrize(
    ("family", "words", "helps"),
    [
        (
            "gpt-oss",
            "of a model with several KV cache groups, or windows",
            ["--disable-hybrid-kv-cache-manager", "--cache off"],
        ),
        (
            "granite-4",
            "of a model whose layers keep states beside attention",
            ["--cache off, and --max-num-batched-tokens 128"],
        ),
        ("deepseek-v2", "of an MLA model", ["--cache off"]),
    ],
)
def test_a_cache_of_prompts_is_refused_by_the_models_layers(
    process: EngineProcess, family: str, words: str, helps: list[str], tmp_path: Path
) -> None:
    """And the model is served without it, or with its windows stored whole; with Mamba2 states in small steps besides,
    which the default of a server on a CPU exceeds."""
    families.skip_unless_served(families.FAMILIES[family])
    llm = str(families.make(family, tmp_path / "model"))
    flags = ["--dtype", families.FAMILIES[family].dtype, "--enable-prefix-caching"]
    found = asked(process, llm, *flags, settings=ServerSettings("always-swap", host_gib=0.5, cache="cost"))
    assert found["refused"].endswith(f"kvpolicy does not cache prompts {words}: leave --cache out")
    assert found["helps"] == helps


def test_prompts_in_files_are_refused_before_the_engine_starts(
    process: EngineProcess, model: str, tmp_path: Path
) -> None:
    """A hash has the name of an adapter, which stands for other weights tomorrow; and weights that a server is given
    while it runs, or has of a daemon, are not those on disk."""
    files = ServerSettings("always-swap", host_gib=0.5, cache="lru", cache_files=tmp_path / "kv", cache_files_gib=1.0)
    flags = ("--dtype", "float32", "--block-size", str(BLOCK_SIZE))
    assert not asked(process, model, *flags, settings=files)["refused"]
    for refused, words in (
        (["--enable-lora"], "cache_files: the hash of a block has the name of its adapter"),
        (["--weight-transfer-config", '{"backend": "nccl"}'], "leave out --weight-transfer-config"),
        (["--load-format", "ipc_cache"], "cache_files: --load-format ipc_cache may take other weights"),
    ):
        found = asked(process, model, *flags, *refused, settings=files)
        assert words in found["refused"]
        assert found["helps"] == ["no --cache-files", "--cache off"]


def test_files_that_hold_no_block_are_refused_before_the_engine_starts(
    process: EngineProcess, model: str, tmp_path: Path
) -> None:
    """A worker would say so only when it has loaded the model."""
    files = ServerSettings("always-swap", host_gib=0.5, cache="lru", cache_files=tmp_path / "kv", cache_files_gib=1e-6)
    found = asked(process, model, "--dtype", "float32", "--block-size", str(BLOCK_SIZE), settings=files)
    assert "cache_files_gib 1e-06 holds no file of a KV block" in found["refused"]
    assert found["helps"] == ["no --cache-files", "--cache off"]


def test_a_folder_for_files_that_others_can_change_is_refused(
    process: EngineProcess, model: str, tmp_path: Path
) -> None:
    """A worker would say so only when it has loaded the model."""
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o777)
    files = ServerSettings("always-swap", host_gib=0.5, cache="lru", cache_files=tmp_path / "kv", cache_files_gib=1.0)
    found = asked(process, model, "--dtype", "float32", "--block-size", str(BLOCK_SIZE), settings=files)
    assert "cache_files cannot be used" in found["refused"] and "(mode 777); chmod it to 700" in found["refused"]
    assert found["helps"] == ["no --cache-files", "--cache off"]


def test_layers_that_cannot_be_made_are_no_answer(process: EngineProcess, model: str, tmp_path: Path) -> None:
    config = json.loads((Path(model) / "config.json").read_text())
    config |= {"num_attention_heads": 4, "num_key_value_heads": 3}
    shutil.copytree(model, tmp_path / "wrong")
    (tmp_path / "wrong" / "config.json").write_text(json.dumps(config))
    assert "divisible" in asked(process, str(tmp_path / "wrong"))["not_laid_out"]


@pytest.mark.parametrize("llm", ["/nowhere/model", "./model", "~/no-such-model"])
def test_a_folder_that_is_not_there_is_no_id_at_a_hub(llm: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Said at once: no engine's process is started for it."""
    for command in (["check", llm], ["serve", llm, "--policy", "always-swap"]):
        assert run(*command) == 2
        assert f"{llm}: no such folder" in capsys.readouterr().err


def test_nothing_is_left_on_disk(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    check(model, SWAP, [])
    assert [file for file in tmp_path.rglob("*") if file.name == "rendezvous"] == []


def test_every_version_makes_its_groups_where_they_are_looked_for() -> None:
    """The module of vLLM that has both functions, by the sources at hand."""
    folders = [path for path in (ROOT / ".vllm-sources").glob("*/vllm/v1/core") if path.is_dir()]
    if not folders:
        pytest.skip("no sources of other versions; fetch them: python tools/vllm_sources.py .vllm-sources")
    for folder in folders:
        name = "kv_cache_planning.py" if (folder / "kv_cache_planning.py").exists() else "kv_cache_utils.py"
        text = (folder / name).read_text()
        assert "def get_kv_cache_groups(" in text and "def get_kv_cache_config_from_groups(" in text, folder


def test_layers_are_told_apart(process: EngineProcess, tmp_path: Path) -> None:
    """By what vLLM makes of them, whether or not they are served."""
    config = MistralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=2048, sliding_window=128, max_position_embeddings=2048, architectures=["MistralForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    make_tokenizer(256).save_pretrained(tmp_path)
    (group,) = asked(process, str(tmp_path), "--dtype", "float32")["groups"]
    assert group["kind"] == "SlidingWindowSpec" and group["window"] == 128 and group["layers"] == 2


def report(**changes: Any) -> CheckReport:
    values: dict[str, Any] = {
        "llm": "m", "engine": "vllm 0", "device": "cpu", "refused": "",
        "groups": (Group("FullAttentionSpec", 4, 16, None),), "block_bytes": 1 << 20, "not_laid_out": "",
        "host_gib": 1.0,
    }  # fmt: skip
    return CheckReport(**values | changes)


def test_the_report_says_what_host_memory_holds() -> None:
    assert report().text().splitlines() == [
        "m: served by vllm 0 on cpu",
        "  4 layers of full attention, blocks of 16 tokens",
        "  1 GiB of host memory hold 1,024 blocks, 16,384 tokens",
    ]
    two = (Group("FullAttentionSpec", 4, 16, None), Group("SlidingWindowSpec", 4, 16, 128))
    assert "sliding-window attention over 128 tokens" in report(groups=two).text()
    assert report(groups=two).text().endswith("1,024 blocks")
    assert "  1 layer of full attention, blocks" in report(groups=(Group("FullAttentionSpec", 1, 16, None),)).text()


def test_the_report_says_what_was_not_tested() -> None:
    untested = report(untested="M was not tested")
    assert untested.ok and untested.text().splitlines()[-1] == "  M was not tested"
    assert untested.to_dict()["untested"] == "M was not tested" and report().to_dict()["untested"] is None


def test_the_report_says_why_not() -> None:
    helped = report(refused="no", groups=(), block_bytes=0, helps=("--a 1", "no --b"))
    assert helped.text().splitlines()[-1] == "  it would be served with --a 1, or with no --b"
    assert helped.to_dict()["helps"] == ["--a 1", "no --b"]
    refused = report(refused="no: leave --x out", groups=(), block_bytes=0)
    assert not refused.ok and refused.text() == "m: not served by vllm 0 on cpu\n  no: leave --x out"
    assert refused.to_dict()["refused"] == "no: leave --x out" and refused.to_dict()["served"] is False
    late = report(not_laid_out="RuntimeError: needs weights", groups=(), block_bytes=0)
    assert not late.ok and late.to_dict()["served"] is None
    assert late.text().startswith("m: not known whether it is served by") and "only the engine can tell" in late.text()


@pytest.mark.slow
def test_ranks_beyond_the_kv_heads_hold_copies(model: str) -> None:
    """Of a model with two KV heads four ranks hold every token's KV twice."""
    heads = json.loads((Path(model) / "config.json").read_text())["num_key_value_heads"]
    alone = check(model, SWAP, ["--dtype", "float32", "--block-size", str(BLOCK_SIZE)])
    many = check(
        model, SWAP, ["--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--tensor-parallel-size", str(2 * heads)]
    )
    assert many.ok and many.block_bytes == 2 * alone.block_bytes
    assert alone.host_blocks == (1 << 29) // alone.block_bytes


def test_data_parallel_cores_have_the_same_blocks_each(process: EngineProcess, model: str) -> None:
    """None of the others is there to make a process group with. Host memory is given to each core by itself."""
    alone, two = (
        asked(process, model, "--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--data-parallel-size", str(n))
        for n in (1, 2)
    )
    assert not two["refused"] and not two["not_laid_out"] and two["groups"]
    assert two | {"untested": ""} == alone | {"untested": ""}, "of several cores not every version was tested"


EXAMPLE = {
    "kv_connector": "ExampleConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {"shared_storage_path": "/nowhere"},
}  # fmt: skip


def test_other_connectors_are_put_behind(process: EngineProcess, model: str) -> None:
    """vLLM takes the list that is made of them, the plugin says of it what it would say of one in full, and looks for
    what helps in its own options."""
    flags = ("--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--kv-transfer-config")
    alone = asked(process, model, *flags[:-1])
    assert not alone["refused"] and asked(process, model, *flags, json.dumps(EXAMPLE)) == alone
    wrong = asked(process, model, *flags, json.dumps(EXAMPLE | {"kv_connector": "OffloadingConnector"}))
    assert "OffloadingConnector should not be there" in wrong["refused"]
    ordered = ServerSettings("always-swap", host_gib=0.5, order="urgent")
    found = asked(process, model, *flags, json.dumps(EXAMPLE), settings=ordered)
    assert "order urgent" in found["refused"] and found["helps"] == ["--order fcfs"]


@pytest.mark.parametrize(
    ("family", "connector", "words"),
    [
        ("llama", "DecodeBenchConnector", ""),
        ("gpt-oss", "DecodeBenchConnector", ""),
        ("llama-4", "DecodeBenchConnector", ""),
        ("granite-4", "DecodeBenchConnector", "was tested beside it with Mamba2 states and one request alone"),
        ("granite-4", "SimpleCPUOffloadConnector", "was not tested beside it; tested are ExampleConnector"),
        ("gpt-oss", "SimpleCPUOffloadConnector", "was not tested beside it; tested are ExampleConnector"),
        ("llama", "SimpleCPUOffloadConnector", "was not tested beside it; tested are ExampleConnector"),
    ],
)
def test_a_connector_that_was_not_tested_is_told(
    process: EngineProcess, family: str, connector: str, words: str, tmp_path: Path
) -> None:
    families.skip_unless_served(families.FAMILIES["gpt-oss"])
    llm = str(families.make(family, tmp_path / "model"))
    other = json.dumps({"kv_connector": connector, "kv_role": "kv_both"})
    found = asked(process, llm, "--dtype", "float32", *SMALL_STEPS, "--kv-transfer-config", other)
    assert found["refused"] == found["not_laid_out"] == "" and found["groups"]
    assert found["untested"].startswith(f"{connector} {words}" if words else "")
    assert bool(found["untested"]) == bool(words)


@pytest.mark.feature("states beside a connector without groups", refused=True)
def test_states_beside_another_connector(process: EngineProcess, tmp_path: Path) -> None:
    """Of one that knows one KV cache group: by its code vLLM would end with "Failed to promote local KV cache specs"
    once it has loaded the weights, also without kvpolicy. Windows it stores whole."""
    families.skip_unless_served(families.FAMILIES["granite-4"])
    flags = ("--dtype", "float32", *SMALL_STEPS, "--kv-transfer-config", json.dumps(EXAMPLE))
    found = asked(process, str(families.make("granite-4", tmp_path / "states")), *flags)
    assert "ExampleConnector knows one KV cache group only" in found["refused"] and "states" in found["refused"]
    assert found["groups"] == [] and found["helps"] == []
    windows = asked(process, str(families.make("gpt-oss", tmp_path / "windows")), *flags)
    assert windows["refused"] == windows["not_laid_out"] == ""
    assert [group["kind"] for group in windows["groups"]] == ["FullAttentionSpec"]


@pytest.mark.slow
def test_states_are_split_over_ranks_that_hold_copies_of_keys_and_values(tmp_path: Path) -> None:
    """A hybrid's attention block has the bytes of a state, so ranks without a head of their own need fewer tokens a
    block. Before, layers of several ranks were made as one rank's, and vLLM refused the state that did not fit."""
    model = str(families.make("granite-4", tmp_path / "model", kv_heads=1))
    flags = ["--dtype", "float32", *SMALL_STEPS, "--tensor-parallel-size"]
    alone, two = (check(model, SWAP, [*flags, str(n)]) for n in (1, 2))
    state, (width, heads, head) = 8 * 32 * 32 * 4, (4, 1, 32)  # of one layer, without that of its convolution
    assert alone.ok and two.ok
    for found, ranks in ((alone, 1), (two, 2)):
        (attention,) = [group for group in found.groups if group.kind == "FullAttentionSpec"]
        rank_bytes = 2 * attention.block_size * heads * head * width
        assert found.block_bytes == ranks * rank_bytes >= state
    assert two.groups[-1].block_size < alone.groups[-1].block_size


def test_the_command_ends_with_status_one_where_it_is_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "check.json"
    command = ["check", model, "--json", str(file)]
    assert run(*command, "--pipeline-parallel-size", "2") == 1
    assert "not served" in capsys.readouterr().out
    assert "pipeline parallelism" in json.loads(file.read_text())["refused"]


@pytest.mark.slow
def test_the_benchmark_of_its_time_runs(model: str, tmp_path: Path) -> None:
    """As a user runs it; the time itself is not judged here."""
    file = tmp_path / "times.json"
    command = [sys.executable, "benchmarks/check_time.py", model, "--runs", "1", "--json", str(file), "--"]
    served, refused = (
        subprocess.run([*command, *flags], cwd=ROOT, env=environment(), capture_output=True, text=True)
        for flags in (("--dtype", "float32"), ("-tp", "3"))
    )
    assert served.returncode == 0, served.stderr
    written = json.loads(file.read_text())
    check, importing = written["runs"]
    assert written["asked"] == {"llm": model, "runs": 1, "vllm_flags": ["--dtype", "float32"]}
    assert written["versions"]["vllm"] and written["machine"]["cores"] and len(written["loads"]) == 2
    assert check["cpu_s"] > 0 and importing["cpu_s"] > 0
    assert refused.returncode == 1 and "divisible" in refused.stderr


def test_a_command_is_printed_only_once_it_is_checked(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`serve --dry-run`, with two flags that vLLM refuses, each for itself."""
    dry = ["serve", model, "--policy", "always-swap", "--dry-run"]
    for flags, word in ((["-tp", "3"], "divisible"), (["--speculative-config", '{"bad": 1}'], "Unexpected keyword")):
        assert run(*dry, *flags) == 2
        printed = capsys.readouterr()
        assert not printed.out and "not served" in printed.err and word in printed.err
