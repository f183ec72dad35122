"""Model folders: what is written is what is read; the damaged and the foreign are refused by file and field."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
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
from tests.cost.model_folders import edit
from tests.synthetic import GEOMETRY, HARDWARE, NATIVE, CostLaw, make_trace, options_for, situation

ROOT = Path(__file__).resolve().parents[2]
ENGINE = EngineSpec(
    block_size=32,
    block_bytes=32 * GEOMETRY.kv_bytes_per_token,
    geometry=GEOMETRY.to_dict(),
    hardware=HARDWARE,
)


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


@pytest.mark.parametrize("file", ["model.json", "swap.txt"])
def test_missing_and_binary_files_are_refused_by_name(copied: Path, file: str) -> None:
    (copied / file).write_bytes(b"\xff\xfe\x00pickle")
    with pytest.raises(ModelError, match=rf"{file}: "):
        cost.load(copied)
    (copied / file).unlink()
    with pytest.raises(ModelError, match=rf"{file}: "):
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
        (
            {"geometry": replace(GEOMETRY, dtype="bfloat16", weight_bytes=2, kv_bytes=2).to_dict()},
            "geometry.dtype is 'bfloat16' here, it was measured on 'float32'",
        ),
        ({"geometry": replace(GEOMETRY, kv_bytes=1).to_dict()}, "geometry.kv_bytes is 1 here, it was measured on 4"),
        ({"block_bytes": 16 * GEOMETRY.kv_bytes_per_token}, "KV bytes per token"),
        ({"block_bytes": None}, "KV bytes per token is None here"),
        ({"geometry": {}}, "geometry.layers is None here"),
        (
            {"geometry": replace(GEOMETRY, window_layers=2, window_tokens=128).to_dict()},
            "geometry.window_layers is 2 here, it was measured on 0",
        ),
        ({"geometry": replace(GEOMETRY, state_layers=3).to_dict()}, "geometry.state_layers is 3 here"),
        ({"hardware": HARDWARE | {"device": "Tesla"}}, "device is 'Tesla' here"),
        ({"hardware": HARDWARE | {"processor": "another"}}, "processor is 'another' here"),
        ({"link": {"kind": "simulated", "bytes_per_s": 1e9, "latency_s": 0.0}}, "link is"),
    ],
)
def test_another_engine_is_refused_by_what_differs(trained: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        cost.load(trained).check_fit(replace(ENGINE, **change))


@pytest.mark.parametrize(("ranks", "words"), [(2, "0.5 times as many"), (4, "0.25 times as many")])
def test_another_number_of_ranks_is_refused_as_that(trained: Path, ranks: int, words: str) -> None:
    """The heads of a rank say how many there are: the same model over two of them has half as many on each."""
    whole = GEOMETRY
    split = replace(
        whole, heads=whole.heads // ranks, kv_heads=whole.kv_heads // ranks, intermediate=whole.intermediate // ranks
    )
    engine = replace(ENGINE, geometry=split.to_dict(), block_bytes=32 * split.kv_bytes_per_token, ranks=ranks)
    message = f"was measured with {words} tensor-parallel ranks .{whole.heads} heads each, here {split.heads}"
    with pytest.raises(ModelError, match=message):
        cost.load(trained).check_fit(engine)
    wider = replace(engine, geometry=replace(split, hidden=2 * whole.hidden).to_dict())
    with pytest.raises(ModelError, match=r"geometry\.hidden is"):
        cost.load(trained).check_fit(wider)


def test_a_model_of_windows_is_refused_where_there_are_none(trained: Path) -> None:
    model = cost.load(trained)
    windows = replace(GEOMETRY, window_layers=2, window_tokens=128)
    of_windows = replace(model, provenance=replace(model.provenance, geometry=windows))
    of_windows.check_fit(replace(ENGINE, geometry=windows.to_dict()))
    with pytest.raises(ModelError, match=r"geometry.window_layers is 0 here, it was measured on 2"):
        of_windows.check_fit(ENGINE)


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
    monkeypatch.setattr(store, "shelves", lambda kind: (shelf,))
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

    for where, what, how in ((store, "card_of", fails), (store, "_put_in_place", fails), (Path, "rename", None)):
        monkeypatch.setattr(where, what, how or fails_at_the_last)
        with pytest.raises(OSError, match="disk full"):
            store.save(changed, forests, folder)
        monkeypatch.undo()
        assert cost.load(folder).digest == digest
    store.save(changed, forests, folder)
    assert cost.load(folder).digest != digest
    assert sorted(one.name for one in folder.iterdir()) == ["model.json", "recompute.txt", "remarks.md", "swap.txt"]
    assert not [one for one in copied.iterdir() if one.name.startswith(".")]
