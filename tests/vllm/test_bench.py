"""The bench on a real engine: a small overload through every arm, and how engine processes live and die."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from kvpolicy.errors import EngineFailed
from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.workload import Request, Workload
from kvpolicy_vllm.bench.demo_report import DemoReport
from kvpolicy_vllm.bench.engine_process import EngineProcess, plugin_arguments
from kvpolicy_vllm.bench.models import VOCABULARY, make_llama, make_tokenizer
from kvpolicy_vllm.bench.overload import Arm, Arms, Settings
from kvpolicy_vllm.bench.run_demo import QUICK, LinkResult, Loop
from kvpolicy_vllm.plugin.settings import Settings as PluginSettings

TINY = dataclasses.replace(QUICK, requests=16, warm_up_requests=2, calm_requests=2)
ARMS = {"vllm", "always-recompute", "always-swap", "learned"}
SERVING = "kvpolicy_vllm.bench.serve_engine"


def test_the_model_is_the_same_from_the_same_seed(tmp_path: Path) -> None:
    digests = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        folder = make_llama(tmp_path / name, seed)
        digests.append(hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest())
    assert digests[0] == digests[1] != digests[2]


def test_the_tokenizer_says_everything() -> None:
    tokenizer = make_tokenizer()
    assert len(tokenizer) == VOCABULARY
    for text in ("Hello world, what is swapped comes back.", "ça va?\n\t你好", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("hello world")) < len("hello world")
    assert all(isinstance(tokenizer.decode([token]), str) for token in range(VOCABULARY))


def test_a_broken_engine_tells_its_last_lines(tmp_path: Path) -> None:
    with EngineProcess(SERVING, tmp_path / "log") as engine:
        with pytest.raises(EngineFailed, match="no_such_argument"):
            engine.ask({"do": "start", "engine": {"model": "any", "no_such_argument": 1}})
        with pytest.raises(EngineFailed, match="ended with"):
            engine.ask({"do": "start", "engine": {}})


def test_an_engine_dies_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed outright, so nothing of it can clean up."""
    parent = (
        "import sys, time; from kvpolicy_vllm.bench.engine_process import EngineProcess\n"
        "engine = EngineProcess('tests.vllm.patient'); engine.ask({}); print(engine.pid, flush=True); time.sleep(600)"
    )
    paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    patience = time.monotonic() + 120
    while alive(child) and time.monotonic() < patience:
        time.sleep(0.02)
    assert not alive(child)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def cpu_ticks(pid: int) -> int:
    """Processor time a process has used, user and system, in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


@pytest.fixture(scope="module")
def report(model: str, tmp_path_factory: pytest.TempPathFactory) -> DemoReport:
    """The demo's overload over a simulated link, with a threshold in the learned policy's place."""
    out = tmp_path_factory.mktemp("demo")
    loop = Loop(out, Path(model), True, TINY, 0, Console(stderr=True))
    header = {"kind": "simulated", "bytes_per_s": 1e9, "latency_s": 0.001}
    link = LinkResult("simulated", SimulatedLink(1e9, 0.001), header, "threshold:100", {"always_wins": None}, {})
    return DemoReport(tuple(loop.overload([link])), str(out / "demo.json"))


def test_all_arms_say_the_same(report: DemoReport) -> None:
    found = report.links[0].comparison
    assert found.exact, found.wrong
    assert found.tokens > 1000
    assert found.tokens % len(ARMS) == 0, "every arm's tokens are compared"


def test_every_arm_does_what_it_is_named_for(report: DemoReport) -> None:
    policies = report.links[0].policies
    assert set(policies) == ARMS
    assert policies["vllm"]["preemptions"]["recompute"] > 0
    # Everything arrives at once, so the plugin's recompute must schedule exactly as vLLM alone does.
    for name in ("preemptions", "recomputed_tokens", "moved_bytes"):
        assert policies["always-recompute"][name] == policies["vllm"][name]
    assert policies["vllm"]["recomputed_tokens"] > 0
    assert policies["vllm"]["moved_bytes"] == 0
    assert policies["always-swap"]["preemptions"]["swap"] > 0
    assert policies["always-swap"]["preemptions"]["recompute"] == 0
    assert policies["always-swap"]["moved_bytes"] > 0
    assert all(values["runs"] == TINY.blocks for values in policies.values())


def test_the_pair_without_pressure_has_none(report: DemoReport) -> None:
    assert report.links[0].no_pressure_preemptions == 0
    ratio = report.links[0].no_pressure_ratio
    assert 0 < ratio.low <= ratio.value <= ratio.high


def test_json_has_the_promised_shape(report: DemoReport) -> None:
    found = json.loads(json.dumps(report.to_dict()))["simulated"]
    assert found["link"]["kind"] == "simulated"
    for values in found["policies"].values():
        assert set(values) == {
            *("throughput_tok_s", "goodput", "ttft_s", "itl_s", "preemptions"),
            *("recomputed_tokens", "moved_bytes", "runs"),
        }
        assert set(values["ttft_s"]) == set(values["itl_s"]) == {"mean", "p50", "p99"}
        assert set(values["preemptions"]) == {"recompute", "swap"}
    for ratio in (*found["ratios"].values(), found["no_pressure_ratio"]):
        assert set(ratio) == {"value", "low", "high"}
    assert {f"throughput learned / {arm}" for arm in ARMS - {"learned"}} <= set(found["ratios"])
    assert found["exact"] is True
    assert {"ttft_s", "itl_s", "from"} <= set(found["targets"])


def test_the_table_shows_arms_and_names_the_simulated_link(report: DemoReport) -> None:
    text = report.text()
    assert all(arm in text for arm in ARMS)
    assert "SIMULATED link: 1e+09 bytes/s" in text
    assert "exact: " in text


def test_arrivals_are_kept_and_idle_engines_rest(model: str, tmp_path: Path) -> None:
    settings = Settings(model, on_cpu=True, device_blocks=80, context_tokens=512)
    requests = (Request(0.0, 40, 20), Request(1.0, 40, 20), Request(1.0, 300, 1))
    workload = Workload("by hand", requests, seed=0)
    with Arms(settings, tmp_path) as arms:
        arms.start(Arm("one", None, device_blocks=81), Arm("other", "random:0.5"), Arm("third", "always-swap"))
        idle = arms.pid("other")
        before = cpu_ticks(idle)
        runs = [arms.serve("one", workload, block) for block in range(2)]
        assert cpu_ticks(idle) - before <= 5, "an idle engine took processor time"
        runs.append(arms.serve("other", workload, 2))
        assert arms.pid("other") == arms.pid("third") != arms.pid("one")
        runs.append(arms.serve("third", workload, 3))
    for run in runs:
        assert run.makespan_s >= 1.0
        assert [len(tokens) for tokens in run.tokens] == [20, 20, 1]
        assert all(ttft_s > 0 for ttft_s in run.ttft_s)
    assert len({run.tokens for run in runs}) == 1


def test_the_plugin_can_be_taken_out_and_put_back(model: str, tmp_path: Path) -> None:
    """Without it the scheduler is vLLM's own, does what a stock engine does, and reports nothing of ours. Nor does it
    matter whether an engine has so little memory, or some is held out of play."""
    engine = Settings(model, on_cpu=True, device_blocks=12, context_tokens=256).arguments()
    job = {"do": "serve", "requests": [[0.0, 60, 60]] * 6, "seed": 1, "gaps": False}
    with EngineProcess(SERVING, tmp_path / "stock.log") as process:
        process.ask({"do": "start", "engine": engine})
        stock = process.ask(job | {"policy": None})
    with EngineProcess(SERVING, tmp_path / "ours.log") as process:
        larger = engine | {"num_gpu_blocks_override": 20}
        process.ask({"do": "start", "engine": larger | plugin_arguments(PluginSettings("always-swap", host_gib=1.0))})
        runs = [process.ask(job | {"policy": policy, "device_blocks": 12}) for policy in (None, "always-swap", None)]
    assert stock["preemptions"] > 2
    for run in (runs[0], runs[2]):
        assert run["scheduler"] == ["SilentScheduler", "Silent", *stock["scheduler"]]
        assert not run["stats"]
        for same in ("tokens", "steps", "preemptions", "scheduled_tokens", "recomputed_tokens"):
            assert run[same] == stock[same]
    assert runs[1]["scheduler"] == ["AdaptiveSyncScheduler", "PolicyHooks", *stock["scheduler"]]
    assert runs[1]["stats"]["loaded_tokens"] > 0 and runs[1]["tokens"] == stock["tokens"]
