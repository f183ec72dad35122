"""The commands call the functions of their names; failures are the exit status.

They stand in ``kvpolicy.cli.study``.
"""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy.cli import main
from kvpolicy.latency import Slo
from kvpolicy.study.config import Criterion, Run, Serving
from tests.study.grids import TIGHT, WORKLOAD


class Called:
    """Stands for the function and notes what it was called with."""

    ok = True

    def __init__(self, signature: inspect.Signature) -> None:
        self.signature = signature

    def __call__(self, *arguments: Any, **more: Any) -> Called:
        bound = self.signature.bind(*arguments, **more)
        bound.apply_defaults()
        self.arguments = bound.arguments
        return self

    def text(self) -> str:
        return "a table"

    def to_dict(self) -> dict[str, Any]:
        return {"cells": []}


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return int(stopped.value.code or 0)


def called(monkeypatch: pytest.MonkeyPatch, command: str, *arguments: str) -> dict[str, Any]:
    function = Called(inspect.signature(getattr(kvpolicy, command)))
    with monkeypatch.context() as patched:
        patched.setattr(kvpolicy, command, function, raising=False)
        assert run(command, *arguments) == 0
    how = function.arguments["run"]
    assert how.progress != Run().progress
    return function.arguments | {"run": replace(how, progress=Run().progress)}


def test_simulate_as_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    least = ("--workload", "w", "--policy", "p", "--policy", "q", "--kv-blocks", "10", "--hardware", "h")
    assert called(monkeypatch, "simulate", *least) == {
        "workloads": ["w"],
        "policies": ["p", "q"],
        "kv_blocks": [10],
        "hardware": "h",
        "links": ["native"],
        "serving": Serving(),
        "run": Run(),
        "orders": (),
    }


def test_simulate_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    line = (
        "--requests r.csv --policy p --kv-blocks 10 --kv-blocks 20 --hardware h --link native --link 1e9,0.1 "
        "--engine vllm --block-size 32 --host-blocks 7 --token-budget 2048 --max-num-seqs 64 --no-prefix-caching "
        "--scheduling priority --async --watermark 0.05 --seeds 3 --parts 2 --jobs 4 --out o --results c --fresh "
        "--slo ttft=1,tpot=0.05 --max-model-len 4096"
    )
    assert called(monkeypatch, "simulate", *line.split()) == {
        "workloads": ["requests:r.csv"],
        "policies": ["p"],
        "kv_blocks": [10, 20],
        "hardware": "h",
        "links": ["native", "1e9,0.1"],
        "serving": Serving(
            block_size=32,
            host_blocks=7,
            token_budget=2048,
            max_num_seqs=64,
            prefix_caching=False,
            scheduling="priority",
            asynchronous=True,
            watermark=0.05,
            max_model_len=4096,
        ),
        "run": Run(
            engine="vllm", seeds=3, parts=2, jobs=4, out=Path("o"), cache=Path("c"), fresh=True, slo=Slo(1.0, 0.05)
        ),
        "orders": (),
    }


def test_flags_may_be_spelled_as_vllm_spells_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the folder of results by its old name, which is that of a caching policy elsewhere."""
    needed = ("--workload", "w", "--policy", "p", "--kv-blocks", "10", "--hardware", "h")
    ours = "--token-budget 2048 --max-num-seqs 64 --no-prefix-caching --results c"
    theirs = "--max-num-batched-tokens 2048 --max-num-seqs 64 --no-enable-prefix-caching --cache c"
    taken = called(monkeypatch, "simulate", *needed, *ours.split())
    assert taken == called(monkeypatch, "simulate", *needed, *theirs.split())
    assert not taken["serving"].prefix_caching and taken["run"].cache == Path("c")


def test_recommend_as_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "--workload w --hardware h --kv-blocks 10 --policy p --host-gib 2 --judge-by ttft --min-gain 0.02 --ray auto"
    assert called(monkeypatch, "recommend", *line.split()) == {
        "workload": "w",
        "hardware": "h",
        "kv_blocks": 10,
        "policies": ["p"],
        "link": "native",
        "serving": Serving(host_gib=2.0),
        "run": Run(parts=8, ray="auto"),
        "criterion": Criterion("ttft", 0.02),
    }


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--block-size 0", "--block-size is 0, should be 1 or more"),
        ("--host-gib -1", "--host-gib is -1.0, should be 0 or above"),
        ("--host-gib 1 --host-blocks 7", "--host-blocks is given with host_gib"),
        ("--watermark 1", "--watermark is 1.0, should be a share of the blocks, from 0, below 1"),
        ("--scheduling lifo", "--scheduling is 'lifo', should be fcfs or priority"),
        ("--order mlf", "--order 'mlf' is no order (did you mean mlfq?); the orders are fcfs,"),
        ("--order urgent:promote=soon", "--order 'urgent:promote=soon' has promote=soon, should be a finite number"),
        ("--jobs -1", "--jobs is -1, should be 1 or more, or 0 to run in this process"),
        ("--seeds 0", "--seeds is 0, should be 1 or more"),
        ("--link fast", "--link 'fast': should be BYTES_PER_S[,LATENCY_S], as 25e9 or 25e9,0.00005, or native"),
        ("--kv-blocks 0", "--kv-blocks is 0, should be 1 or more"),
        ("--hardware H100", "--hardware 'H100': should be a folder that"),
        ("--judge-by speed", "--judge-by is 'speed', should be one of e2e, ttft, itl, gap, per-token"),
        ("--judge-by ttft:urgent", "--judge-by is ttft:urgent; the classes of azure-conversation-2023"),
        ("--judge-by slo", "--judge-by is slo, but no request has a deadline: give slo, as ttft=1,tpot=0.05"),
        ("--slo itl=1", "--slo 'itl=1': should be ttft=SECONDS,tpot=SECONDS, or one of them, each above 0"),
        ("--min-gain -1", "--min-gain is -1.0, should be 0 or above"),
    ],
)
def test_a_wrong_value_is_refused_by_its_flag(
    hardware: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, told: str
) -> None:
    base = ["--workload", WORKLOAD, "--kv-blocks", "9", "--hardware", hardware, "--results", str(tmp_path)]
    assert run("recommend", *base, *line.split()) == 2
    assert capsys.readouterr().err.startswith(f"kvpolicy: error: {told}")


def test_from_the_command_line_to_json(hardware: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One cell is well, the other too small for its requests: the rest is finished, and the status says so."""
    line = ["--hardware", hardware, "--cache", str(tmp_path / "c"), "--jobs", "0", "--json", str(tmp_path / "r.json")]
    blocks = ["--kv-blocks", str(TIGHT), "--kv-blocks", "20"]
    assert run("simulate", "--workload", WORKLOAD, "--policy", "always-swap", *blocks, *line) == 1
    values = json.loads((tmp_path / "r.json").read_text())
    assert len(values["cells"]) == 1 and len(values["failed"]) == 1
    assert {"throughput_tok_s", "e2e_s", "ttft_s", "itl_s", "preemptions", "recomputed_tokens", "moved_bytes"} <= set(
        values["cells"][0]
    )
    assert {"makespan_s", "simulator_wall_s", "inputs"} <= set(values["cells"][0])
    assert "failed: " in capsys.readouterr().out


def test_what_is_wrong_is_one_line(hardware: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("simulate", "--workload", WORKLOAD, "--policy", "p", "--kv-blocks", "9", "--hardware", hardware) == 2
    assert run("simulate", "--policy", "always-swap", "--kv-blocks", "9", "--hardware", hardware) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 2 and "policy 'p' is no policy" in err and "no workload" in err


def test_ray_that_is_not_installed_is_named(
    hardware: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    line = ["--policy", "always-swap", "--kv-blocks", "200", "--hardware", hardware, "--results", str(tmp_path)]
    assert run("simulate", "--workload", WORKLOAD, *line, "--ray", "auto") == 2
    assert "pip install 'kvpolicy[ray]'" in capsys.readouterr().err
