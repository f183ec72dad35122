"""Model folders: ``model.json`` and, for learned residuals, LightGBM's text. They hold data only, no code.

The fields of ``model.json`` are those of :mod:`kvpolicy.cost.card`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources.abc import Traversable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvpolicy.cost.card import CARD, an_object, card_of, guarded, model_of, parsed, texts
from kvpolicy.cost.forest import Forest, ForestError
from kvpolicy.cost.model import FittedModel, ModelError, ModelWarning
from kvpolicy.errors import InputError
from kvpolicy.events import KINDS, Kind
from kvpolicy.features import FEATURES
from kvpolicy.shelf import shelves
from kvpolicy.stored_values import MAX_JSON_BYTES, value_at


def load(name_or_folder: str | Path) -> FittedModel:
    """Load a model from its folder, or a shipped one by its name. A text with a slash is a folder.

    A folder that holds a model takes precedence over a shipped model of the same name, with a :class:`ModelWarning`.
    Raises :class:`ModelError`, naming file and field, for anything missing or invalid.
    """
    folder = _find(name_or_folder)
    text = _read(folder / CARD)
    values = parsed(folder, text)
    residuals, digests = _residuals(folder, values)
    digest = _sha256("".join([_sha256(text), *digests]))
    return replace(model_of(folder, values, residuals), name=str(name_or_folder), digest=digest)


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
    (folder / CARD).write_text(json.dumps(card_of(model, trees), indent=2, sort_keys=True, allow_nan=False) + "\n")


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
    folders = [folder for shelf in shelves("models") if shelf.is_dir() for folder in shelf.iterdir()]
    return tuple(sorted({folder.name for folder in folders if (folder / CARD).is_file()}))


def _find(name_or_folder: str | Path) -> Traversable:
    folder = Path(name_or_folder)
    shipped_folder = None
    if os.sep not in str(name_or_folder):
        shipped_folder = next(
            (shelf / folder.name for shelf in shelves("models") if (shelf / folder.name / CARD).is_file()), None
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
    """The text of one of the model's files. Raises ModelError, also for one that is not in its folder."""
    if isinstance(file, Path) and file.is_symlink() and file.resolve().parent != file.parent.resolve():
        raise ModelError(f"{file}: is a link out of the model's folder; a model holds its files itself")
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            raise ModelError(f"{file}: is larger than {MAX_JSON_BYTES:,} bytes, which no cost model is")
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}: cannot be read: {error}") from error


def _residuals(folder: Traversable, values: Mapping[str, Any]) -> tuple[dict[Kind, Forest], list[str]]:
    residuals: dict[Kind, Forest] = {}
    digests = []
    if "trees" not in values:
        raise ModelError(f"{folder / CARD}: field trees is missing")
    trees = guarded(folder, "trees.", lambda: an_object(values["trees"]))
    for kind in trees:
        if kind not in KINDS:
            raise ModelError(f"{folder / CARD}: field trees.{kind}: trees are of {' and '.join(KINDS)}")
    for kind in KINDS:
        if kind not in trees:
            continue
        where = f"trees.{kind}."
        name, expected_sha256, inputs = guarded(
            folder,
            where,
            lambda tree=trees[kind]: (
                value_at(tree, "file"),
                value_at(tree, "sha256"),
                texts(value_at(tree, "inputs")),
            ),
        )
        if name != f"{kind}.txt":
            raise ModelError(f"{folder / CARD}: field {where}file is {name!r}, should be '{kind}.txt'")
        text = _read(folder / name)
        digests.append(_sha256(text))
        if digests[-1] != expected_sha256:
            raise ModelError(f"{folder / name}: truncated or changed: its SHA-256 is not trees.{kind}.sha256")
        positions = guarded(folder, f"{where}inputs.", lambda names=inputs: [_position(name) for name in names])
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
