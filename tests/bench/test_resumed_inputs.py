"""What a resumed measurement depends on: a file that changed under the same name is another one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpolicy import __version__
from kvpolicy.bench_settings import AnalyticsLoad, BenchTarget, RateLoad
from kvpolicy.errors import InputError
from kvpolicy_vllm import launch
from kvpolicy_vllm.bench import run_bench
from kvpolicy_vllm.bench.resumed_inputs import digests, variables, versions
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


@pytest.mark.parametrize(
    "flags",
    [
        ["--chat-template", "{% for message in messages %}{{ message }}{% endfor %}"],
        ["--kv-transfer-config", "{no JSON"], ["--kv-transfer-config", '{"kv_connector_extra_config": null}'],
        ["--kv-transfer-config", "[]"], ["--kv-transfer-config"],
    ],
)  # fmt: skip
def test_what_only_begins_as_the_plugins_flag_names_no_cost_model(flags: list[str], tmp_path: Path) -> None:
    """Also before the plugin's own flag."""
    assert digests(None, [["vllm", "serve", "LLM", *flags]]) == {}
    config = json.dumps({"kv_connector_extra_config": {"policy": f"cheapest:{tmp_path}"}})
    if flags[0] == "--chat-template":
        assert [*digests(None, [[*flags, "--kv-transfer-config", config]])] == [str(tmp_path)]


def test_a_model_is_told_apart_by_its_weights(tmp_path: Path) -> None:
    """One at a hub, and a folder without weights, by its name alone."""
    (tmp_path / "config.json").write_text("{}")
    assert digests(None, [], str(tmp_path)) == digests(None, [], "org/llm") == {}
    (tmp_path / "model.safetensors").write_bytes(b"some")
    before = digests(None, [], str(tmp_path))
    assert [*before] == [str(tmp_path)] and digests(None, [], str(tmp_path)) == before
    (tmp_path / "model.safetensors").write_bytes(b"others")
    assert digests(None, [], str(tmp_path)) != before


def test_a_bench_is_not_resumed_with_a_model_whose_weights_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "require", lambda name: None)
    out, llm = tmp_path / "out", tmp_path / "llm"
    llm.mkdir()
    load, at = AnalyticsLoad(rounds=1, price_ratio=False), BenchTarget(str(llm), ("vllm",))

    def interrupted(*_: object) -> None:
        raise InputError("interrupted")

    monkeypatch.setattr(run_bench.Driver, "serve", interrupted)
    (out / "runs").mkdir(parents=True)
    for weights, why in ((b"some", "interrupted"), (b"others", r"has a bench with other settings \(files\)")):
        (llm / "model.safetensors").write_bytes(weights)
        with pytest.raises(InputError, match=why):
            run_bench.bench(out, load, at)
        (out / "runs" / "round-000.json").touch()


def test_variables_are_those_of_vllm_and_no_secrets() -> None:
    given = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_API_KEY": "a", "VLLM_X_TOKEN": "b", "PATH": "/bin", "HF_TOKEN": "c"}
    found = variables(given)
    assert [*found] == ["VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE", "VLLM_X_TOKEN"]
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert all(found[name].startswith("sha256:") for name in ("VLLM_API_KEY", "VLLM_X_TOKEN"))
    assert variables(given) == found
    assert variables(given | {"VLLM_API_KEY": "b"})["VLLM_API_KEY"] != found["VLLM_API_KEY"]


@pytest.mark.parametrize(
    ("name", "before", "after", "shown"),
    [
        ("VLLM_CPU_OMP_THREADS_BIND", "0", "0-1", True),
        ("VLLM_CPU_KVCACHE_SPACE", None, "4", True),
        (launch.RESERVED_CORES, "0", None, True),
        ("VLLM_API_KEY", "sesame", "open", False),
    ],
)
def test_a_bench_is_not_resumed_with_servers_in_another_environment(
    name: str, before: str | None, after: str | None, shown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of cores that are kept free is vLLM's for one rank, where nobody has set it."""
    monkeypatch.setattr(launch, "require", lambda name: None)
    monkeypatch.setattr(launch, "version", lambda name: "0.32.0+cpu")
    load, at = AnalyticsLoad(rounds=1, price_ratio=False), BenchTarget("some/llm", ("vllm",))

    def interrupted(*_: object) -> None:
        raise InputError("interrupted")

    monkeypatch.setattr(run_bench.Driver, "serve", interrupted)
    (tmp_path / "runs").mkdir()
    for value, why in ((before, "interrupted"), (before, "interrupted"), (after, rf"with other settings \({name}\)")):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
        with pytest.raises(InputError, match=why):
            run_bench.bench(tmp_path, load, at)
        (tmp_path / "runs" / "round-000.json").touch()
    plan = (tmp_path / "plan.json").read_text()
    assert name in plan or before is None
    assert before is None or (f'"{before}"' in plan) is shown


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
