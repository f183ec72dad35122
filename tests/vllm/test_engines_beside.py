"""kvpolicy's connector beside vLLM's others, and what an engine publishes of its prefix cache. Real engines."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import families, harness
from tests.vllm.conftest import PLENTY, SCARCE, job
from tests.vllm.test_connectors_beside import beside
from tests.vllm.test_server import ROUNDS, by_label, complete, metrics, server, settled, wait_until

PROMPT, OUTPUT = 150, 150
BOUNDARY, INSIDE, LATER = 256, 229, 291
"""Computed tokens at a preemption: at the end of a block, or within one."""
CASES: dict[str, dict[str, Any]] = {
    "first": {"tokens": [], "kind": "swap"},
    "undisturbed": {"tokens": [], "kind": "swap"},
    "at a block's end": {"tokens": [BOUNDARY], "kind": "swap"},
    "inside a block": {"tokens": [INSIDE], "kind": "swap"},
    "twice": {"tokens": [INSIDE, LATER], "kind": "swap"},
}
IN_PREFILL = 64
CLIENTS = 16
"""Of a server whose memory holds some ten of their requests."""
LOADED_BESIDE = "Inject KV cache of "
"""What vLLM's example of a connector logs at every load."""
LMCACHE = "KVPOLICY_LMCACHE"
"""Names a folder that LMCache was installed to without most of its dependencies."""


def asked(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    return {"prompt": [rng.randrange(10, 2000) for _ in range(PROMPT)], "max_tokens": OUTPUT}


ANOTHER: dict[str, dict[str, Any]] = {
    "another, in its prefill": {"tokens": [IN_PREFILL], "kind": "swap", "request": asked(6)},
    "another, again": {"tokens": [], "kind": "swap", "request": asked(6)},
}
"""Of a prompt that was not computed before."""
FAILING = {"its load fails": {"tokens": [INSIDE], "kind": "swap", "failing": True}}
ENGINE = {
    "max_model_len": 512, "max_num_seqs": 4, "num_gpu_blocks_override": 120, "block_size": 32,
    "enable_prefix_caching": False, "max_num_batched_tokens": 512,
}  # fmt: skip
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
DECODE_BENCH = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}


WINDOWED = {"gpt-oss": 60, "gemma-4": 130}
"""KV blocks that hold some of eight requests of 200 tokens, whose windows have block tables of their own."""


def example(folder: Path) -> dict[str, Any]:
    """vLLM's example of a connector: it stores the KV of prompts in a folder, and loads them from there."""
    extra = {"shared_storage_path": str(folder)}
    return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def lmcache(port: int) -> dict[str, Any]:
    """With a server of its own, a process that it starts: of LMCache's two connectors only this one runs on a CPU."""
    extra = {
        "lmcache.mp.port": port, "lmcache.mp.mq_timeout": 60,
        "lmcache.mp.autostart": True, "lmcache.mp.autostart.wait_timeout": 300,
        "lmcache.mp.autostart.server_args": "--l1-size-gb 0.5 --chunk-size 32 --eviction-policy LRU "
        "--supported-transfer-mode engine_driven",
    }  # fmt: skip
    return {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def end_lmcache(port: int) -> None:
    """LMCache leaves its server behind."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().decode().split("\0")
            if any(word.startswith("lmcache.") for word in words) and str(port) in words:
                os.kill(int(process.name), signal.SIGTERM)


def interrupted(
    model: str,
    other: dict[str, Any],
    cases: dict[str, Any],
    folder: Path,
    path: Sequence[str | Path] = (),
    **engine: Any,
) -> dict[str, Any]:
    """One request alone, forced out at given lengths, the device's KV overwritten before it comes back."""
    work = {
        "scenario": "interrupted", "model": model, "cases": cases, "engine": ENGINE | engine, "request": asked(5),
        "plugin": beside(harness.plugin("always-swap"), other),
    }  # fmt: skip
    if not path:
        return harness.run(work, folder)
    environment = harness.environment()
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (path[0], environment["PYTHONPATH"], *path[1:])))
    return harness.run_module("tests.vllm.engine_process", work, folder, environment, warm=False)


def assert_no_bit_changed(result: dict[str, Any]) -> None:
    reference = result["cases"]["undisturbed"]
    assert len(set(reference["tokens"])) > 30, "a text that repeats itself shows nothing"
    for name in CASES.keys() - {"first", "undisturbed"}:
        found = result["cases"][name]
        assert found["out_at"] == CASES[name]["tokens"]
        assert harness.total(found["stats"], "loaded_tokens") == sum(CASES[name]["tokens"])
        assert harness.total(found["stats"], "fallbacks") == 0
        assert (found["tokens"], found["logprobs"]) == (reference["tokens"], reference["logprobs"])


@pytest.mark.feature("beside ExampleConnector")
def test_beside_a_connector_that_stores_prompts(model: str, tmp_path: Path) -> None:
    """Its KV of the prompt is loaded for every request but the first; what the request computed comes back by ours."""
    result = interrupted(model, example(tmp_path / "stored"), CASES, tmp_path)
    assert list((tmp_path / "stored").iterdir()), "nothing was stored"
    assert_no_bit_changed(result)
    first, reference = result["cases"]["first"], result["cases"]["undisturbed"]
    assert first["tokens"] == reference["tokens"]
    harness.assert_nothing_left(result)


@pytest.mark.feature("beside ExampleConnector")
@pytest.mark.feature("MultiConnector")
def test_a_server_with_a_connector_of_ones_own(model: str, tmp_path: Path) -> None:
    """`kvpolicy serve`, which checks the flags before, with `--kv-transfer-config` of another connector. Each request
    alone first, whose prompt the other connector stores, then all at once in too little memory: prompts are loaded by
    that one and victims by ours, and everybody says the same."""
    stored, log = tmp_path / "stored", tmp_path / "server.log"
    options = ("--policy", "always-swap", "--host-gib", "0.25", "--no-enable-prefix-caching")
    given = ("--kv-transfer-config", json.dumps(example(stored)))
    with server(model, tmp_path, *options, *given, checked=True) as (base, _):
        assert "could not be looked at beforehand" not in log.read_text()
        alone = [said(base, seed) for seed in range(CLIENTS)]
        assert metrics(base)["preemptions_total"] == 0 and LOADED_BESIDE not in log.read_text()
        for _ in range(ROUNDS):
            with ThreadPoolExecutor(CLIENTS) as pool:
                assert list(pool.map(lambda seed: said(base, seed), range(CLIENTS))) == alone
            wait_until(lambda: settled(metrics(base)), lambda: f"the metrics do not settle: {metrics(base)}")
            if metrics(base)["loaded_tokens_total"]:
                break
        result, by_direction = metrics(base), by_label(base, "copy_bytes_total")
    assert result["resumed_total"] == result["preemptions_total"] >= 1 and result["loaded_tokens_total"] > 0
    assert by_direction['direction="save"'] > 0 and by_direction['direction="load"'] > 0
    assert result["host_slots_used"] == 0 and result["open_preemptions"] == 0
    prompts = len(list(stored.iterdir()))
    assert CLIENTS // 2 <= prompts <= CLIENTS, "a folder for each prompt of a block or more"
    # Of the second time; who is preempted in the step that was to load it has its KV from us, or computes it.
    assert log.read_text().count(LOADED_BESIDE) >= prompts // 2


def said(base: str, seed: int) -> str:
    """The text of an answer that is as long as it should be."""
    answer = complete(base, seed, (40, 70))
    assert answer["usage"]["completion_tokens"] == answer["wanted"]
    return str(answer["choices"][0]["text"])


@pytest.mark.feature("beside DecodeBenchConnector")
def test_beside_a_connector_that_makes_prompts_up(model: str, tmp_path: Path) -> None:
    """A swap brings back what it made up. A recompute has the prompts' real KV and says something else, so that of a
    failed load only the length is known."""
    result = interrupted(model, DECODE_BENCH, CASES | FAILING, tmp_path)
    assert_no_bit_changed(result)
    failed = result["cases"]["its load fails"]
    assert harness.total(failed["stats"], "fallbacks", reason="load_failed") == 1
    assert len(failed["tokens"]) == OUTPUT
    harness.assert_nothing_left(result)


def of_family(name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """Its model, and its engine arguments in the place of those of :data:`ENGINE`: states choose their block size."""
    kind = families.FAMILIES[name]
    families.skip_unless_served(kind)
    return str(families.make(name, folder / "model")), {"block_size": None, "dtype": kind.dtype} | kind.engine


@pytest.mark.feature("MultiConnector over several KV cache groups")
@pytest.mark.parametrize(
    "family",
    [
        "gpt-oss",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma-4", "llama-4")),
    ],
)
def test_windows_beside_a_connector_that_makes_prompts_up(family: str, tmp_path: Path) -> None:
    """In groups of their own."""
    assert_made_up_prompts_come_back(family, tmp_path)


@pytest.mark.feature("MultiConnector over several KV cache groups")
def test_states_beside_a_connector_that_makes_prompts_up(tmp_path: Path) -> None:
    """Of one request alone: that connector writes to the states of all, whichever request it is given. A failed load is
    recomputed in steps within a block of states, beyond which vLLM ends by itself (`tests/vllm/test_state_steps.py`).
    """
    assert_made_up_prompts_come_back("granite-4", tmp_path, max_num_batched_tokens=64)


def assert_made_up_prompts_come_back(family: str, folder: Path, **limits: Any) -> None:
    """As of full attention in :func:`test_beside_a_connector_that_makes_prompts_up`."""
    model, engine = of_family(family, folder)
    result = interrupted(model, DECODE_BENCH, CASES | FAILING, folder, enable_prefix_caching=True, **engine | limits)
    assert tuple(result["groups"]) == families.FAMILIES[family].groups
    assert_no_bit_changed(result)
    failed = result["cases"]["its load fails"]
    assert harness.total(failed["stats"], "fallbacks", reason="load_failed") == 1
    assert len(failed["tokens"]) == OUTPUT
    harness.assert_nothing_left(result)


@pytest.mark.feature("windows stored whole")
@pytest.mark.feature("beside ExampleConnector")
def test_windows_beside_a_connector_without_groups(tmp_path: Path) -> None:
    """For which vLLM stores windows whole, in one group: ExampleConnector stores and loads the prompt's."""
    model, engine = of_family("gpt-oss", tmp_path)
    result = interrupted(model, example(tmp_path / "stored"), CASES, tmp_path, **engine)
    assert result["groups"] == ["FullAttentionSpec"]
    assert list((tmp_path / "stored").iterdir()), "nothing was stored"
    assert_no_bit_changed(result)
    harness.assert_nothing_left(result)


@pytest.mark.feature("beside LMCacheMPConnector")
@pytest.mark.slow
def test_beside_lmcache(model: str, tmp_path: Path, free_ports: tuple[int, int]) -> None:
    """Prompts are computed once; whoever brings one again has its prefix from LMCache, as LMCache says, also where its
    first request was swapped in between."""
    if LMCACHE not in os.environ:
        pytest.skip(f"{LMCACHE} names no folder with LMCache; docs/other-connectors.md says how to make one")
    path = (Path(__file__).parent / "lmcache_beside", os.environ[LMCACHE])
    cases = CASES | ANOTHER | FAILING
    try:
        result = interrupted(model, lmcache(free_ports[0]), cases, tmp_path, path, max_num_batched_tokens=64)
    finally:
        end_lmcache(free_ports[0])
    assert_no_bit_changed(result)
    assert result["output"].count("Retrieved 128 tokens") >= len(cases) - 2, "all but the first of either prompt"
    cases = result["cases"]
    for computed, prefix_loaded in (("first", "undisturbed"), ("another, in its prefill", "another, again")):
        assert cases[computed]["tokens"] == cases[prefix_loaded]["tokens"]
    assert cases["another, in its prefill"]["out_at"] == [IN_PREFILL]
    assert harness.total(cases["another, in its prefill"]["stats"], "loaded_tokens") == IN_PREFILL
    assert harness.total(cases["its load fails"]["stats"], "fallbacks", reason="load_failed") == 1
    assert len(cases["its load fails"]["tokens"]) == OUTPUT
    harness.assert_nothing_left(result)


@pytest.mark.feature("a node that only decodes")
@pytest.mark.slow
def test_a_node_that_only_decodes(model: str, tmp_path: Path) -> None:
    """A step has no more tokens than requests may run. Each prompt is made up once and stays in the prefix cache, so
    that a recompute finds it there, and neither option changes a token."""
    seats, requests = 8, harness.prompts(6, (129, 129), (70, 90), seed=4)
    engine = PLENTY | {"max_num_seqs": seats, "max_num_batched_tokens": seats, "enable_prefix_caching": True}
    work = job(model, requests, engine | {"kv_transfer_config": DECODE_BENCH}, gaps=True)
    reference = harness.run(work, tmp_path)
    plugin = beside(harness.alternating(), DECODE_BENCH)
    result = harness.run(job(model, requests, engine, scenario="harried", every=12, plugin=plugin), tmp_path)
    harness.assert_exact(reference, result)
    harness.assert_nothing_left(result)
    for executed in ("swap", "recompute"):
        assert harness.total(result["stats"], "preemptions", executed=executed) >= 2


@pytest.mark.feature("MultiConnector over several KV cache groups")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt-oss", "gemma-4"])
def test_windows_on_a_node_that_only_decodes(family: str, tmp_path: Path) -> None:
    """In memory for some of the requests, with more of them forced out: all come back by ours, as made up as before. A
    recompute would have the prompt's real keys and values, as windows leave nothing of it in the prefix cache."""
    model, own = of_family(family, tmp_path)
    seats, requests = 8, harness.prompts(8, (129, 129), (70, 90), seed=4)
    engine = own | {"max_num_seqs": seats, "max_num_batched_tokens": seats}
    plenty, scarce = ({"num_gpu_blocks_override": blocks} for blocks in (800, WINDOWED[family]))
    stock = {"kv_transfer_config": DECODE_BENCH}
    reference = harness.run(job(model, requests, engine | plenty | stock, gaps=True), tmp_path)
    plugin = beside(harness.plugin("always-swap"), DECODE_BENCH)
    result = harness.run(job(model, requests, engine | scarce, scenario="harried", every=12, plugin=plugin), tmp_path)
    harness.assert_exact(reference, result)
    harness.assert_nothing_left(result)
    stats = result["stats"]
    assert harness.total(stats, "preemptions", cause="memory") >= 1
    assert harness.total(stats, "preemptions", executed="swap") == harness.total(stats, "preemptions")
    assert harness.total(stats, "loaded_tokens") > 0 and harness.total(stats, "fallbacks") == 0


@pytest.mark.feature("beside NixlConnector")
@pytest.mark.slow
def test_prompts_computed_by_another_engine(
    model: str, requests: list[dict[str, Any]], references: dict[str, Any], tmp_path: Path, free_ports: tuple[int, int]
) -> None:
    """NIXL fetches each prompt from an engine that computes nothing else; what memory then takes from a request comes
    back by ours, or is recomputed."""
    pytest.importorskip("nixl", reason="NIXL is not installed: pip install nixl")
    files = {"handed": str(tmp_path / "handed.json"), "done": str(tmp_path / "done")}
    prefiller = job(model, requests, PLENTY | {"kv_transfer_config": NIXL}, scenario="prefills") | files
    decoder = job(model, requests, SCARCE, scenario="decodes", plugin=beside(harness.alternating(), NIXL)) | files
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(run_with_port, prefiller, tmp_path / "prefills", free_ports[0])
        result = run_with_port(decoder, tmp_path / "decodes", free_ports[1])
        assert other.result()["handed"] == len(requests)
    assert result["fetched"] == len(requests)
    harness.assert_exact(references["requests"], result)
    harness.assert_nothing_left(result)
    assert harness.total(result["stats"], "preemptions", executed="swap") >= 2
    assert harness.total(result["stats"], "preemptions", executed="recompute") >= 2
    assert harness.total(result["stats"], "loaded_tokens") > 0


def run_with_port(work: dict[str, Any], folder: Path, port: int) -> dict[str, Any]:
    """As `harness.run`, in a process of its own whose NIXL listens on this port."""
    environment = harness.environment() | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
    return harness.run_module("tests.vllm.engine_process", work, folder, environment, warm=False)


@pytest.fixture
def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("localhost", 0))
        other.bind(("localhost", 0))
        return one.getsockname()[1], other.getsockname()[1]


@pytest.mark.feature("beside ExampleConnector")
@pytest.mark.feature("metrics")
def test_under_pressure_with_metrics_of_both(
    model: str, requests: list[dict[str, Any]], references: dict[str, Any], tmp_path: Path
) -> None:
    """The engine core in another process, from which the metrics come by MultiConnector."""
    plugin = beside(harness.plugin("always-swap"), example(tmp_path / "stored"))
    work = job(model, requests, SCARCE, scenario="own_process", plugin=plugin)
    result = harness.run(work, tmp_path, multiprocess=True)
    harness.assert_exact(references["requests"], result)
    told = result["metrics"]
    assert told["preemptions"] >= 2 and told["loaded_tokens"] > 0
    assert told["host_slots_used"] == 0 and told["host_slots_total"] > 0


@pytest.mark.feature("KV events")
def test_events_tell_what_the_prefix_cache_holds(model: str, related: list[dict[str, Any]], tmp_path: Path) -> None:
    """With both options in turn: what a reader believes to be cached is, and every block has the tokens it says."""
    engine = SCARCE | {"enable_prefix_caching": True}
    endpoint = f"ipc://{tmp_path / 'events'}"
    work = job(model, related, engine, scenario="published", plugin=harness.alternating(), endpoint=endpoint)
    result = harness.run(work, tmp_path)
    harness.assert_nothing_left(result)
    assert harness.total(result["stats"], "loaded_tokens") > 0
    assert result["stored"] > 100 and result["removed"] > 100
    assert result["removed_unknown"] == 0, "blocks removed that were never stored"
    assert result["foreign"] == [], "blocks stored with tokens that no request has"
    assert result["believed_and_gone"] == 0, "blocks believed to be cached that are not"
    assert result["there_and_not_believed"] == 0, "blocks cached and not told of"
