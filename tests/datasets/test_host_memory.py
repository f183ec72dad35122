"""Page-locked and pageable host memory: read from transfers, kept apart in training, compared before a model prices."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpolicy import cost
from kvpolicy.cost import ModelError, ModelWarning
from kvpolicy.datasets.host_memory import common_host_memory, pinned_by_core
from kvpolicy.datasets.profiles import dataset_of
from kvpolicy.evaluation import evaluate
from kvpolicy.evaluation.decision_log import log_from_traces
from kvpolicy.fields import WrongValue
from kvpolicy.hardware import EngineSpec
from kvpolicy.trace import Trace, TraceError
from kvpolicy.training import calibrate, train
from tests.synthetic import GEOMETRY, HARDWARE, NATIVE, CostLaw, changed, make_trace

GPU = HARDWARE | {"device": "an accelerator"}
PAGEABLE_LAW = CostLaw(s_per_byte=8.0e-9)


def traces_of_both(**changes: Any) -> dict[str, Trace]:
    settings = {"states": 60, "repeats": 2, "hardware": GPU} | changes
    return {
        "pinned": make_trace(name="pinned", pinned=True, **settings),
        "pageable": make_trace(name="pageable", law=PAGEABLE_LAW, **settings),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("both")
    for name, trace in traces_of_both().items():
        trace.write(folder / name)
    return {name: folder / name for name in ("pinned", "pageable")}


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, Path]:
    made = {name: folder.parent / f"model-{name}" for name, folder in folders.items()}
    for name, folder in folders.items():
        train([folder], made[name])
    return made


def engine(**changes: Any) -> EngineSpec:
    size = 32
    spec = EngineSpec(
        size,
        block_bytes=size * GEOMETRY.kv_bytes_per_token,
        geometry=GEOMETRY.to_dict(),
        hardware=GPU,
        link=NATIVE,
    )
    return replace(spec, **changes)


def test_the_kind_is_read_from_the_transfers() -> None:
    both = traces_of_both(states=12)
    assert pinned_by_core("pinned", both["pinned"]) == {"core-pinned-32": True, "core-pinned-64": True}
    assert common_host_memory({"a": both["pageable"]}) is False
    with pytest.raises(TraceError, match="cores core-pinned-64 and core-pageable-64 copied over page-locked and over"):
        common_host_memory(both)


def test_a_core_that_says_both_is_refused_by_name() -> None:
    made = make_trace(states=12, block_sizes=(32,))
    rows = [row | {"pinned": number == 3} for number, row in enumerate(made.rows("transfers"))]
    with pytest.raises(TraceError, match="folder: table transfers, core core-made-32: pinned is true in some rows"):
        pinned_by_core("folder", changed(made, "transfers", rows))


def test_a_simulators_link_has_no_kind() -> None:
    made = make_trace(states=12)
    headers = {core: replace(header, source="simulation") for core, header in made.headers.items()}
    assert pinned_by_core("folder", Trace(headers, made.tables)) == {}


@pytest.mark.parametrize(("name", "kind"), [("pinned", True), ("pageable", False)])
def test_a_model_remembers_its_kind_and_fits_that_alone(models: dict[str, Path], name: str, kind: bool) -> None:
    model = cost.load(models[name])
    assert model.pinned is kind
    assert json.loads((models[name] / "model.json").read_text())["pinned"] is kind
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.check_fit(engine(pinned=kind))
        model.check_fit(engine(pinned=None))
    right = "train --pageable`, or serve without --no-pin-memory" if kind else "train`, or serve with --no-pin-memory"
    with pytest.raises(ModelError, match=f"field pinned is {kind} .*here it is {not kind} .*{right}"):
        model.check_fit(engine(pinned=not kind))


def test_on_a_cpu_there_is_only_one_kind() -> None:
    for name in cost.shipped():
        model = cost.load(name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            spec = EngineSpec(
                model.provenance.block_sizes[0],
                block_bytes=round(model.provenance.block_sizes[0] * model.provenance.kv_bytes_per_token),
                geometry=model.provenance.geometry.to_dict(),
                hardware=model.provenance.hardware,
                link=model.provenance.link,
            )
            model.check_fit(replace(spec, pinned=True))
            model.check_fit(replace(spec, pinned=False))


def test_a_model_that_does_not_say_warns_once(models: dict[str, Path], tmp_path: Path) -> None:
    card = json.loads((models["pinned"] / "model.json").read_text())
    del card["pinned"]
    for file in models["pinned"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.json").write_text(json.dumps(card))
    model = cost.load(tmp_path)
    assert model.pinned is None
    for kind in (True, False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(3):
                model.check_fit(engine(pinned=kind))
        messages = [str(warning.message) for warning in caught if issubclass(warning.category, ModelWarning)]
        assert len(messages) == 1
        assert "does not say whether it was measured over page-locked host memory (field pinned)" in messages[0]


def test_a_card_with_another_value_is_refused_by_field(models: dict[str, Path], tmp_path: Path) -> None:
    for file in models["pinned"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    card = json.loads((tmp_path / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps(card | {"pinned": "yes"}))
    with pytest.raises(ModelError, match=r"model\.json: field pinned is 'yes', should be true, false or null"):
        cost.load(tmp_path)


def test_a_profile_of_both_gives_a_model_of_one(folders: dict[str, Path], tmp_path: Path) -> None:
    """Its own core decides which kind a state is of; the two kinds differ by a factor of four here."""
    both = list(folders.values())
    pinned, pageable = train(both), train(both, pageable=True)
    assert (pinned.model.pinned, pageable.model.pinned) == (True, False)
    assert {core.split("/")[0] for core in pinned.model.state_ids} == {"core-pinned-32", "core-pinned-64"}
    assert pinned.left_out["states measured over pageable host memory"] == 60
    assert pageable.left_out["states measured over page-locked host memory"] == 60
    assert pinned.held_out["swap"]["mean_error"] < 0.1 > pageable.held_out["swap"]["mean_error"]
    assert pinned.held_out["swap"] == train([folders["pinned"]]).held_out["swap"]


def test_pageable_memory_that_was_not_measured_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(TraceError, match="table transfers has no row with pinned false"):
        train([folders["pinned"]], pageable=True)


def test_evaluation_keeps_to_the_models_kind(folders: dict[str, Path], models: dict[str, Path]) -> None:
    both, pinned = list(folders.values()), f"cheapest:{models['pinned']}"
    alone = evaluate([folders["pinned"]], [pinned])
    report = evaluate(both, [pinned])
    assert report.left_out["states measured over pageable host memory"] == 60
    assert report.policies == alone.policies
    assert evaluate(both, ["always-swap"]).states == 120
    with pytest.raises(ModelError, match="field pinned is True"):
        evaluate([folders["pageable"]], [pinned])
    with pytest.raises(ModelError, match="field pinned is"):
        evaluate(both, [pinned, f"cheapest:{models['pageable']}"])


def test_a_calibration_is_of_the_kind_it_was_measured_on(folders: dict[str, Path], models: dict[str, Path]) -> None:
    assert calibrate(models["pinned"], [folders["pageable"]]).model.pinned is False
    both = list(folders.values())
    for name, pinned in (("pinned", True), ("pageable", False)):
        moved, alone = calibrate(models[name], both).model, calibrate(models[name], [folders[name]]).model
        assert moved.pinned is pinned, "of traces of both kinds, a model is calibrated on those of its own"
        assert {kind: law.to_dict() for kind, law in moved.laws.items()} == {
            kind: law.to_dict() for kind, law in alone.laws.items()
        }


def test_a_log_names_its_kind_and_is_of_one(folders: dict[str, Path]) -> None:
    logs = {}
    for name, trace in traces_of_both(states=12).items():
        headers = {core: replace(header, source="production") for core, header in trace.headers.items()}
        rows = [row | {"state_id": None, "arm": None, "repeat": None} for row in trace.rows("decisions")]
        tables = {table: part for table, part in trace.tables.items() if table != "windows"}
        logs[name] = changed(Trace(headers, tables), "decisions", rows)
    assert log_from_traces({"a": logs["pinned"]}).pinned is True
    assert log_from_traces({"a": logs["pageable"]}).pinned is False
    with pytest.raises(TraceError, match="use the logs of one kind at a time"):
        log_from_traces(logs)


def test_states_of_both_kinds_are_kept_apart_by_core() -> None:
    dataset = dataset_of(traces_of_both(states=12))
    assert dataset.pinned is None
    part = dataset.of_host_memory(False)
    assert part.pinned is False
    assert set(part.headers) == {"core-pageable-32", "core-pageable-64"}
    assert len(part.states) == 12
    assert part.of_host_memory(True) is part, "nothing else was measured"


def test_a_log_is_not_asked_for_pageable(tmp_path: Path) -> None:
    made = make_trace(states=12)
    headers = {core: replace(header, source="production") for core, header in made.headers.items()}
    Trace(headers, made.tables).write(tmp_path / "log")
    with pytest.raises(WrongValue, match="pageable is for profiles"):
        train([tmp_path / "log"], pageable=True)
