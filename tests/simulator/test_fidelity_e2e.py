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
    monkeypatch.setattr(module, "CONFIGS", {"llm": tables.CONFIG})
    monkeypatch.setattr(module, "NUDGES", (1e-4, 5e-4, 0.1))
    return module


def made_run(study: Any, folder: Path) -> float:
    """Tables, and a run of the simulator on them with an engine of its own time, as if measured; its last second."""
    for file in tables.llmservingsim(folder):
        file.rename(folder / f"lss_{NAME}_tp1_{file.name}")
    files = sorted(folder.glob("lss_*"))
    shape = study.ModelShape.from_config(tables.CONFIG)
    model = kvpolicy.import_profile(files, folder / "out", shape, link="pcie5").model
    times = TableTimes(study.replace(model, engine=TRUTH))
    rng = random.Random(0)
    arrivals = [0.0, *np.cumsum([rng.expovariate(300.0) for _ in range(REQUESTS - 1)]).tolist()]
    requests = tuple(Request(at, rng.randrange(20, 400), rng.randrange(10, 60)) for at in arrivals)
    workload = Workload("made", requests, 0)
    server = study.server_of(SETTINGS, shape)
    trace = Builtin().run(workload, load_policy("always-recompute"), server, times, sink=MemorySink()).trace
    assert trace is not None
    rows = sorted(trace.table("requests").to_pylist(), key=lambda row: int(row["request"]))
    steps = trace.table("steps").to_pylist()
    start_s, duration_s, waiting = (
        np.array([row[name] for row in steps]) for name in ("start_s", "duration_s", "waiting_requests")
    )
    when_s = study._when_scheduled(start_s, start_s + duration_s)
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
    (folder / f"{NAME}_meta.json").write_text(
        json.dumps({"model": "llm", "vllm_version": "0", "engine_kwargs": SETTINGS})
    )
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
