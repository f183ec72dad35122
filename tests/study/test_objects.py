"""Workloads and hardware as objects: they go by what they hold, in this process and in others."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy import HardwareModel, Request, Workload, cost
from kvpolicy.cost import CostModel
from kvpolicy.events import Cost, Option, Preemption
from kvpolicy.fields import WrongValue
from kvpolicy.shape import ModelShape
from kvpolicy.study.cell import Cell
from kvpolicy.study.config import Run, Serving
from kvpolicy.study.recommend import _config_line, depends_on_seed
from kvpolicy.study.report import SweepReport
from kvpolicy.workload import WorkloadError, open_workload
from tests.simulator import tables
from tests.synthetic import options_for, situation

NAME = "azure-conversation-2023?n=30&context=1024"
MODEL = "cpu-llama-native"
TIGHT = 200


def workload(name: str = NAME) -> Workload:
    source = open_workload(f"{name}&seed=0")
    return Workload(source.name, tuple(source), source.seed, source.source)


def simulate(workload: Any, hardware: Any, cache: Path, **more: Any) -> SweepReport:
    run = Run(cache=cache, **({"jobs": 0} | more))
    report = kvpolicy.simulate([workload], ["always-swap"], [TIGHT], hardware, serving=Serving(32), run=run)
    assert report.ok, report.text()
    return report


def told(report: SweepReport) -> list[dict[str, Any]]:
    """What a run came to, without what it was called and how long it took here."""
    words = ("digest", "inputs", "simulator_wall_s", "facts")
    return [{name: value for name, value in one.items() if name not in words} for one in report.results]


@pytest.mark.parametrize("jobs", [0, 1])
def test_objects_come_to_what_their_names_do(tmp_path: Path, jobs: int) -> None:
    model = cost.load(MODEL)
    assert isinstance(model.warm(), bool)
    by_name = simulate(NAME, MODEL, tmp_path)
    by_object = simulate(workload(), model, tmp_path, jobs=jobs)
    assert sum(by_name.results[0]["preemptions"].values()) > 0
    assert told(by_object) == told(by_name)
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


def test_a_cell_of_texts_has_the_inputs_that_it_always_had() -> None:
    cell = Cell(NAME, "always-swap", TIGHT, "native", 0, MODEL)
    names = ["workload", "policy", "kv_blocks", "link", "seed", "hardware", "engine", "serving", "part", "parts"]
    assert list(cell.inputs()) == names


def test_a_hardware_model_itself_is_its_folder(tmp_path: Path) -> None:
    shape = ModelShape.from_config(tables.CONFIG)
    made = kvpolicy.import_profile(tables.llmservingsim(tmp_path), tmp_path / "hardware", shape, link="pcie5").model
    assert isinstance(made, HardwareModel)
    by_name, by_object = (simulate(workload(), one, tmp_path) for one in (str(tmp_path / "hardware"), made))
    assert told(by_object) == told(by_name)
    assert by_object.results[0]["inputs"]["hardware_digest"] == made.digest


def test_every_part_of_a_workload_is_a_run(tmp_path: Path) -> None:
    by_name, by_object = (simulate(one, MODEL, tmp_path, parts=3) for one in (NAME, workload()))
    assert told(by_object) == told(by_name) and len(told(by_object)) == 3


class Guess(CostModel):
    name = "guess"

    def predict(self, situation: Preemption, options: Sequence[Option]) -> tuple[Cost, ...]:
        raise AssertionError


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (open_workload(NAME), "workloads hold 'azure-conversation-2023', a SyntheticRequests, should be texts or"),
        (iter(workload()), "a tuple_iterator, should be texts or Workload objects, which have a digest"),
        (replace(workload(), requests=list(workload().requests)), "workload azure-conversation-2023: requests should"),
        (None, "workloads hold None, a NoneType, should be texts"),
    ],
)
def test_a_workload_that_may_change_is_refused_by_name(given: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises((WrongValue, WorkloadError), match=told):
        simulate(given, MODEL, tmp_path)


def test_an_object_that_is_no_hardware_is_refused_by_name(hardware: str, tmp_path: Path) -> None:
    untrained = cost.load(f"analytic:{hardware}")
    for given, said in (
        (Guess(), "hardware is 'guess', a Guess, should be a text"),
        (untrained, f"hardware 'analytic:{hardware}': is untrained, should be named as DEVICE"),
        (80, "hardware is 80, a int, should be a text"),
    ):
        with pytest.raises(WrongValue) as error:
            simulate(NAME, given, tmp_path)
        assert str(error.value).startswith(said)


def test_what_is_advised_of_objects(tmp_path: Path) -> None:
    few = Workload("few", tuple(Request(0.0, 300, 200) for _ in range(24)), 0)
    assert depends_on_seed(NAME) and not depends_on_seed(few)
    run = Run(jobs=0, cache=tmp_path, parts=2)
    advice = kvpolicy.recommend(few, cost.load(MODEL), 60, serving=Serving(32), run=run)
    assert advice.workload == f"few@{few.digest[:12]}" and advice.hardware.startswith("boosted@")
    assert f"cheapest:{advice.hardware}" in [one.policy for one in advice.compared]


def test_no_line_deploys_a_model_that_is_an_object() -> None:
    given = {"hardware": "boosted@0123456789ab", "hardware_digest": "0123456789ab0"}
    assert _config_line("cheapest:boosted@0123456789ab,online=on", given, 4.0) == ""
    assert _config_line("always-swap", given, 4.0) == "kvpolicy config --policy always-swap"


def test_a_compiled_model_travels() -> None:
    model = cost.load(MODEL)
    model.warm()
    again, one = pickle.loads(pickle.dumps(model)), situation(1000)
    assert again.predict(one, options_for(one)) == pytest.approx(model.predict(one, options_for(one)))
    assert (again.name, again.digest) == (model.name, model.digest)
