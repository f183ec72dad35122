"""The end-to-end study judges what it is given: a run that the simulator itself made comes out without error."""

from __future__ import annotations

import gzip
import json
import random
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpolicy
from kvpolicy.hardware.engine_time import EngineTime
from kvpolicy.policy import load as load_policy
from kvpolicy.shape import ModelShape
from kvpolicy.simulator.builtin import Builtin
from kvpolicy.simulator.hardware.table_times import TableTimes
from kvpolicy.simulator.sinks import MemorySink
from kvpolicy.workload import Request, Workload
from tests.simulator import tables

ROOT = Path(__file__).resolve().parent.parent.parent
NAME = "GPU_llm"
SETTINGS = {"tensor_parallel_size": 1, "data_parallel_size": 1, "max_num_seqs": 6, "max_num_batched_tokens": 256}
REQUESTS = 30
TRUTH = EngineTime(2e-4, 1e-3, 0.1, "made up")


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = import_module("fidelity_e2e")
    monkeypatch.setattr(import_module("recorded_engine"), "CONFIGS", {"llm": tables.CONFIG})
    monkeypatch.setattr(module, "NUDGES", (1e-4, 5e-4, 0.1))
    return module


def made_run(
    study: Any, folder: Path, kv_cache: dict[str, Any] | None = None, truth: EngineTime = TRUTH, **settings: Any
) -> float:
    """Tables, and a run of the simulator on them with an engine of its own time, as if measured; its last second."""
    for file in tables.llmservingsim(folder):
        file.rename(folder / f"lss_{NAME}_tp1_{file.name}")
    files = sorted(folder.glob("lss_*"))
    shape = ModelShape.from_config(tables.CONFIG)
    model = kvpolicy.import_profile(files, folder / "out", shape, link="pcie5").model
    times = TableTimes(study.replace(model, engine=truth))
    rng = random.Random(0)
    arrivals = [0.0, *np.cumsum([rng.expovariate(300.0) for _ in range(REQUESTS - 1)]).tolist()]
    requests = tuple(Request(at, rng.randrange(20, 400), rng.randrange(10, 60)) for at in arrivals)
    workload = Workload("made", requests, 0)
    meta = folder / f"{NAME}_meta.json"
    described = {"model": "llm", "vllm_version": "0", "engine_kwargs": SETTINGS | settings}
    meta.write_text(json.dumps(described | ({} if kv_cache is None else {"kv_cache": kv_cache})))
    server = study.RecordedEngine.read(meta).server(shape)
    trace = Builtin().run(workload, load_policy("always-recompute"), server, times, sink=MemorySink()).trace
    assert trace is not None
    rows = sorted(trace.table("requests").to_pylist(), key=lambda row: int(row["request"]))
    steps = trace.table("steps").to_pylist()
    start_s, duration_s, waiting = (
        np.array([row[name] for row in steps]) for name in ("start_s", "duration_s", "waiting_requests")
    )
    when_s = study._when_scheduled(start_s, start_s + duration_s) if server.asynchronous else start_s
    scheduled_s = study._scheduled_s(np.array(arrivals), when_s, waiting)
    lines = ["input_toks,output_toks,client_arrival_s,scheduled_ts,first_token_ts,last_token_ts"]
    lines += [
        f"{row['prompt_tokens']},{row['output_tokens']},{row['arrival_s']!r},{float(at)!r},{row['first_token_s']!r},"
        f"{row['last_token_s']!r}"
        for row, at in zip(rows, scheduled_s, strict=True)
    ]
    compressed(folder / f"{NAME}_requests.csv.gz", lines)
    last_s = max(float(row["last_token_s"]) for row in rows)
    compressed(folder / f"{NAME}_timeseries.csv.gz", ["t,running,waiting", "0.01,1,1", "0.02,2,1"])
    return last_s


def compressed(file: Path, lines: list[str]) -> None:
    file.write_bytes(gzip.compress("\n".join((*lines, "")).encode()))


def test_a_run_made_by_the_simulator_is_found_again(study: Any, tmp_path: Path) -> None:
    last_s = made_run(study, tmp_path)
    events: list[str] = []
    (result,) = study.fidelity_e2e(tmp_path, tmp_path, last_s / 2, events.append)
    alone, in_step, later, fitted = result["results"].values()
    assert in_step["prefill_s mean"]["error"] < alone["prefill_s mean"]["error"] - 0.05
    assert alone["requests"] == REQUESTS and 5 < later["requests"] == fitted["requests"] < REQUESTS
    assert alone["e2e_s mean"]["error"] < -0.05
    assert study.missed_bars(alone)
    assert abs(fitted["e2e_s mean"]["error"]) < 0.02 and not study.missed_bars(fitted)
    assert fitted["output_tok_s"]["error"] == pytest.approx(0.0, abs=0.03)
    assert 0 <= alone["steps beyond the tables"] < 1
    assert "calibrated on" in result["engine"]["source"]
    assert alone["preemptions, simulated"] == 0
    words = result["calibration"]
    assert words["did calibration help"].count("it helped") == 2
    assert words["would calibration help"].endswith("it helped")
    with pytest.raises(ValueError, match="0 requests of GPU_llm were done by then"):
        study.fidelity_e2e(tmp_path, tmp_path, 0, events.append)
    with pytest.raises(ValueError, match="and 0 first scheduled after it"):
        study.fidelity_e2e(tmp_path, tmp_path, last_s, events.append)


def test_a_run_without_tables_is_reported(study: Any, tmp_path: Path) -> None:
    made_run(study, tmp_path)
    for file in tmp_path.glob("lss_*"):
        file.unlink()
    (result,) = study.fidelity_e2e(tmp_path, tmp_path, 0.5, lambda _: None)
    assert result == {"run": NAME, "judged": False, "reason": f"no tables lss_{NAME}_tp1_* there"}
    with pytest.raises(ValueError, match=r"holds no \*_meta"):
        study.fidelity_e2e(tmp_path / "out", tmp_path, 0.5, lambda _: None)


def test_nothing_judged_is_an_error_that_says_what_is_missing(
    study: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"{NAME}_meta.json").write_text(json.dumps({"engine_kwargs": SETTINGS, "model": "llm"}))
    with pytest.raises(SystemExit) as ended:
        study.main(["--e2e", str(tmp_path), "--profiles", str(tmp_path)])
    assert ended.value.code == 2
    assert f"no run could be judged: {NAME}: no tables lss_{NAME}_tp1_* there" in capsys.readouterr().err


@pytest.mark.parametrize(("truth", "status"), [(TRUTH, 1), (EngineTime(0.0, 0.0, 0.0, "made up"), 0)])
def test_a_missed_bar_ends_with_status_1(
    study: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], truth: EngineTime, status: int
) -> None:
    """Without a flag, as the other published checks do. In step with the device, all four replays are of one engine."""
    until_s = made_run(study, tmp_path, truth=truth, async_scheduling=False) / 2
    asked = ["--e2e", tmp_path, "--profiles", tmp_path, "--calibrate-until", until_s, "--json", tmp_path / "out.json"]
    assert study.main(list(map(str, asked))) == status
    missed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bar missed: ")]
    assert [line.split(": ")[2] for line in missed[:1]] == ["tables alone, all requests"] * status
    assert json.loads((tmp_path / "out.json").read_text())[0]["judged"]


def test_a_run_short_of_memory_is_found_again_with_its_own_memory_and_refused_without(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = {"num_gpu_blocks": 60, "block_size": 16, "enable_prefix_caching": True, "num_kv_tokens": 960}
    last_s = made_run(study, tmp_path, memory)
    (result,) = study.fidelity_e2e(tmp_path, tmp_path, last_s / 2, lambda _: None)
    fitted = list(result["results"].values())[-1]
    assert fitted["preemptions, simulated"] > 0
    assert abs(fitted["e2e_s mean"]["error"]) < 0.02 and abs(fitted["queue_s mean"]["error"]) < 0.05
    meta = tmp_path / f"{NAME}_meta.json"
    meta.write_text(
        json.dumps({key: value for key, value in json.loads(meta.read_text()).items() if key != "kv_cache"})
    )
    monkeypatch.setattr(import_module("recorded_engine"), "AMPLE_BLOCKS", 40)
    (refused,) = study.fidelity_e2e(tmp_path, tmp_path, last_s / 2, lambda _: None)
    assert refused["reason"] == "kv_cache was not recorded, and the replay preempts with 40 blocks"


def test_the_replay_serves_as_the_recorded_arguments_say(study: Any, tmp_path: Path) -> None:
    meta = tmp_path / "meta.json"
    settings = SETTINGS | {
        "max_model_len": 512, "scheduling_policy": "priority", "watermark": 0.1, "async_scheduling": False,
        "kv_cache_dtype": "fp8", "dtype": "float32",
    }  # fmt: skip
    memory = {"num_gpu_blocks": 100, "block_size": 32, "enable_prefix_caching": True}
    meta.write_text(json.dumps({"model": "llm", "engine_kwargs": settings, "kv_cache": memory}))
    engine = study.RecordedEngine.read(meta)
    shape = engine.shape({})
    server = engine.server(shape)
    assert (server.device_blocks, server.block_size, server.prefix_caching) == (99, 32, True)
    assert (server.token_budget, server.max_running, server.max_model_len) == (256, 6, 512)
    assert (server.scheduling, server.watermark, server.asynchronous) == ("priority", 0.1, False)
    assert server.block_bytes == 32 * 4 * 2 * 2 * 64 and shape.precision.dtype == "float32"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine_kwargs": {"swap_space": 4}}, "engine_kwargs.swap_space is not understood"),
        ({"engine_kwargs": {"data_parallel_size": 2}}, "data_parallel_size is 2, only 1 can be replayed"),
        ({"engine_kwargs": {"enable_expert_parallel": True}}, "enable_expert_parallel is True, only False"),
        ({"engine_kwargs": {"max_num_seqs": None}}, "max_num_seqs is None, should be a whole number above 0"),
        ({"kv_cache": {"block_size": 16}}, "kv_cache.num_gpu_blocks is None, should be"),
        ({"kv_cache": {"block_size": 16, "num_gpu_blocks": 9, "num_kv_tokens": 9}}, "is 9, its blocks hold 144"),
        (
            {"kv_cache": {"block_size": 16, "num_gpu_blocks": 9, "num_cpu_blocks": 4}},
            "num_cpu_blocks is 4, should be 0 or null",
        ),
        ({"engine_kwargs": 3}, "not the description of a run"),
    ],
)
def test_what_cannot_be_read_of_a_run_is_refused(
    study: Any, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    values: dict[str, Any] = {"model": "llm", "engine_kwargs": SETTINGS} | change
    if isinstance(values["engine_kwargs"], dict):
        values["engine_kwargs"] = SETTINGS | values["engine_kwargs"]
    file = tmp_path / "run_meta.json"
    file.write_text(json.dumps(values))
    with pytest.raises(study.NotReadError, match=message) as refused:
        study.RecordedEngine.read(file)
    assert str(file) in str(refused.value)


def test_the_shape_of_any_llm_is_read_from_its_file(study: Any, tmp_path: Path) -> None:
    meta = tmp_path / "meta.json"
    meta.write_text(json.dumps({"model": "own/llm", "engine_kwargs": SETTINGS}))
    engine = study.RecordedEngine.read(meta)
    with pytest.raises(study.NotReadError, match="give --config own/llm=FILE"):
        engine.shape({})
    (tmp_path / "config.json").write_text(json.dumps(tables.CONFIG))
    assert engine.shape(study.configs_of([f"own/llm={tmp_path}"])).layers == 4
    for text, message in (("own/llm", "should be LLM=FILE"), (f"own/llm={tmp_path / 'no.json'}", "No such file")):
        with pytest.raises(study.NotReadError, match=message):
            study.configs_of([text])


def test_a_calibration_that_made_things_worse_says_so(study: Any) -> None:
    def lines(error: float) -> dict[str, Any]:
        return {f"{name} mean": {"error": error} for name in study.BARS}

    assert study.helped(lines(-0.01), lines(0.02))["did calibration help"].count("IT MADE IT WORSE") == 2
    assert study.helped(lines(-0.03), lines(0.02))["did calibration help"].count("it helped") == 2


def test_numbers_are_found_and_never_below_nothing(study: Any) -> None:
    design, truth = np.array([[1.0, 2.0], [3.0, 1.0], [0.5, 0.25]]), np.array([2e-3, 0.3])
    nudges = np.array([1e-3, 0.1])
    solution = study.gauss_newton(lambda x: design @ (x - truth), np.zeros(2), nudges)
    assert solution == pytest.approx(truth)
    solution = study.gauss_newton(lambda x: x - np.array([-1.0, 0.5]), np.zeros(2), nudges)
    assert solution == pytest.approx([0.0, 0.5])


def test_requests_are_admitted_in_order_and_when_there_was_room(study: Any) -> None:
    """Three requests at 0, 0.5 and 0.6 s; the third waits through the steps begun at 1 and 2 s."""
    arrival, start_s = np.array([0.0, 0.5, 0.6]), np.array([0.0, 1.0, 2.0, 3.0])
    when_s = study._when_scheduled(start_s, start_s + 1.0)
    assert when_s.tolist() == [0.0, 0.0, 1.0, 2.0]
    assert study._scheduled_s(arrival, when_s, np.array([0, 0, 1, 0])).tolist() == [0.0, 1.0, 2.0]
    assert study._when_scheduled(start_s, start_s + 0.5).tolist() == start_s.tolist()
