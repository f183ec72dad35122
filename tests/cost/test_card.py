"""The card of a model: damaged and foreign fields are refused by file and field."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpolicy import cost
from kvpolicy.cost import ModelError, store
from kvpolicy.cost import card as card_module
from kvpolicy.cost.intervals import Intervals
from kvpolicy.training import train
from tests.cost.model_folders import edit
from tests.synthetic import make_trace, options_for, situation

ROOT = Path(__file__).resolve().parents[2]


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


WRONG: tuple[Any, ...] = (None, True, -1, 0.5, "x", [], [None], [[]], {}, {"a": None})


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in a card; of long lists only that of the first element."""
    entries: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        entries = enumerate(value[:1])
    for key, inner in entries:
        yield (*path, key)
        yield from paths(inner, (*path, key))


def test_whatever_stands_where_in_a_card_it_is_read_or_refused(tmp_path: Path) -> None:
    """No value of a damaged card comes to anything but a model or a ModelError that names the file."""
    make_trace(seed=1, states=40).write(tmp_path / "trace")
    train([tmp_path / "trace"], tmp_path / "mine", family="analytic")
    fields = json.loads((tmp_path / "mine" / "model.json").read_text())
    fields["step_time"] = json.loads((ROOT / "models" / "cpu-llama-native" / "model.json").read_text())["step_time"]
    refused = [outcome(tmp_path / "mine", fields, path, wrong) for path in paths(fields) for wrong in WRONG].count(True)
    assert refused > 500


def outcome(folder: Path, card: dict[str, Any], path: tuple[Any, ...], wrong: Any) -> bool:
    """Whether a card with another value at that path is refused by name; else it predicts."""
    damaged = json.loads(json.dumps(card))
    inner = damaged
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = wrong
    (folder / "model.json").write_text(json.dumps(damaged))
    try:
        model = cost.load(folder)
    except ModelError as error:
        named = str(error)
    else:
        return not model.predict(situation(), options_for(situation()))
    assert str(folder / "model.json") in named and str(path[0]) in named
    return True


@pytest.mark.parametrize("fault", [TypeError, KeyError, AttributeError, ValueError])
@pytest.mark.parametrize(
    ("owner", "method"),
    [(Intervals, "from_dict"), (card_module, "law_from_dict"), (card_module, "_floor"), (card_module, "_features")],
)
def test_a_fault_of_the_code_is_not_blamed_on_the_file(
    trained: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, fault: type[Exception]
) -> None:
    def broken(*_: Any) -> None:
        raise fault("a fault")

    monkeypatch.setattr(owner, method, broken)
    with pytest.raises(fault, match="a fault") as error:
        cost.load(trained)
    assert not isinstance(error.value, ModelError)
