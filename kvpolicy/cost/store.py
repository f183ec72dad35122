"""Model folders: ``model.json`` and, for learned residuals, LightGBM's text. They hold data only, no code.

Users can edit these files, so every field is checked when it is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from importlib.resources.abc import Traversable
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvpolicy.attribution.step_time import StepTimeModel
from kvpolicy.cost.forest import Forest, ForestError
from kvpolicy.cost.intervals import Intervals
from kvpolicy.cost.laws import Law, LinearLaw, RecomputeRoofline, SwapRoofline, law_from_dict
from kvpolicy.cost.model import FittedModel, ModelError, ModelWarning, Provenance
from kvpolicy.errors import InputError
from kvpolicy.events import KINDS, Kind
from kvpolicy.features import FEATURES
from kvpolicy.hardware import Geometry
from kvpolicy.stored_values import FieldMissing, value_at

SCHEMA_VERSION = 3
CARD = "model.json"


def load(name_or_folder: str | Path) -> FittedModel:
    """Load a model from its folder, or a shipped one by its name. A text with a slash is a folder.

    A folder that holds a model takes precedence over a shipped model of the same name, with a :class:`ModelWarning`.
    Raises :class:`ModelError`, naming file and field, for anything missing or invalid.
    """
    folder = _find(name_or_folder)
    text = _read(folder / CARD)
    values = _parsed(folder, text)
    residuals, digests = _residuals(folder, values)
    digest = _sha256("".join([_sha256(text), *digests]))
    return replace(_model(folder, values, residuals), name=str(name_or_folder), digest=digest)


@dataclass(frozen=True, slots=True)
class ForestText:
    """A stored forest."""

    text: str
    """LightGBM's text format."""
    inputs: tuple[str, ...]
    """Feature names by the forest's feature number."""


def holds_model(folder: Path) -> bool:
    """Whether :func:`save` would replace a model. Raises FileExistsError if it would refuse to write."""
    if (folder / CARD).is_file():
        return True
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder}: is there, and is no cost model; give a new folder")
    return False


def save(model: FittedModel, forests: Mapping[Kind, ForestText], folder: Path) -> None:
    """Write a model folder atomically: to a folder beside it, which is renamed when it is complete.

    ``forests``: the text of ``model.residuals``. An existing model is replaced; other files in its folder stay. Raises
    FileExistsError if the folder holds anything but a model. On any failure the previous content remains.
    """
    holds_model(folder)
    place = folder.resolve()
    place.parent.mkdir(parents=True, exist_ok=True)
    scratch = place.parent / f".{place.name}.new-{os.getpid()}"
    try:
        if place.exists():
            model_files = (CARD, *(f"{kind}.txt" for kind in KINDS))
            shutil.copytree(
                place, scratch, symlinks=True, ignore=lambda source, _: model_files if source == str(place) else ()
            )
        else:
            scratch.mkdir()
        _write(model, forests, scratch)
        _put_in_place(scratch, place)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def round_trip(model: FittedModel, forests: Mapping[Kind, ForestText], out: Path | str | None) -> FittedModel:
    """The model as it is read back after saving it to ``out``, or to a temporary folder if that is None."""
    if out is not None:
        save(model, forests, Path(out))
        return load(Path(out))
    with TemporaryDirectory() as scratch:
        save(model, forests, Path(scratch) / "model")
        loaded = load(Path(scratch) / "model")
    return replace(loaded, name=f"{model.provenance.family.partition('@')[0]}@{loaded.digest[:12]}")


def _write(model: FittedModel, forests: Mapping[Kind, ForestText], folder: Path) -> None:
    trees = {}
    for kind, forest in forests.items():
        file = f"{kind}.txt"
        (folder / file).write_text(forest.text)
        trees[kind] = {"file": file, "sha256": _sha256(forest.text), "inputs": list(forest.inputs)}
    (folder / CARD).write_text(json.dumps(_card(model, trees), indent=2, sort_keys=True, allow_nan=False) + "\n")


def _put_in_place(scratch: Path, place: Path) -> None:
    """Rename ``scratch`` to ``place``. The previous folder is removed only afterwards, and restored on failure."""
    if not place.exists():
        scratch.rename(place)
        return
    aside = place.parent / f".{place.name}.old-{os.getpid()}"
    place.rename(aside)
    try:
        scratch.rename(place)
    except OSError:
        aside.rename(place)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def forest_texts(model: FittedModel) -> dict[Kind, ForestText]:
    """The model's forests as stored. Raises ModelError for a forest that was not read from a text."""
    for kind, forest in model.residuals.items():
        if not forest.text:
            raise ModelError(
                f"cost model {model.name}: its residual of {kind} has no text: it was not fitted or loaded"
            )
    return {
        kind: ForestText(forest.text, tuple(FEATURES[position] for position in forest.positions))
        for kind, forest in model.residuals.items()
    }


def forest_of(stored: ForestText) -> Forest:
    """The forest of a stored text."""
    return Forest.from_text(stored.text, [FEATURES.index(name) for name in stored.inputs])


def shipped() -> tuple[str, ...]:
    """Names of the shipped models."""
    shelves = [shelf for shelf in _shelves() if shelf.is_dir()]
    return tuple(sorted({folder.name for shelf in shelves for folder in shelf.iterdir() if (folder / CARD).is_file()}))


def _shelves() -> tuple[Traversable, ...]:
    """Folders of shipped models: in an installed package, or in the checkout of this file."""
    package = resources.files("kvpolicy")
    return package / "shipped" / "models", Path(__file__).resolve().parents[2] / "models"


def _find(name_or_folder: str | Path) -> Traversable:
    folder = Path(name_or_folder)
    shipped_folder = None
    if os.sep not in str(name_or_folder):
        shipped_folder = next(
            (shelf / folder.name for shelf in _shelves() if (shelf / folder.name / CARD).is_file()), None
        )
    if (folder / CARD).is_file():
        # A Path means a folder; a bare name may mean either.
        if (
            shipped_folder is not None
            and isinstance(name_or_folder, str)
            and str(shipped_folder) != str(folder.resolve())
        ):
            warnings.warn(
                f"cost model {folder}: the folder {folder.resolve()} is used, not the model that ships under this name",
                ModelWarning,
                stacklevel=3,
            )
        return folder
    if shipped_folder is not None:
        return shipped_folder
    if folder.is_dir():
        return folder
    names = ", ".join(shipped()) or "none"
    raise ModelError(f"{name_or_folder}: no such folder, and no cost model of that name ships (those that do: {names})")


def _read(file: Traversable) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}: cannot be read: {error}") from error


def _parsed(folder: Traversable, text: str) -> dict[str, Any]:
    file = folder / CARD
    try:
        values = loads(text)
    except ValueError as error:
        raise ModelError(f"{file}: truncated, or not JSON as it should be: {error}") from error
    if not isinstance(values, dict) or "schema_version" not in values:
        raise ModelError(f"{file}: field schema_version is missing: not a kvpolicy cost model")
    if type(values["schema_version"]) is not int or values["schema_version"] != SCHEMA_VERSION:
        version = values["schema_version"]
        raise ModelError(
            f"{file}: schema_version is {version!r}, this kvpolicy reads {SCHEMA_VERSION}; "
            "make the model again with `kvpolicy train`"
        )
    return values


def _guarded(folder: Traversable, where: str, build: Any) -> Any:
    """The result of ``build``; what it finds wrong with a value becomes a ModelError that names file and field.

    Any other error is a fault of the code, not of the file.
    """
    try:
        return build()
    except FieldMissing as error:
        raise ModelError(f"{folder / CARD}: field {where}{error.field} is missing") from error
    except InputError as error:
        raise ModelError(f"{folder / CARD}: {'field ' + where.rstrip('.') + ': ' if where else ''}{error}") from error


def _model(folder: Traversable, values: Mapping[str, Any], residuals: Mapping[Kind, Forest]) -> FittedModel:
    for name in (*_PROVENANCE, "features", "laws", "ranges", "intervals", "victim_delays", "step_time"):
        _guarded(folder, "", lambda name=name: value_at(values, name))
    _guarded(folder, "features.", lambda: _features(values["features"]))
    laws = _laws(folder, "laws", values["laws"])
    ranges = {
        kind: {name: _range(folder, values, kind, name) for name in FEATURES}
        for kind in KINDS
    }  # fmt: skip
    return FittedModel(
        name=folder.name,
        provenance=_provenance(folder, values),
        laws=laws,
        residuals=residuals,
        ranges=ranges,
        floor_s={kind: _floor(folder, values, kind) for kind in KINDS},
        intervals=_guarded(folder, "intervals.", lambda: Intervals.from_dict(values["intervals"])),
        victim_delays=_victim_delays(folder, values),
        others_share={kind: _share(folder, values, kind) for kind in KINDS},
        step_time=_step_time(folder, values),
        carried={kind: _carried(folder, values, kind) for kind in KINDS},
    )


def _victim_delays(folder: Traversable, values: Mapping[str, Any]) -> dict[Kind, Law]:
    """Laws of both options, or of none."""
    delays = values["victim_delays"]
    if delays == {}:
        return {}
    return _laws(folder, "victim_delays", delays)


LAWS: Mapping[Kind, tuple[type[Law], ...]] = {
    "recompute": (RecomputeRoofline, LinearLaw), "swap": (SwapRoofline, LinearLaw),
}  # fmt: skip
"""Allowed laws. The other option's roofline would read features that are 0 here and predict almost no cost."""


def _laws(folder: Traversable, where: str, cards: Any) -> dict[Kind, Law]:
    laws = {}
    for kind in KINDS:
        card = _guarded(folder, f"{where}.", lambda kind=kind: value_at(cards, kind))
        law = _guarded(folder, f"{where}.{kind}.", lambda card=card: law_from_dict(card))
        if not isinstance(law, LAWS[kind]):
            raise ModelError(
                f"{folder / CARD}: field {where}.{kind}.law is {card['law']!r}, should be {kind}_roofline or linear"
            )
        laws[kind] = law
    return laws


def _share(folder: Traversable, values: Mapping[str, Any], kind: Kind) -> float:
    value = _guarded(folder, "", lambda: value_at(values, "others_share", kind))
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ModelError(f"{folder / CARD}: field others_share.{kind} is {value!r}, should be a number, 0 or above")
    return float(value)


def _carried(folder: Traversable, values: Mapping[str, Any], kind: Kind) -> bool:
    value = _guarded(folder, "", lambda: value_at(values, "carried", kind))
    if not isinstance(value, bool):
        raise ModelError(f"{folder / CARD}: field carried.{kind} is {value!r}, should be true or false")
    return value


def _step_time(folder: Traversable, values: Mapping[str, Any]) -> StepTimeModel | None:
    card = values["step_time"]
    return None if card is None else _guarded(folder, "step_time.", lambda: StepTimeModel.from_dict(card))


def _features(value: Any) -> tuple[str, ...]:
    if value != list(FEATURES):
        raise InputError(f"{value!r}, this kvpolicy computes {list(FEATURES)}")
    return FEATURES


def _range(folder: Traversable, values: Mapping[str, Any], kind: Kind, name: str) -> tuple[float, float]:
    where = f"ranges.{kind}.{name}"
    span = _guarded(folder, "", lambda: value_at(values, "ranges", kind, name))
    numbers = isinstance(span, list) and len(span) == 2 and all(type(value) in (int, float) for value in span)
    if not numbers or not 0 <= span[0] <= span[1] < float("inf"):
        raise ModelError(f"{folder / CARD}: field {where} is {span!r}, should be [lowest, highest]")
    return float(span[0]), float(span[1])


def _floor(folder: Traversable, values: Mapping[str, Any], kind: Kind) -> float:
    value = _guarded(folder, "", lambda: value_at(values, "noise", "floor_s", kind))
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ModelError(f"{folder / CARD}: field noise.floor_s.{kind} is {value!r}, should be a number above 0")
    return float(value)


def _fields(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"is {value!r}, should be an object")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise InputError(f"is {value!r}, should be a list of texts")
    return tuple(value)


def _nonempty_texts(value: Any) -> tuple[str, ...]:
    if not value:
        raise InputError(f"is {value!r}, should be a list of at least one text")
    return _texts(value)


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(size) is int and size > 0 for size in value):
        raise InputError(f"is {value!r}, should be a list of whole numbers above 0")
    return tuple(value)


def _above_zero(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise InputError(f"is {value!r}, should be a number above 0")
    return float(value)


def _geometry(value: Any) -> Geometry:
    geometry = Geometry.from_dict(_fields(value))
    for name, entry in geometry.to_dict().items():
        if entry == 0:
            raise InputError(f"{name} is {entry!r}, should be a whole number above 0")
    return geometry


def _name(value: Any) -> str:
    """Name of a family. Any text is valid, because models are not loaded by it."""
    if not isinstance(value, str) or not value:
        raise InputError(f"is {value!r}, should be a name")
    return value


_PROVENANCE: Mapping[str, Callable[[Any], Any]] = {
    "family": _name,
    "hardware": _fields,
    "geometry": _geometry,
    "link": _fields,
    "block_sizes": _sizes,
    "kv_bytes_per_token": _above_zero,
    "trace_digests": _texts,
    "state_ids": _nonempty_texts,
    "noise": _fields,
    "held_out": _fields,
    "notes": _texts,
}
"""Reader of each provenance field of the card."""


def _provenance(folder: Traversable, values: Mapping[str, Any]) -> Provenance:
    fields = {}
    for name, read in _PROVENANCE.items():
        value = values[name]
        fields[name] = _guarded(folder, f"{name}.", lambda read=read, value=value: read(value))
    return Provenance(**fields)


def _residuals(folder: Traversable, values: Mapping[str, Any]) -> tuple[dict[Kind, Forest], list[str]]:
    residuals: dict[Kind, Forest] = {}
    digests = []
    if "trees" not in values:
        raise ModelError(f"{folder / CARD}: field trees is missing")
    trees = _guarded(folder, "trees.", lambda: _fields(values["trees"]))
    for kind in trees:
        if kind not in KINDS:
            raise ModelError(f"{folder / CARD}: field trees.{kind}: trees are of {' and '.join(KINDS)}")
    for kind in KINDS:
        if kind not in trees:
            continue
        where = f"trees.{kind}."
        name, expected_sha256, inputs = _guarded(
            folder,
            where,
            lambda tree=trees[kind]: (
                value_at(tree, "file"),
                value_at(tree, "sha256"),
                _texts(value_at(tree, "inputs")),
            ),
        )
        if name != f"{kind}.txt":
            raise ModelError(f"{folder / CARD}: field {where}file is {name!r}, should be '{kind}.txt'")
        text = _read(folder / name)
        digests.append(_sha256(text))
        if digests[-1] != expected_sha256:
            raise ModelError(f"{folder / name}: truncated or changed: its SHA-256 is not trees.{kind}.sha256")
        positions = _guarded(folder, f"{where}inputs.", lambda names=inputs: [_position(name) for name in names])
        try:
            residuals[kind] = Forest.from_text(text, positions)
        except ForestError as error:
            raise ModelError(f"{folder / name}: {error}") from error
    return residuals, digests


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _position(name: str) -> int:
    if name not in FEATURES:
        raise InputError(f"there is no feature {name!r}")
    return FEATURES.index(name)


def _card(model: FittedModel, trees: Mapping[Kind, Any]) -> dict[str, Any]:
    provenance = model.provenance
    return {
        "schema_version": SCHEMA_VERSION,
        "family": provenance.family,
        "features": list(FEATURES),
        "ranges": {kind: {name: list(span) for name, span in model.ranges[kind].items()} for kind in KINDS},
        "laws": {kind: model.laws[kind].to_dict() for kind in KINDS},
        "trees": dict(trees),
        "carried": dict(model.carried),
        "intervals": model.intervals.to_dict(),
        "victim_delays": {kind: law.to_dict() for kind, law in model.victim_delays.items()},
        "others_share": dict(model.others_share),
        "step_time": None if model.step_time is None else model.step_time.to_dict(),
        "noise": dict(provenance.noise) | {"floor_s": dict(model.floor_s)},
        "hardware": dict(provenance.hardware),
        "geometry": provenance.geometry.to_dict(),
        "link": dict(provenance.link),
        "block_sizes": list(provenance.block_sizes),
        "kv_bytes_per_token": provenance.kv_bytes_per_token,
        "trace_digests": list(provenance.trace_digests),
        "state_ids": list(provenance.state_ids),
        "held_out": dict(provenance.held_out),
        "notes": list(provenance.notes),
    }


MAX_INTEGER = 2**53
"""Larger integers are not exact as floats."""
SHOWN = 24


def loads(text: str) -> Any:
    """Like ``json.loads``, with its errors; raises InputError for any NaN, infinite or too large number.

    The error names the field by its dotted path.
    """
    value = json.loads(text)
    for field, number in _numbers(value, ""):
        if isinstance(number, float) and not isfinite(number):
            raise InputError(f"field {field} is {number!r}, which is no number")
        if abs(number) > MAX_INTEGER and isinstance(number, int):
            raise InputError(f"field {field} is {str(number)[:SHOWN]}..., a whole number too large")
    return value


def _numbers(value: Any, field: str) -> Iterator[tuple[str, int | float]]:
    if isinstance(value, int | float):
        yield field, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, f"{field}.{name}" if field else name)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, field)
