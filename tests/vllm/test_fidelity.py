"""`benchmarks/fidelity.py --real` on runs that a simulator made up: there it has to find that nothing is missed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpolicy import policy
from kvpolicy.simulator import Link, Server
from kvpolicy.simulator.builtin import Builtin
from kvpolicy.simulator.hardware.law_times import ConstantTimes
from kvpolicy.simulator.sinks import MemorySink
from kvpolicy.trace import Header, Trace, from_rows, with_core
from kvpolicy_vllm.simulator.engine import VllmScheduler

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TIMES = ConstantTimes(2e-3, (5e-5, 1e-5, 1e-7, 1e-8, 2e-4, 0.0), 1e-3, 1e9)
POLICIES = ("always-recompute", "always-swap")
TIME_COLUMNS = ("start_s", "end_s", "submit_s", "time_s", "closed_s", "arrival_s", "first_token_s", "last_token_s")

pytestmark = [
    pytest.mark.scheduler,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # vLLM's own
]


@pytest.fixture
def fidelity(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import fidelity_real
    import fidelity_record
    import fidelity_steps

    return SimpleNamespace(record=fidelity_record, real=fidelity_real, steps=fidelity_steps)


@pytest.fixture
def folder(fidelity: SimpleNamespace, tmp_path: Path) -> Path:
    """Two sessions of "real" runs, each a day long after the other."""
    for session in (1, 2):
        _session(fidelity.record, tmp_path / f"session-{session}", session)
    return tmp_path


def _server(record: Any) -> Server:
    return Server(
        block_size=record.BLOCK_SIZE,
        block_bytes=131072,
        device_blocks=40,
        host_blocks=500,
        token_budget=record.STEP_TOKENS,
        max_running=record.RUNNING,
        max_model_len=record.CONTEXT_TOKENS,
        link=Link(overlapped=False),
    )


def _session(record: Any, folder: Path, session: int) -> None:
    tables: dict[str, list[dict[str, Any]]] = {}
    headers: dict[str, Header] = {}
    runs, now_s = [], 1000.0 * session
    for block in (0, 1):
        for kind in record.KINDS[:2]:
            for spec in POLICIES:
                work = kind.draw(14, 10 * session + block)
                done = Builtin(leap=False).run(work, policy.load(spec), _server(record), TIMES, 0, MemorySink())
                assert done.trace is not None
                for name in done.trace.tables:
                    rows = done.trace.rows(name)
                    if name == "requests":
                        rows = [row | {"arrival_s": _taken_in_s(row, done.trace.rows("steps"))} for row in rows]
                    tables.setdefault(name, []).extend(_shifted(rows, now_s))
                headers = {"core": next(iter(done.trace.headers.values()))}
                runs.append(_recorded_run(record, work, spec, session, block, now_s, done.trace))
                now_s += 100.0
    by_name = {name: with_core(from_rows(name, rows), "core") for name, rows in tables.items()}
    Trace(headers, by_name).write(folder / "trace")
    (folder / "runs.json").write_text(json.dumps([asdict(run) for run in runs]))


def _taken_in_s(row: dict[str, Any], steps: list[dict[str, Any]]) -> float:
    """When a real engine notes the arrival: as it looks, right after the step in which somebody came."""
    at_s = row["arrival_s"]
    ends = (step["start_s"] + step["duration_s"] for step in steps if step["start_s"] < at_s)
    return float(max([at_s, *ends]) + 1e-6) if at_s else 0.0


def _shifted(rows: list[dict[str, Any]], by_s: float) -> Iterator[dict[str, Any]]:
    for row in rows:
        yield row | {name: row[name] + by_s for name in TIME_COLUMNS if row.get(name) is not None}


def _recorded_run(record: Any, work: Any, spec: str, session: int, block: int, now_s: float, trace: Trace) -> Any:
    rows = sorted(trace.rows("requests"), key=lambda row: int(row["request"]))
    gaps = [
        (row["output_tokens"] - 1, (row["last_token_s"] - row["first_token_s"]) / max(1, row["output_tokens"] - 1))
        for row in rows
    ]
    executed = [row["executed"] for row in trace.rows("decisions")]
    return record.Real(
        work.name, spec, session, block, block == 1, work.seed, work.requests, now_s - 1.0, now_s + 90.0,
        max(row["last_token_s"] for row in rows),
        tuple(row["first_token_s"] - row["arrival_s"] for row in rows),
        tuple((gap_s,) * count for count, gap_s in gaps),
        {kind: executed.count(kind) for kind in ("recompute", "swap")},
        sum(row["recomputed_tokens"] for row in rows), 0,
    )  # fmt: skip


def test_a_simulated_run_is_predicted(fidelity: SimpleNamespace, folder: Path) -> None:
    sessions, (result,) = fidelity.real.judge(folder, (Builtin(),))
    assert len(sessions) == 2 and all(len(session.kept_out) == 4 for session in sessions)
    for session in sessions:
        assert session.times.error < 1e-6
        assert session.times.copies["save"] == pytest.approx((1e-3, 1e-9), rel=1e-6)
    assert set(result.cells) == {(kind.name, spec) for kind in fidelity.record.KINDS[:2] for spec in POLICIES}
    for figure in ("mean e2e", "mean TTFT", "throughput", "preemptions", "recomputed tokens"):
        assert np.max(np.abs([0.0, *fidelity.real.errors(result, figure)])) < 1e-6, figure
    assert sum(cell.means("preemptions")[0] for cell in result.cells.values()) > 4
    assert all(pair.right for pair in fidelity.real.differing_pairs(result, random.Random(0)))


def test_a_slower_machine_is_seen(fidelity: SimpleNamespace, folder: Path) -> None:
    """Runs kept out that took a tenth longer than those for calibration: simulated times come out a tenth too low."""
    for path in folder.glob("session-*/runs.json"):
        runs = json.loads(path.read_text())
        for run in runs:
            if run["kept_out"]:
                run["ttft_s"] = [one * 1.1 for one in run["ttft_s"]]
        path.write_text(json.dumps(runs))
    _, (result,) = fidelity.real.judge(folder, (Builtin(),))
    assert fidelity.real.errors(result, "mean TTFT") == pytest.approx([1 / 1.1 - 1] * 4, rel=1e-3)


def test_schedules_are_compared_step_by_step(fidelity: SimpleNamespace, folder: Path) -> None:
    sessions, _ = fidelity.real.judge(folder, ())
    steps = fidelity.steps.stepwise(sessions[:1], VllmScheduler())
    assert len(steps) == 4
    assert all(one.alike == one.steps and one.preemptions[0] == one.preemptions[1] for one in steps)
    header = replace(sessions[0].header, device_blocks=sessions[0].header.device_blocks + 1)
    one_run = replace(sessions[0], header=header, kept_out=sessions[0].kept_out[:1])
    (other,) = fidelity.steps.stepwise([one_run], VllmScheduler())
    assert other.alike < other.steps


def test_a_folder_without_runs_is_refused(fidelity: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no session-"):
        fidelity.real.judge(tmp_path, ())
