"""Model folders: what is written is what is read; the damaged and the foreign are refused by file and field."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpolicy import cost
from kvpolicy.cost import ModelError, ModelWarning, store
from kvpolicy.cost.laws import RecomputeRoofline
from kvpolicy.cost.model import FittedModel
from kvpolicy.datasets.profiles import read_dataset
from kvpolicy.hardware import EngineSpec
from kvpolicy.training import provenance_of, split, train
from kvpolicy.training.family import FAMILIES
from kvpolicy.training.fit import fit
from tests.synthetic import GEOMETRY, HARDWARE, NATIVE, CostLaw, make_trace, options_for, situation

ENGINE = EngineSpec(
    block_size=32,
    block_bytes=32 * GEOMETRY.kv_bytes_per_token,
    geometry=GEOMETRY.to_dict(),
    hardware=HARDWARE,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    make_trace(seed=1, states=160, law=CostLaw(bend=0.4)).write(folder / "trace")
    train([folder / "trace"], folder / "mine")
    return folder / "mine"


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    for file in trained.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    card = json.loads((folder / "model.json").read_text())
    change(card)
    (folder / "model.json").write_text(json.dumps(card))


def test_folder_holds_text_only(trained: Path) -> None:
    assert sorted(file.name for file in trained.iterdir()) == ["model.json", "recompute.txt", "swap.txt"]


def test_what_is_read_predicts_what_was_fitted(trained: Path) -> None:
    data = read_dataset([trained.parent / "trace"])
    training, _ = split(data.states, 0)
    fitted = fit(FAMILIES["boosted"], training, data, provenance_of("boosted", data, training, 0.03), 0).model
    read = cost.load(trained)
    for tokens in (20, 100, 900, 5000):
        one = situation(tokens)
        assert read.predict(one, options_for(one)) == fitted.predict(one, options_for(one))


def test_digest_is_of_the_content(trained: Path, copied: Path) -> None:
    assert cost.load(copied).digest == cost.load(trained).digest
    edit(copied, lambda card: card["notes"].append("another"))
    assert cost.load(copied).digest != cost.load(trained).digest


def test_loading_and_predicting_imports_no_trainer(trained: Path) -> None:
    program = f"""
import sys
from kvpolicy import cost, policy
from kvpolicy.events import Option
model = cost.load({str(trained)!r})
policy.load('cheapest:' + {str(trained)!r})
assert model.residuals
print([name for name in ('lightgbm', 'sklearn', 'pandas', 'pyarrow', 'scipy', 'numba') if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("file", ["model.json", "recompute.txt", "swap.txt"])
@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9])
def test_truncated_files_are_refused_by_name(copied: Path, file: str, keep: float) -> None:
    text = (copied / file).read_text()
    (copied / file).write_text(text[: int(keep * len(text))])
    with pytest.raises(ModelError, match=rf"{file}: truncated"):
        cost.load(copied)


@pytest.mark.parametrize("number", ["1" + "0" * 400, "9007199254740993", "NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["floor_s", "coverage", "vocab"])
def test_what_is_no_number_is_refused_by_file(copied: Path, field: str, number: str) -> None:
    card = copied / "model.json"
    before = card.read_text()
    after = re.sub(rf'("{field}"[^0-9-]*\[?\s*)-?[0-9.e+-]+', rf"\g<1>{number}", before, count=1)
    assert number in after
    card.write_text(after)
    with pytest.raises(ModelError, match=rf"model.json: .*field \S*{field}.* is .*(too large|no number)"):
        store.load(copied)


@pytest.mark.parametrize("file", ["model.json", "swap.txt"])
def test_missing_and_binary_files_are_refused_by_name(copied: Path, file: str) -> None:
    (copied / file).write_bytes(b"\xff\xfe\x00pickle")
    with pytest.raises(ModelError, match=rf"{file}: "):
        cost.load(copied)
    (copied / file).unlink()
    with pytest.raises(ModelError, match=rf"{file}: "):
        cost.load(copied)


def test_foreign_schema_and_foreign_json_are_refused(copied: Path) -> None:
    for version in (2, 99):
        edit(copied, lambda card, version=version: card.update(schema_version=version))
        with pytest.raises(ModelError, match=rf"model.json: schema_version is {version}, this kvpolicy reads 3; make"):
            cost.load(copied)
    (copied / "model.json").write_text('{"weights": []}')
    with pytest.raises(ModelError, match="schema_version is missing: not a kvpolicy cost model"):
        cost.load(copied)


FIELDS = (
    "family", "features", "ranges", "laws", "trees", "intervals", "noise", "hardware", "geometry", "link",
    "block_sizes", "kv_bytes_per_token", "trace_digests", "state_ids", "held_out", "notes",
    "victim_delays", "others_share", "step_time", "carried",
)  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_field_is_named(copied: Path, field: str) -> None:
    edit(copied, lambda card: card.pop(field))
    with pytest.raises(ModelError, match=rf"model.json: .*{field}"):
        cost.load(copied)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [None, 7, "x", [None], {"a": None}])
def test_nothing_but_a_model_error_comes_of_a_wrong_field(copied: Path, field: str, value: Any) -> None:
    """Some fields may hold what they like; none may raise anything else."""
    edit(copied, lambda card: card.update({field: value}))
    try:
        cost.load(copied)
    except ModelError as error:
        said = str(error)
    else:
        said = f"model.json {field}"
    assert "model.json" in said
    assert field in said


def _set(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(card: dict[str, Any]) -> None:
        for name in path[:-1]:
            card = card[name]
        card[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("laws", "recompute", "s_per_token", value=-1.0), r"laws.recompute.*s_per_token is -1.0"),
        (_set("laws", "swap", "save", "latency_s", value="fast"), r"laws.swap.*latency_s is 'fast'"),
        (_set("laws", "swap", "law", value="cubic"), r"laws.swap.*law is 'cubic'"),
        (_set("ranges", "swap", "save_bytes", value=[5, 1]), r"ranges.swap.save_bytes is \[5, 1\]"),
        (_set("noise", "floor_s", "swap", value=0), r"noise.floor_s.swap is 0"),
        (_set("carried", "swap", value="no"), "carried.swap is 'no', should be true or false"),
        (_set("intervals", "growth", "ratio", value=-1), "growth.ratio is -1"),
        (_set("intervals", "length_edges", value=[3, 2, 1]), r"intervals.*ascending"),
        (_set("others_share", "swap", value=-1), r"others_share.swap is -1"),
        (_set("intervals", "length_edges", value=[float("nan")]), r"intervals.*length_edges is nan"),
        (_set("laws", "recompute", "s_per_token", value=1e306), r"laws.recompute.*s_per_token is 1e\+306"),
        (
            _set("victim_delays", value={"recompute": {"law": "linear", "constant_s": 1.0, "per_feature_s": {}}}),
            "field victim_delays.swap is missing",
        ),
        (_set("victim_delays", "swap", "constant_s", value=-1.0), r"victim_delays.swap.*constant_s is -1.0"),
        (_set("step_time", value={"per_part_s": [1.0]}), r"step_time.*per_part_s holds 1 numbers, should hold 6"),
        (_set("step_time", value={"per_part_s": [0.0] * 6, "fixed_s": -1}), r"step_time.*fixed_s holds -1"),
        (_set("geometry", value={"layers": 3}), r"model geometry: field hidden is missing"),
        (_set("family", value=7), r"family.* is 7, should be a name"),
        (_set("trees", "swap", "file", value="../../etc/passwd"), r"trees.swap.file"),
        (_set("trees", "swap", "inputs", value=["colour"]), r"trees.swap.inputs.*colour"),
    ],
)
def test_wrong_values_are_named(copied: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    edit(copied, change)
    with pytest.raises(ModelError, match=message) as caught:
        cost.load(copied)
    assert str(copied / "model.json") in str(caught.value)


@pytest.mark.parametrize(("kind", "other"), [("recompute", "swap"), ("swap", "recompute")])
def test_a_law_of_the_other_option_is_refused(copied: Path, kind: str, other: str) -> None:
    def change(card: dict[str, Any]) -> None:
        card["laws"][kind] = card["laws"][other]

    edit(copied, change)
    with pytest.raises(ModelError, match=rf"laws\.{kind}\.law is '{other}_roofline', should be {kind}_roofline"):
        cost.load(copied)


def test_a_changed_forest_is_refused(copied: Path) -> None:
    text = (copied / "swap.txt").read_text()
    (copied / "swap.txt").write_text(text.replace("leaf_value=", "leaf_value=1e3 ", 1))
    with pytest.raises(ModelError, match=r"swap.txt: truncated or changed"):
        cost.load(copied)


def test_an_unknown_name_says_what_ships() -> None:
    with pytest.raises(ModelError, match=r"no-such-model: no such folder, and no cost model of that name ships"):
        cost.load("no-such-model")


def test_models_that_ship_load_by_name() -> None:
    for name in cost.shipped():
        assert cost.load(name).name == name


def test_the_engine_it_was_measured_on_fits_without_a_word(trained: Path) -> None:
    model = cost.load(trained)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.check_fit(ENGINE)
        model.check_fit(replace(ENGINE, link=NATIVE))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"geometry": replace(GEOMETRY, layers=5).to_dict()}, "geometry.layers is 5 here, it was measured on 4"),
        ({"geometry": replace(GEOMETRY, dtype="bfloat16").to_dict()}, "geometry.dtype is 'bfloat16'"),
        ({"block_bytes": 16 * GEOMETRY.kv_bytes_per_token}, "KV bytes per token"),
        ({"block_bytes": None}, "KV bytes per token is None here"),
        ({"geometry": {}}, "geometry.layers is None here"),
        ({"hardware": HARDWARE | {"device": "Tesla"}}, "device is 'Tesla' here"),
        ({"hardware": HARDWARE | {"processor": "another"}}, "processor is 'another' here"),
        ({"link": {"kind": "simulated", "bytes_per_s": 1e9, "latency_s": 0.0}}, "link is"),
    ],
)
def test_another_engine_is_refused_by_what_differs(trained: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        cost.load(trained).check_fit(replace(ENGINE, **change))


def test_another_block_size_is_carried_by_physics_with_a_warning(trained: Path) -> None:
    model = cost.load(trained)
    with pytest.warns(ModelWarning, match="blocks of 128 are extrapolated to"):
        model.check_fit(replace(ENGINE, block_size=128, block_bytes=128 * GEOMETRY.kv_bytes_per_token))
    one = situation(1000, block_size=128)
    assert model.predict(one, options_for(one))[1].extrapolated
    with pytest.warns(ModelWarning, match="cores 2, here it is 64"):
        model.check_fit(replace(ENGINE, hardware=HARDWARE | {"cores": 64}))


def test_another_token_budget_is_warned_of(trained: Path) -> None:
    model = cost.load(trained)
    law = model.laws["recompute"]
    assert isinstance(law, RecomputeRoofline)
    model.check_fit(replace(ENGINE, token_budget=512))
    budgeted = replace(model, laws={**model.laws, "recompute": replace(law, budget_tokens=256.0)})
    budgeted.check_fit(replace(ENGINE, token_budget=256))
    with pytest.warns(ModelWarning, match="token budget of 256 .*here it is 512"):
        budgeted.check_fit(replace(ENGINE, token_budget=512))


def test_a_folder_that_holds_something_else_is_not_written_to(tmp_path: Path) -> None:
    make_trace(states=40).write(tmp_path / "trace")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="is no cost model"):
        train([tmp_path / "trace"], tmp_path / "precious")


def test_training_again_replaces_the_model_trees_included(tmp_path: Path) -> None:
    make_trace(seed=1, states=160, law=CostLaw(bend=0.4)).write(tmp_path / "trace")
    train([tmp_path / "trace"], tmp_path / "mine")
    train([tmp_path / "trace"], tmp_path / "mine", family="analytic")
    again: FittedModel = cost.load(tmp_path / "mine")
    assert not again.residuals
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["model.json"]


@pytest.fixture
def shelf(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, and a model that ships under the name ``known``."""
    shelf, here = tmp_path / "shelf", tmp_path / "here"
    (shelf / "known").mkdir(parents=True)
    here.mkdir()
    for file in copied.glob("*.*"):
        (shelf / "known" / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(store, "_shelves", lambda: (shelf,))
    monkeypatch.chdir(here)
    return here


def test_a_folder_that_is_no_model_hides_none_that_ships(shelf: Path) -> None:
    (shelf / "known").mkdir()
    assert cost.load("known").name == "known"
    with pytest.raises(ModelError, match=r"known/model.json: cannot be read"):
        cost.load("./known")
    (shelf / "other").mkdir()
    with pytest.raises(ModelError, match=r"other/model.json: cannot be read"):
        cost.load("other")


def test_where_a_folder_and_a_shipped_model_share_a_name_it_says_which_is_used(shelf: Path) -> None:
    ships = cost.load("known").digest
    (shelf / "known").mkdir()
    for file in (shelf.parent / "shelf" / "known").iterdir():
        (shelf / "known" / file.name).write_bytes(file.read_bytes())
    edit(shelf / "known", lambda card: card["notes"].append("another"))
    with pytest.warns(ModelWarning, match=r"the folder .*here/known is used, not the model that ships"):
        assert cost.load("known").digest != ships
    assert cost.load("./known").digest != ships
    assert cost.load(Path("known")).digest != ships


def test_the_folder_of_a_shipped_model_is_that_model(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shelf.parent / "shelf")
    assert cost.load("known").name == "known"


def test_a_failure_never_loses_the_model_that_was_there(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied / "mine"
    model, forests = cost.load(copied), {}
    for kind in ("recompute", "swap"):
        tree = json.loads((copied / "model.json").read_text())["trees"][kind]
        forests[kind] = store.ForestText((copied / f"{kind}.txt").read_text(), tuple(tree["inputs"]))
    store.save(model, forests, folder)
    (folder / "remarks.md").write_text("mine")
    digest = cost.load(folder).digest
    changed = replace(model, provenance=replace(model.provenance, notes=("another",)))
    rename = Path.rename

    def fails(*_: Any) -> None:
        raise OSError("disk full")

    def fails_at_the_last(self: Path, target: Path) -> Path:
        if ".new-" in self.name:
            raise OSError("disk full")
        return rename(self, target)

    for where, what, how in ((store, "_card", fails), (store, "_put_in_place", fails), (Path, "rename", None)):
        monkeypatch.setattr(where, what, how or fails_at_the_last)
        with pytest.raises(OSError, match="disk full"):
            store.save(changed, forests, folder)
        monkeypatch.undo()
        assert cost.load(folder).digest == digest
    store.save(changed, forests, folder)
    assert cost.load(folder).digest != digest
    assert sorted(one.name for one in folder.iterdir()) == ["model.json", "recompute.txt", "remarks.md", "swap.txt"]
    assert not [one for one in copied.iterdir() if one.name.startswith(".")]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("state_ids", "abc"), ("state_ids", []), ("state_ids", [1]), ("block_sizes", "16"), ("block_sizes", [True]),
        ("block_sizes", []), ("block_sizes", [16.0]), ("schema_version", True), ("schema_version", 1.0),
        ("trace_digests", "abc"), ("notes", "abc"), ("kv_bytes_per_token", "4096"), ("kv_bytes_per_token", True),
        ("kv_bytes_per_token", 0), ("hardware", [["device", "cpu"]]), ("link", []), ("held_out", []),
        ("trees", []), ("trees", {"Swap": {}}),
    ],
)  # fmt: skip
def test_a_field_of_the_wrong_type_is_refused_by_name(copied: Path, field: str, value: Any) -> None:
    edit(copied, lambda card: card.update({field: value}))
    with pytest.raises(ModelError, match=rf"model.json: (field )?{field}"):
        cost.load(copied)


@pytest.mark.parametrize(("name", "value"), [("layers", "4"), ("layers", 0), ("heads", True), ("dtype", 32)])
def test_a_geometry_of_the_wrong_type_is_refused_by_name(copied: Path, name: str, value: Any) -> None:
    edit(copied, lambda card: card["geometry"].update({name: value}))
    with pytest.raises(ModelError, match=rf"model.json: field geometry: {name} is {value!r}"):
        cost.load(copied)
