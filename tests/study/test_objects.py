"""Workloads and hardware as objects: they go by what they hold, in this process and in others."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy import HardwareModel, Request, Workload, cost
from kvpolicy.shape import ModelShape
from kvpolicy.study.config import Run, Serving
from kvpolicy.study.recommend import depends_on_seed
from kvpolicy.study.report import SweepReport
from kvpolicy.study.server_flags import config_line
from tests.simulator import tables
from tests.study.object_grids import MODEL, NAME, simulate, workload
from tests.synthetic import options_for, situation


def figures_of(report: SweepReport) -> list[dict[str, Any]]:
    """What a run came to, without what it was called and how long it took here."""
    words = ("digest", "inputs", "simulator_wall_s", "facts")
    return [{name: value for name, value in result.items() if name not in words} for result in report.results]


@pytest.mark.parametrize("jobs", [0, 1])
def test_objects_come_to_what_their_names_do(tmp_path: Path, jobs: int) -> None:
    model = cost.load(MODEL)
    assert isinstance(model.warm(), bool)
    by_name = simulate(NAME, MODEL, tmp_path)
    by_object = simulate(workload(), model, tmp_path, jobs=jobs)
    assert sum(by_name.results[0]["preemptions"].values()) > 0
    assert figures_of(by_object) == figures_of(by_name)
    inputs = by_object.results[0]["inputs"]
    digest = workload().digest
    assert inputs["workload_digest"] == digest
    assert inputs["workload"] == f"azure-conversation-2023@{digest[:12]}"
    assert inputs["hardware"] == f"boosted@{inputs['hardware_digest'][:12]}"
    json.dumps(by_object.to_dict(), allow_nan=False)
    assert inputs["hardware"] in by_object.text()


def test_what_is_finished_is_taken_up_as_long_as_nothing_changed(tmp_path: Path) -> None:
    first, model = workload(), cost.load(MODEL)
    assert simulate(first, model, tmp_path).taken_up == 0
    assert simulate(workload(), cost.load(MODEL), tmp_path).taken_up == 1
    longer = replace(first.requests[-1], output_tokens=first.requests[-1].output_tokens + 1)
    assert simulate(replace(first, requests=(*first.requests[:-1], longer)), model, tmp_path).taken_up == 0
    slower = replace(model, floor_s={kind: 2 * floor for kind, floor in model.floor_s.items()})
    assert slower.digest == model.digest, "of its files, which it is no longer like"
    assert simulate(first, slower, tmp_path).taken_up == 0


def test_a_hardware_model_itself_is_its_folder(tmp_path: Path) -> None:
    shape = ModelShape.from_config(tables.CONFIG)
    model = kvpolicy.import_profile(tables.llmservingsim(tmp_path), tmp_path / "hardware", shape, link="pcie5").model
    assert isinstance(model, HardwareModel)
    by_name, by_object = (simulate(workload(), one, tmp_path) for one in (str(tmp_path / "hardware"), model))
    assert figures_of(by_object) == figures_of(by_name)
    assert by_object.results[0]["inputs"]["hardware_digest"] == model.digest


def test_every_part_of_a_workload_is_a_run(tmp_path: Path) -> None:
    by_name, by_object = (simulate(one, MODEL, tmp_path, parts=3) for one in (NAME, workload()))
    assert figures_of(by_object) == figures_of(by_name) and len(figures_of(by_object)) == 3


def test_advice_for_objects(tmp_path: Path) -> None:
    few = Workload("few", tuple(Request(0.0, 300, 200) for _ in range(24)), 0)
    assert depends_on_seed(NAME) and not depends_on_seed(few)
    run = Run(jobs=0, cache=tmp_path, parts=2)
    advice = kvpolicy.recommend(few, cost.load(MODEL), 60, serving=Serving(32), run=run)
    assert advice.workload == f"few@{few.digest[:12]}" and advice.hardware.startswith("boosted@")
    assert f"cheapest:{advice.hardware}" in [row.policy for row in advice.compared]


def test_no_line_deploys_a_model_that_is_an_object() -> None:
    values = {"hardware": "boosted@0123456789ab", "hardware_digest": "0123456789ab0", "serving": {}}
    assert config_line("cheapest:boosted@0123456789ab,online=on", values, 4.0) == ""
    assert config_line("always-swap", values, 4.0) == "kvpolicy config --policy always-swap --host-gib 4"


def test_a_compiled_model_travels() -> None:
    model = cost.load(MODEL)
    model.warm()
    again, one = pickle.loads(pickle.dumps(model)), situation(1000)
    assert again.predict(one, options_for(one)) == pytest.approx(model.predict(one, options_for(one)))
    assert (again.name, again.digest) == (model.name, model.digest)
