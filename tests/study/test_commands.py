"""The commands call the functions of their names; failures are the exit status."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy.cli import main
from tests.study.test_grid import TIGHT, WORKLOAD

SERVER = {
    "engine": "builtin",
    "block_size": 16,
    "token_budget": None,
    "max_num_seqs": None,
    "prefix_caching": True,
    "scheduling": "fcfs",
    "asynchronous": None,
    "watermark": 0.0,
    "seeds": 1,
    "jobs": None,
    "ray": None,
    "cache": None,
}


class Called:
    """Stands for the function and notes what it was called with."""

    ok = True

    def __call__(self, **arguments: Any) -> Called:
        self.arguments = arguments
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
    function, signature = Called(), inspect.signature(getattr(kvpolicy, command))
    monkeypatch.setattr(kvpolicy, command, function, raising=False)
    assert run(command, *arguments) == 0
    signature.bind(**function.arguments)
    assert callable(function.arguments.pop("progress"))
    return function.arguments


def test_simulate_as_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    least = ("--workload", "w", "--policy", "p", "--policy", "q", "--kv-blocks", "10", "--hardware", "h")
    assert called(monkeypatch, "simulate", *least) == SERVER | {
        "workloads": ["w"],
        "policies": ["p", "q"],
        "kv_blocks": [10],
        "hardware": "h",
        "links": ["native"],
        "host_gib": None,
        "host_blocks": None,
        "parts": 1,
        "out": None,
        "fresh": False,
        "requests": [],
    }


def test_simulate_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    line = (
        "--requests r.csv --policy p --kv-blocks 10 --kv-blocks 20 --hardware h --link native --link 1e9,0.1 "
        "--engine vllm --block-size 32 --host-blocks 7 --token-budget 2048 --max-num-seqs 64 --no-prefix-caching "
        "--scheduling priority --async --watermark 0.05 --seeds 3 --parts 2 --jobs 4 --out o --cache c --fresh"
    )
    found = called(monkeypatch, "simulate", *line.split())
    assert found == SERVER | {
        "workloads": [],
        "requests": [Path("r.csv")],
        "policies": ["p"],
        "kv_blocks": [10, 20],
        "hardware": "h",
        "links": ["native", "1e9,0.1"],
        "engine": "vllm",
        "block_size": 32,
        "host_gib": None,
        "host_blocks": 7,
        "token_budget": 2048,
        "max_num_seqs": 64,
        "prefix_caching": False,
        "scheduling": "priority",
        "asynchronous": True,
        "watermark": 0.05,
        "seeds": 3,
        "parts": 2,
        "jobs": 4,
        "out": Path("o"),
        "cache": Path("c"),
        "fresh": True,
    }


def test_recommend_as_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    line = (
        "--workload w --hardware h --kv-blocks 10 --policy p --host-gib 2 --parts 4 --judge-by ttft "
        "--least-gain 0.02 --ray auto"
    )
    assert called(monkeypatch, "recommend", *line.split()) == SERVER | {
        "workload": "w",
        "hardware": "h",
        "kv_blocks": 10,
        "policies": ["p"],
        "link": "native",
        "host_gib": 2.0,
        "parts": 4,
        "judge_by": "ttft",
        "least_gain": 0.02,
        "ray": "auto",
    }


def test_from_the_command_line_to_json(hardware: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One cell is well, the other too small for its requests: the rest is finished, and the status says so."""
    line = ["--hardware", hardware, "--cache", str(tmp_path / "c"), "--jobs", "0", "--json", str(tmp_path / "r.json")]
    blocks = ["--kv-blocks", str(TIGHT), "--kv-blocks", "20"]
    assert run("simulate", "--workload", WORKLOAD, "--policy", "always-swap", *blocks, *line) == 1
    told = json.loads((tmp_path / "r.json").read_text())
    assert len(told["cells"]) == 1 and len(told["failed"]) == 1
    assert {"throughput_tok_s", "e2e_s", "ttft_s", "itl_s", "preemptions", "recomputed_tokens", "moved_bytes"} <= set(
        told["cells"][0]
    )
    assert {"makespan_s", "simulator_wall_s", "inputs"} <= set(told["cells"][0])
    assert "failed: " in capsys.readouterr().out


def test_what_is_wrong_is_one_line(hardware: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("simulate", "--workload", WORKLOAD, "--policy", "p", "--kv-blocks", "9", "--hardware", hardware) == 2
    assert run("simulate", "--policy", "always-swap", "--kv-blocks", "9", "--hardware", hardware) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 2 and "policy 'p' is no policy" in said and "no workload" in said


def test_ray_that_is_not_installed_is_named(
    hardware: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    line = ["--policy", "always-swap", "--kv-blocks", "200", "--hardware", hardware, "--cache", str(tmp_path)]
    assert run("simulate", "--workload", WORKLOAD, *line, "--ray", "auto") == 2
    assert "pip install 'kvpolicy[ray]'" in capsys.readouterr().err
