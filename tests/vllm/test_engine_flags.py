"""What vLLM makes of a server's flags before a profile of that server: ``kvpolicy_vllm.bench.engine_flags``, asked
through ``kvpolicy_vllm.bench.inspect_model``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from kvpolicy_vllm import launch
from kvpolicy_vllm.bench.engine_process import FLAGS, EngineProcess, environment
from kvpolicy_vllm.bench.own_server import OwnServer
from tests.vllm import families

PLUGIN = launch.flags({"policy": "always-recompute"})
DRAFTS = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}')


@pytest.fixture(scope="module")
def process() -> Iterator[EngineProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        with EngineProcess("kvpolicy_vllm.bench.inspect_model", measures=False) as started:
            yield started


def asked(process: EngineProcess, llm: str, *flags: str) -> dict[str, Any]:
    return process.ask({"llm": llm, "make": "", "seed": 0, "flags": [*PLUGIN, *flags]})


def test_what_is_not_given_is_a_servers(process: EngineProcess, model: str) -> None:
    """Two ranks of the CPU have twice the token budget and requests of one."""
    one, two = (
        asked(process, model, "--dtype", "float32", "--tensor-parallel-size", str(ranks))["server"] for ranks in (1, 2)
    )
    assert (one["batched_tokens"], two["batched_tokens"]) == (2048, 4096)
    assert (one["max_requests"], two["max_requests"]) == (128, 256)
    assert one["block_size"] == two["block_size"] == 128 and one["gives_length"] is False
    assert one["kv_token_bytes"] == two["kv_token_bytes"] == 4096, "over all ranks"
    half = asked(process, model, "--dtype", "bfloat16")["server"]
    assert half["kv_token_bytes"] == 2048


def test_what_is_given_holds_on_the_command_line_and_in_a_file(
    process: EngineProcess, model: str, tmp_path: Path
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("model: some/other\nblock-size: 32\nmax-model-len: 1024\nmax-num-seqs: 9\nport: 8001\n")
    given = ("--block-size", "32", "--max-model-len", "1k", "--max-num-seqs", "9", "--port", "8001")
    found = asked(process, model, "--config", str(file), "--max-num-batched-tokens", "640")["server"]
    assert (found["block_size"], found["model_tokens"], found["max_requests"]) == (32, 1024, 9)
    assert found["batched_tokens"] == 640 and found["gives_length"] is True
    assert asked(process, model, *given)["server"]["model_tokens"] == 1000


@pytest.mark.skipif(not hasattr(EngineArgs, "max_num_scheduled_tokens"), reason="this vLLM has no such flag")
def test_an_engine_is_given_its_batch_whatever_the_token_budget(process: EngineProcess, model: str) -> None:
    """It has the server's flags as well, and is measured in steps of that budget."""
    flags = ("--max-num-batched-tokens", "640", "--max-num-scheduled-tokens", "128")
    server = OwnServer(llm=model, flags=flags, **asked(process, model, *flags)["server"])
    arguments = server.engine_arguments(on_cpu=True)
    assert arguments["max_num_batched_tokens"] == 640 and arguments[FLAGS] == [model, *flags]


def test_blocks_are_those_that_vllm_makes_of_the_layers(process: EngineProcess, tmp_path: Path) -> None:
    """A block of attention is as large as a state, whatever size is asked for; windows have a table of their own."""
    granite = str(families.make("granite-4", tmp_path / "granite"))
    within = ("--dtype", "float32", "--max-num-batched-tokens", "64")
    for asked_for in ((), ("--block-size", "32")):
        found = asked(process, granite, *within, *asked_for)["server"]
        assert found["block_size"] == (96 if asked_for else 128) and found["keeps_states"] is True
        assert found["block_tables"] == 4 and found["kv_token_bytes"] == 4 * 512
    gpt_oss = str(families.make("gpt-oss", tmp_path / "gpt-oss"))
    found = asked(process, gpt_oss, "--dtype", "float32", "--block-size", "32")["server"]
    assert (found["block_size"], found["block_tables"], found["keeps_states"]) == (32, 2, False)
    whole = asked(process, gpt_oss, "--dtype", "float32", "--disable-hybrid-kv-cache-manager")["server"]
    assert whole["block_tables"] == 1 and whole["kv_token_bytes"] == found["kv_token_bytes"]


def test_layers_that_are_not_served_are_refused_before_weights_are_read(process: EngineProcess, tmp_path: Path) -> None:
    """As with prefix caching and steps beyond a block of states, at which vLLM 0.32's CPU build ends."""
    families.skip_unless_served(families.FAMILIES["granite-4"])
    granite = str(families.make("granite-4", tmp_path))
    found = asked(process, granite, "--dtype", "float32")
    assert found["server"] is None and "than a block of Mamba2 states has, 128 here" in found["refused"]
    assert asked(process, granite, "--dtype", "float32", "--no-enable-prefix-caching")["server"]["keeps_states"]


@pytest.mark.parametrize(
    ("llm", "flags", "words"),
    [
        ("", ("--no-such-flag", "3"), "unrecognized arguments: --no-such-flag"),
        ("", ("--block-size", "many"), "--block-size"),
        ("", ("--config", "no-such.yaml"), "no-such.yaml"),
        ("", ("--max-model-len", "1000000"), "max_model_len"),
        ("", ("--pipeline-parallel-size", "2"), "kvpolicy does not serve pipeline parallelism"),
        ("", ("--data-parallel-size", "2"), "--data-parallel-size is 2: one engine core is measured"),
        ("", DRAFTS, "the server drafts: an engine that does is not measured; leave --speculative-config"),
        ("", ("--help",), "start no server"),
        ("org/no-such-model", (), "outgoing traffic has been disabled"),
    ],
)
def test_what_would_not_start_is_refused_with_the_reason(
    process: EngineProcess, model: str, llm: str, flags: tuple[str, ...], words: str
) -> None:
    found = asked(process, llm or model, *flags)
    assert found["server"] is None and words in found["refused"]


def test_a_servers_engine_finds_what_a_server_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other plugins of vLLM's, a hub, and the machine's threads; no measured engine does otherwise."""
    for name in ("VLLM_PLUGINS", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    alone, as_server = environment(), environment(as_server=True)
    assert alone["VLLM_ENABLE_V1_MULTIPROCESSING"] == as_server["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert alone["VLLM_PLUGINS"] == "kvpolicy" and alone["HF_HUB_OFFLINE"] == alone["OMP_NUM_THREADS"] == "1"
    changed = {"VLLM_PLUGINS", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"}
    assert not changed & set(as_server) and not changed & set(os.environ)
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in set(environment(measures=False)) - set(os.environ)
