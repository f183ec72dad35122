"""What a resumed measurement depends on: a file that changed under the same name is another one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpolicy import __version__
from kvpolicy.errors import InputError
from kvpolicy.settings import BenchTarget, RateLoad
from kvpolicy_vllm import launch
from kvpolicy_vllm.bench import run_bench
from kvpolicy_vllm.bench.resumed_inputs import digests, versions
from tests.bench.live_http import Small, serving


def test_versions_are_those_of_both_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "vllm_version", lambda: "0.32.0+cpu")
    assert versions() == {"kvpolicy": __version__, "vllm": "0.32.0+cpu"}


def test_a_cost_model_is_told_apart_by_what_its_folder_holds(tmp_path: Path) -> None:
    model = tmp_path / "mine"
    model.mkdir()
    (model / "card.json").write_text("1")
    config = json.dumps({"kv_connector_extra_config": {"policy": f"cheapest:{model},victim=1"}})
    commands = (["vllm", "serve", "LLM"], ["vllm", "serve", "LLM", "--kv-transfer-config", config])
    before = digests(None, commands)
    assert list(before) == [str(model)] and digests(None, commands) == before
    (model / "card.json").write_text("2")
    assert digests(None, commands) != before
    assert digests("sharegpt-8k?n=5", commands[:1]) == {}, "nothing is read for it"


def test_a_bench_is_not_resumed_with_a_workload_that_changed(tmp_path: Path) -> None:
    lengths, out = tmp_path / "lengths.csv", tmp_path / "out"
    lengths.write_text("prompt_tokens,output_tokens\n" + "20,4\n" * 12)
    load = RateLoad(workload=f"lengths:{lengths}", rate=(200.0,), rounds=1)
    with serving(Small()) as url:
        run_bench.bench(out, load, BenchTarget(url))
        run_bench.bench(out, load, BenchTarget(url))
        lengths.write_text("prompt_tokens,output_tokens\n" + "30,4\n" * 12)
        with pytest.raises(InputError, match=r"has a bench with other settings \(files\): give --out another"):
            run_bench.bench(out, load, BenchTarget(url))
