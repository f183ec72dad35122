"""`kvpolicy bench` and `kvpolicy warm` on real servers of the small model, with and without the plugin."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import combinations
from pathlib import Path

import pytest

from kvpolicy import integrations
from kvpolicy.bench_settings import AnalyticsLoad, BenchTarget, ChatLoad, RateLoad
from kvpolicy.errors import EngineFailed, InputError
from kvpolicy.latency import Slo
from kvpolicy.prefix_store import warm
from kvpolicy.server_metrics import OURS, fetch
from kvpolicy.settings import GIB, ServerSettings
from kvpolicy_vllm import launch
from kvpolicy_vllm.bench import control_arm, run_bench
from kvpolicy_vllm.bench.exactness import TIE_GAP
from kvpolicy_vllm.bench.live_arms import Servers, arms_of
from kvpolicy_vllm.bench.live_server import LiveServer
from kvpolicy_vllm.bench.load_report import LoadReport
from tests.vllm import harness
from tests.vllm.test_faults import BLOCK_BYTES
from tests.vllm.test_server import post

FLAGS = (
    "--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "512",
    "--num-gpu-blocks-override", "48", "--served-model-name", "small",
)  # fmt: skip
HOST_BLOCKS = 72
SETTINGS = ServerSettings(
    "always-swap", host_gib=(HOST_BLOCKS + 0.5) * BLOCK_BYTES / GIB, order="mlfq:base=16", cache="cost"
)  # fmt: skip
"""An order other than vLLM's, and a cache, by which what requests say of themselves is read; 72 blocks of 32 tokens in
host memory behind 47 on the device."""


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in harness.environment(multiprocess=True).items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Started by the first bench that asks for them, and ended after the last one: that takes longer than a bench."""
    with Servers(tmp_path_factory.mktemp("logs"), print) as started:
        yield started


@pytest.fixture
def shared(servers: Servers, small_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_bench, "Servers", lambda logs, say: nullcontext(servers))


@pytest.mark.usefixtures("shared")
def test_a_chat_on_servers_with_and_without_the_plugin(servers: Servers, model: str, tmp_path: Path) -> None:
    """Every message is answered by its full length, with the same tokens, and its hints are read."""
    load = ChatLoad(
        chatters=(3,),
        prefixed=(0.5,),
        prefix_tokens=96,
        conversations=5,
        turns=2.0,
        think_s=0.1,
        rounds=1,
        context_tokens=400,
        price_ratio=False,
    )
    at = BenchTarget(model, ("vllm", "hints"), SETTINGS, FLAGS)
    url, held = servers.url(arms_of(at)[1]), {"event": "held"}
    before = fetch(url).total(f"{OURS}hinted_blocks_total", **held)
    found = integrations.bench(tmp_path, load, at)
    assert isinstance(found, LoadReport) and found.ok, found.text()
    tokens, different, gap = found.compared()
    assert tokens > 100 and (not different or (gap is not None and gap < TIE_GAP)), found.text()
    by_arm = {run["arm"]: run for run in found.results["runs"]}
    for run in by_arm.values():
        assert run["messages"] == len(run["rows"]) >= 5
        assert 0.1 < run["hit_rate"] < 1, "later turns find what earlier ones computed"
    assert "vllm:kvpolicy_invalid_marks_total" not in by_arm["hints"]["counters"]
    assert fetch(url).total(f"{OURS}hinted_blocks_total", **held) - before > 10, "windows were held"


@pytest.mark.usefixtures("small_machine")
def test_a_warmed_prefix_outlasts_what_others_ask_for(servers: Servers, model: str) -> None:
    """Others leave twice what the device and host memory hold; the prefix stays in host memory, where it is pinned."""
    (arm,) = arms_of(BenchTarget(model, ("kvpolicy",), SETTINGS, FLAGS))
    url, prefix = servers.url(arm), [*range(100, 265)]

    def counted() -> tuple[float, float]:
        now = fetch(url)
        held = now.total(f"{OURS}hinted_blocks_total", event="held")
        return held, now.total("vllm:external_prefix_cache_hits_total")

    before = counted()
    first = warm(url, prefix)
    warmed = counted()
    assert first.found_before == 0 and first.has_plugin and "nothing is pinned" not in first.text()
    assert first.held_blocks == warmed[0] - before[0] >= 5, "blocks of 32 tokens"
    rng = random.Random(1)
    for _ in range(20):
        asked = {"model": "small", "prompt": rng.choices(range(300, 2000), k=400), "max_tokens": 1}
        post(f"{url}/v1/completions", asked)
    others = counted()
    again = warm(url, prefix)
    assert (again.found_before, again.found_after) == (160, 160)
    assert others[1] == warmed[1] and counted()[1] - others[1] == 160, "tokens, found once beyond the device"


@pytest.mark.usefixtures("shared")
def test_rates_on_servers_with_and_without_the_plugin(model: str, tmp_path: Path) -> None:
    """More requests than memory holds, of two classes: all are answered in full, with the same tokens by every arm, and
    where lengths are reserved no more of them are at the server than fit."""
    text = "sharegpt-8k?n={}&scale=0.05&context=400&class={}&priority={}"
    load = RateLoad(
        workload=f"{text.format(6, 'urgent', -1)} + {text.format(10, 'batch', 0)}",
        rate=(200.0,),
        rounds=1,
        slo=Slo(ttft_s=60.0),
    )
    found = integrations.bench(tmp_path, load, BenchTarget(model, ("vllm", "kvpolicy", "orca-max"), SETTINGS, FLAGS))
    assert isinstance(found, LoadReport) and found.ok, found.text()
    tokens, different, gap = found.compared()
    assert tokens > 200 and (not different or (gap is not None and gap < TIE_GAP)), found.text()
    by_arm = {run["arm"]: run for run in found.results["runs"]}
    assert by_arm["orca-max"]["memory_tokens"] == 47 * 32 and by_arm["orca-max"]["most_at_once"] <= 47 * 32 // 512
    for run in by_arm.values():
        assert len(run["rows"]) == 16 and {name: one["requests"] for name, one in run["classes"].items()} == {
            "batch": 10,
            "urgent": 6,
        }
        assert run["itl_s"]["mean"] > 0 and run["slo_share"] == 1.0 and run["e2e_per_token_s"]["mean"] > 0
    assert by_arm["vllm"]["most_at_once"] > by_arm["orca-max"]["most_at_once"]
    assert by_arm["kvpolicy"]["counters"].get("vllm:kvpolicy_invalid_marks_total", 0) == 0


@pytest.mark.usefixtures("small_machine")
def test_servers_on_a_cpu_start_beside_each_other_without_a_flag(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each by default wants nearly all of the memory, of which it is given a share; and takes the same cores, with the
    plugin and without it, where vLLM chooses them."""
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name)
    monkeypatch.delenv(launch.RESERVED_CORES, raising=False)
    load = AnalyticsLoad(prefix_tokens=(64,), texts=4, rounds=1, price_ratio=False)
    found = integrations.bench(tmp_path, load, BenchTarget(model, ("vllm", "kvpolicy"), SETTINGS, FLAGS))
    assert isinstance(found, LoadReport) and found.ok, found.text()
    assert "each is started with --gpu-memory-utilization 0.3" in capsys.readouterr().err
    assert all(arm["command"][-1] == "0.3" for arm in found.results["arms"])
    assert found.to_dict()["unequal_cores"] == {}, found.text()
    if len(os.sched_getaffinity(0)) > 1:
        assert all(len(run["cores"]) > 1 for run in found.results["runs"]), "the workers are bound to fewer cores"


@pytest.mark.usefixtures("small_machine")
def test_two_orders_of_one_server_by_its_control_file(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run is served by its arm's policy and order, and afterwards the server serves as it began."""
    control = tmp_path / "control"
    settings = ServerSettings("always-recompute", host_gib=0.1, control=control)
    with LiveServer(launch.serve_command(model, launch.options(settings), FLAGS), tmp_path / "log") as server:
        arm = {"control": str(control), "policy": "always-swap", "order": "mlfq:base=16"}
        load = RateLoad(workload="sharegpt-8k?n=12&scale=0.05&context=400", rate=(20.0,), rounds=2)
        found = integrations.bench(
            tmp_path / "out", load, BenchTarget(server.url, ("begin", f"switched={json.dumps(arm)}"))
        )
        assert isinstance(found, LoadReport) and found.ok, found.text()
        tokens, different, gap = found.compared()
        assert tokens > 200 and (not different or (gap is not None and gap < TIE_GAP)), found.text()
        by_arm = {name: [run for run in found.results["runs"] if run["arm"] == name] for name in ("begin", "switched")}
        in_force = {"policy": "always-swap", "order": "mlfq:base=16"}
        assert [run["in_force"] for run in by_arm["switched"]] == [in_force] * 2
        assert all(len(run["rows"]) == 12 for runs in by_arm.values() for run in runs)
        assert not control.exists()
        now = fetch(server.url)
        assert now.by(f"{OURS}order", "order") == {("fcfs",): 1.0, ("mlfq:base=16",): 0.0}
        assert now.by(f"{OURS}cost_model", "policy") == {("always-recompute",): 1.0, ("always-swap",): 0.0}
        assert now.total(f"{OURS}control_changes_total", result="applied") == 4, "there and back, twice"
        monkeypatch.setattr(control_arm, "SEEN_S", 3.0)
        other = arm | {"control": str(tmp_path / "other")}
        with pytest.raises(InputError, match="the file should be the one that this server was started with"):
            integrations.bench(tmp_path / "other-out", load, BenchTarget(server.url, (f"other={json.dumps(other)}",)))
        misspelt = json.dumps(arm | {"policy": "always-swop"})
        with pytest.raises(InputError, match=r"refuses what .*control has, .*always-swop.* its log says why"):
            integrations.bench(tmp_path / "other-out", load, BenchTarget(server.url, (f"misspelt={misspelt}",)))
        assert not any((tmp_path / name).exists() for name in ("other", "other-out", "control"))


@pytest.mark.usefixtures("small_machine")
def test_a_server_without_enough_memory_says_so_first(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line: its last ones only point at the cause, which stands in another process's part of the log."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")  # with which the flag is not looked at
    flags = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--gpu-memory-utilization", "1.0")
    with pytest.raises(EngineFailed) as failed:
        integrations.bench(tmp_path, RateLoad(rate=(1.0,)), BenchTarget(model, ("vllm",), SETTINGS, flags))
    (first,) = str(failed.value).splitlines()
    assert re.search(r"before it answered: ValueError: (Free|Available) memory on \w+ .* is less than desired", first)
    assert re.search(r"\(Give --gpu-memory-utilization 0\.\d+ or less\.\)", first)


@pytest.mark.usefixtures("small_machine")
def test_what_tokens_cost_is_read_from_one_more_run(model: str, tmp_path: Path) -> None:
    """Of the server without the plugin alone, which records nothing; and is not recorded again."""
    load = AnalyticsLoad(prefix_tokens=(96,), texts=60, rounds=1, concurrency=4)
    at = BenchTarget(model, ("vllm",), SETTINGS, FLAGS)
    found = integrations.bench(tmp_path, load, at)
    assert isinstance(found, LoadReport) and found.ok, found.text()
    prices = found.to_dict()["prices"]
    assert prices["cell"] == {"prefix_tokens": 96} and not prices["unknown"], prices
    assert prices["price_ratio"] > 0 and 1 <= prices["batch"] <= 4 and prices["prompt_tokens"] > 60
    assert "p / d at the batches that ran" in found.text()
    (run,) = found.results["runs"]
    assert run["cpu_s"] > 0 and "CPU s" in found.text()
    recorded = (tmp_path / "prices.json").stat().st_mtime_ns
    assert integrations.bench(tmp_path, load, at).to_dict()["prices"] == prices
    assert (tmp_path / "prices.json").stat().st_mtime_ns == recorded


@pytest.mark.slow
@pytest.mark.usefixtures("small_machine")
def test_servers_are_started_anew_between_rounds(model: str, tmp_path: Path) -> None:
    """Every start has processes of its own, in the other order, of which the report says how many there were."""
    load = AnalyticsLoad(prefix_tokens=(64,), texts=8, rounds=2, price_ratio=False)
    at = BenchTarget(model, ("vllm", "kvpolicy"), SETTINGS, FLAGS, rounds_per_start=1)
    found = integrations.bench(tmp_path, load, at)
    assert isinstance(found, LoadReport) and found.ok, found.text()
    assert {(run["round"], run["start"]) for run in found.results["runs"]} == {(0, 0), (1, 1)}
    assert all(run["cpu_s"] > 0 and run["requests"] == 8 for run in found.results["runs"])
    logs = {log.name: log.read_text() for log in (tmp_path / "logs").iterdir()}
    assert sorted(logs) == ["0-vllm.log", "1-kvpolicy.log", "2-kvpolicy.log", "3-vllm.log"]
    pids = {name: set(re.findall(r"pid=(\d+)", text)) for name, text in logs.items()}
    assert all(pids.values()) and not any(pids[a] & pids[b] for a, b in combinations(pids, 2))
    assert "2 starts of the servers" in found.text()


@pytest.mark.slow
@pytest.mark.usefixtures("small_machine")
def test_an_analysis_and_a_warmed_prefix(model: str, tmp_path: Path) -> None:
    command = launch.serve_command(model, launch.options(SETTINGS), FLAGS)
    with LiveServer(command, tmp_path / "log") as server:
        found = integrations.bench(
            tmp_path / "out",
            AnalyticsLoad(prefix_tokens=(96,), texts=20, rounds=2, concurrency=4),
            BenchTarget(server.url, ("kvpolicy", "hints")),
        )
        assert isinstance(found, LoadReport) and found.ok, found.text()
        assert all(run["hit_rate"] > 0.5 for run in found.results["runs"])
        warmed = warm(server.url, " ".join(["a shared beginning"] * 40), keep_s=30.0)
        assert warmed.found_before == 0 and 0.7 * warmed.prompt_tokens < warmed.found_after <= warmed.prompt_tokens
        assert not warmed.refused
        too_long = warm(server.url, messages=[{"role": "system", "content": "be brief " * 20}], keep_s=9000.0)
        assert too_long.refused == 1 and "refused or cut" in too_long.text()
