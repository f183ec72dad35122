"""One cell of a grid: its server, its machine, its policy."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from shutil import copytree

import pytest

from kvpolicy import cost
from kvpolicy import trace as traces
from kvpolicy.fields import WrongValue
from kvpolicy.request_marks import Classes
from kvpolicy.study import run_cell
from kvpolicy.study.cell import Cell
from kvpolicy.study.config import Serving
from tests.study.conftest import CONFIG
from tests.study.grids import TIGHT, WORKLOAD, simulate
from tests.synthetic import options_for, situation

ROOT = Path(__file__).resolve().parents[2]


def test_a_copy_moves_pieces_of_the_size_that_was_measured(hardware: str, tmp_path: Path) -> None:
    """Behind a model's own machine nothing of a swap is beyond it; elsewhere a piece is one layer's page."""
    model = "cpu-llama-native"
    values = {"block_size": 32, "workloads": ["azure-conversation-2023?n=10&context=512"], "kv_blocks": [30]}
    (one,) = simulate(model, tmp_path / "c", policies=[f"cheapest:{model}"], **values).results
    assert one["choices"] > 0
    cell = Cell(WORKLOAD, "always-swap", 30, "native", 0, model, serving=Serving(block_size=32))
    server = run_cell.server_of(cell, run_cell.machine_of(cell))
    assert server.segment_bytes == 65536
    trained = run_cell.machine_of(cell).model_loader
    low, high = cost.load(model).ranges["swap"]["segment_bytes"]
    assert trained is not None and low <= server.segment_bytes <= high
    by_sheet = _priced(hardware)
    there = run_cell.server_of(by_sheet, run_cell.machine_of(by_sheet))
    assert there.segment_bytes == there.block_bytes // 8, "of eight layers"
    assert there.segment_bytes == 2 * 2 * 128 * 2 * 16, "keys and values, heads, their width, bytes, tokens"


def test_a_link_that_is_named_with_the_device_counts(hardware: str, tmp_path: Path) -> None:
    """For the simulated copies, and for the cost model that is asked about them."""
    slow = hardware.replace("H100-SXM:", "H100-SXM@pcie3:")
    results = [simulate(where, tmp_path / "c", policies=["always-swap"]).results[0] for where in (hardware, slow)]
    assert all(result["preemptions"]["swap"] > 0 for result in results)
    assert results[0]["e2e_s"] != results[1]["e2e_s"]
    times = [run_cell.machine_of(_priced(where)).times for where in (hardware, slow)]
    fast_s, slow_s = (each.copy_s("load", 1 << 30, 1, 1 << 30) for each in times)
    assert fast_s < slow_s
    models = [run_cell.policy_of(cell)[0].cost_model for cell in (_priced(hardware), _priced(slow))]
    costs = [model.predict(situation(2000, 16), options_for(situation(2000, 16)))[1] for model in models if model]
    assert costs[0].engine_s < costs[1].engine_s


def _priced(hardware: str) -> Cell:
    return Cell(WORKLOAD, "cheapest:analytic", TIGHT, "native", 0, hardware)


def test_a_cost_model_that_changed_is_read_again(hardware: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    copytree(ROOT / "models" / "cpu-llama-native", model)
    first = run_cell.policy_of(Cell(WORKLOAD, f"cheapest:{model}", TIGHT, "native", 0, str(model)))[0].cost_model
    card = json.loads((model / "model.json").read_text())
    (model / "model.json").write_text(json.dumps(card, indent=3))
    again = run_cell.policy_of(Cell(WORKLOAD, f"cheapest:{model}", TIGHT, "native", 0, str(model)))[0].cost_model
    assert again is not first


def test_copies_beside_a_step_slow_it_by_their_share_of_the_memory(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    cell = Cell(WORKLOAD, "always-swap", TIGHT, "native", 0, f"H100-SXM@pcie5:{config}")
    machine = run_cell.machine_of(cell)
    slowdown = run_cell.server_of(cell, machine).link.slowdown
    rate = 1e9 / machine.times.copy_s("load", 10**9, 1, 10**9)
    assert slowdown == pytest.approx(rate / 3.35e12, rel=0.02) and slowdown > 0.01


def test_a_chat_beside_a_backlog_is_simulated_as_the_page_says(hardware: str, tmp_path: Path) -> None:
    """No more than 16 requests of the backlog are served at a time, and the chat goes first under priority."""
    (text,) = re.findall(r"--workload '(.* \+ .*)'", (ROOT / "docs" / "workloads.md").read_text())
    values = {"workloads": [text], "policies": ["always-swap"], "kv_blocks": [8000], "out": tmp_path / "out"}
    ttft_s = {}
    for scheduling in ("fcfs", "priority"):
        report = simulate(
            hardware, tmp_path / "c", **(values | {"scheduling": scheduling, "out": tmp_path / scheduling})
        )
        assert report.ok, report.text()
        (folder,) = (tmp_path / scheduling).iterdir()
        rows = traces.read(folder).rows("requests")
        batch = [row for row in rows if row["class"] == "batch"]
        chat = [row for row in rows if row["class"] == "chat"]
        assert (len(chat), len(batch)) == (400, 100)
        changes = [(row["arrival_s"], 1) for row in batch] + [(row["last_token_s"], -1) for row in batch]
        assert max(accumulate(change for _, change in sorted(changes))) == 16
        ttft_s[scheduling] = sum(row["first_token_s"] - row["arrival_s"] for row in chat)
    assert ttft_s["priority"] <= ttft_s["fcfs"]


def test_every_file_of_a_join_counts(hardware: str, tmp_path: Path) -> None:
    """Its rows, its seed, and its contents, by which results are kept."""
    files = [tmp_path / "one.csv", tmp_path / "other.csv"]
    for file in files:
        file.write_text("prompt_tokens,output_tokens\n100,20\nbad\n")
    text = " + ".join(f"{file}?draw=5&skip_damaged=true&rate=9&class={file.stem}" for file in files)
    (one,) = simulate(hardware, tmp_path / "c", workloads=[text], policies=["always-swap"]).results
    assert one["requests"] == 10 and one["rows"] == {"read": 4, "damaged": 2, "empty": 0}
    digest = run_cell.contents(Cell(text, "always-swap", TIGHT, "native", 0, hardware))["workload"]
    files[1].write_text("prompt_tokens,output_tokens\n100,30\n")
    assert run_cell.contents(Cell(text, "always-swap", TIGHT, "native", 0, hardware))["workload"] != digest
    drawn = [tuple(run_cell.source_of(Cell(text, "always-swap", TIGHT, "native", seed, hardware))) for seed in (0, 1)]
    assert drawn[0] != drawn[1]


TWO_CLASSES = f"{WORKLOAD}&class=chat&priority=-1&ttft=0.1 + {WORKLOAD}&class=batch"


@pytest.mark.parametrize("parts", [1, 2])
def test_a_simulated_server_grants_what_a_real_one_would(hardware: str, tmp_path: Path, parts: int) -> None:
    """Claims of classes that are not listed, and deadlines that are too short, change neither the schedule nor the
    figures by class."""
    values = {"workloads": [TWO_CLASSES], "policies": ["always-swap"], "order": "urgent", "parts": parts}
    report = simulate(hardware, tmp_path / "c", classes="chat:ttft=2,priority=3", out=tmp_path / "out", **values)
    assert report.ok, report.text()
    rows = [row for folder in (tmp_path / "out").iterdir() for row in traces.read(folder).rows("requests")]
    marks = {(row["class"], row["priority"], row["ttft_deadline_s"], row["tpot_deadline_s"]) for row in rows}
    assert len(rows) == 60 and marks == {("chat", 3, 2.0, None), ("default", 0, None, None)}
    assert {name for result in report.results for name in result["classes"]} == {"chat", "default"}
    assert "order urgent, classes chat:ttft=2.0,priority=3" in report.text()
    freely = simulate(hardware, tmp_path / "c", **values)
    assert freely.taken_up == 0 and {name for one in freely.results for name in one["classes"]} == {"batch", "chat"}
    chat, limited = (one.results[0]["classes"]["chat"] for one in (freely, report))
    assert chat["slo_share"] != limited["slo_share"]
    assert (chat["ttft_s"] != limited["ttft_s"]) == (parts == 1), "the first of two parts has no batch"


def test_bounds_on_priorities_are_refused_where_clients_priorities_rank(hardware: str, tmp_path: Path) -> None:
    with pytest.raises(WrongValue, match=r"classes is 'chat:priority=-1', which bounds priorities"):
        simulate(hardware, tmp_path / "c", scheduling="priority", classes="chat:priority=-1")
    assert Serving(scheduling="priority", classes=Classes.parse("chat:ttft=1")).classes is not None


def test_the_longest_request_is_the_servers_and_an_input_only_where_it_is_given(hardware: str, tmp_path: Path) -> None:
    plain, short = (replace(_priced(hardware), serving=Serving(max_model_len=most)) for most in (None, 100))
    lengths = [run_cell.server_of(cell, run_cell.machine_of(cell)).max_model_len for cell in (plain, short)]
    assert lengths == [131072, 100]
    assert "max_model_len" not in plain.inputs()["serving"] and short.inputs()["serving"]["max_model_len"] == 100
    report = simulate(hardware, tmp_path / "c", policies=["always-swap"], max_model_len=100)
    assert "max_model_len is 100; should be at least as many (--max-model-len)" in report.failed[0].text()
