"""The card of a cost model, ``model.json``: its fields as a model, and a model as its fields.

Users can edit the file, so every field is checked when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.resources.abc import Traversable
from math import isfinite
from typing import Any

from kvpolicy.attribution.step_time import StepTimeModel
from kvpolicy.cost.forest import Forest
from kvpolicy.cost.intervals import Intervals
from kvpolicy.cost.laws import Law, LinearLaw, RecomputeRoofline, SwapRoofline, law_from_dict
from kvpolicy.cost.model import FittedModel, ModelError, Provenance
from kvpolicy.errors import InputError
from kvpolicy.events import KINDS, Kind
from kvpolicy.features import FEATURES
from kvpolicy.hardware import Geometry
from kvpolicy.stored_values import FieldMissing, json_of, value_at

CARD = "model.json"
SCHEMA_VERSION = 3


def parsed(folder: Traversable, text: str) -> dict[str, Any]:
    """The card's fields. Raises ModelError for text that is no card of this version."""
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


def guarded(folder: Traversable, where: str, build: Any) -> Any:
    """The result of ``build``; what it finds wrong with a value becomes a ModelError that names file and field.

    Any other error is a fault of the code, not of the file.
    """
    try:
        return build()
    except FieldMissing as error:
        raise ModelError(f"{folder / CARD}: field {where}{error.field} is missing") from error
    except InputError as error:
        raise ModelError(f"{folder / CARD}: {'field ' + where.rstrip('.') + ': ' if where else ''}{error}") from error


def model_of(folder: Traversable, values: Mapping[str, Any], residuals: Mapping[Kind, Forest]) -> FittedModel:
    """The model of a card's fields. Raises ModelError, naming file and field, for anything missing or invalid."""
    for name in (*_PROVENANCE, "features", "laws", "ranges", "intervals", "victim_delays", "step_time"):
        guarded(folder, "", lambda name=name: value_at(values, name))
    guarded(folder, "features.", lambda: _features(values["features"]))
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
        intervals=guarded(folder, "intervals.", lambda: Intervals.from_dict(values["intervals"])),
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
        card = guarded(folder, f"{where}.", lambda kind=kind: value_at(cards, kind))
        law = guarded(folder, f"{where}.{kind}.", lambda card=card: law_from_dict(card))
        if not isinstance(law, LAWS[kind]):
            raise ModelError(
                f"{folder / CARD}: field {where}.{kind}.law is {card['law']!r}, should be {kind}_roofline or linear"
            )
        laws[kind] = law
    return laws


def _share(folder: Traversable, values: Mapping[str, Any], kind: Kind) -> float:
    value = guarded(folder, "", lambda: value_at(values, "others_share", kind))
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ModelError(f"{folder / CARD}: field others_share.{kind} is {value!r}, should be a number, 0 or above")
    return float(value)


def _carried(folder: Traversable, values: Mapping[str, Any], kind: Kind) -> bool:
    value = guarded(folder, "", lambda: value_at(values, "carried", kind))
    if not isinstance(value, bool):
        raise ModelError(f"{folder / CARD}: field carried.{kind} is {value!r}, should be true or false")
    return value


def _step_time(folder: Traversable, values: Mapping[str, Any]) -> StepTimeModel | None:
    card = values["step_time"]
    return None if card is None else guarded(folder, "step_time.", lambda: StepTimeModel.from_dict(card))


def _features(value: Any) -> tuple[str, ...]:
    if value != list(FEATURES):
        raise InputError(f"{value!r}, this kvpolicy computes {list(FEATURES)}")
    return FEATURES


def _range(folder: Traversable, values: Mapping[str, Any], kind: Kind, name: str) -> tuple[float, float]:
    where = f"ranges.{kind}.{name}"
    span = guarded(folder, "", lambda: value_at(values, "ranges", kind, name))
    numbers = isinstance(span, list) and len(span) == 2 and all(type(value) in (int, float) for value in span)
    if not numbers or not 0 <= span[0] <= span[1] < float("inf"):
        raise ModelError(f"{folder / CARD}: field {where} is {span!r}, should be [lowest, highest]")
    return float(span[0]), float(span[1])


def _floor(folder: Traversable, values: Mapping[str, Any], kind: Kind) -> float:
    value = guarded(folder, "", lambda: value_at(values, "noise", "floor_s", kind))
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ModelError(f"{folder / CARD}: field noise.floor_s.{kind} is {value!r}, should be a number above 0")
    return float(value)


def an_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"is {value!r}, should be an object")
    return value


def texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise InputError(f"is {value!r}, should be a list of texts")
    return tuple(value)


def _nonempty_texts(value: Any) -> tuple[str, ...]:
    if not value:
        raise InputError(f"is {value!r}, should be a list of at least one text")
    return texts(value)


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(size) is int and size > 0 for size in value):
        raise InputError(f"is {value!r}, should be a list of whole numbers above 0")
    return tuple(value)


def _above_zero(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise InputError(f"is {value!r}, should be a number above 0")
    return float(value)


def _geometry(value: Any) -> Geometry:
    geometry = Geometry.from_dict(an_object(value))
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
    "hardware": an_object,
    "geometry": _geometry,
    "link": an_object,
    "block_sizes": _sizes,
    "kv_bytes_per_token": _above_zero,
    "trace_digests": texts,
    "state_ids": _nonempty_texts,
    "noise": an_object,
    "held_out": an_object,
    "notes": texts,
}
"""Reader of each provenance field of the card."""


def _provenance(folder: Traversable, values: Mapping[str, Any]) -> Provenance:
    fields = {}
    for name, read in _PROVENANCE.items():
        value = values[name]
        fields[name] = guarded(folder, f"{name}.", lambda read=read, value=value: read(value))
    return Provenance(**fields, pinned=_pinned(folder, values))


def _pinned(folder: Traversable, values: Mapping[str, Any]) -> bool | None:
    """None, which means unknown, for cards of versions that did not write the field."""
    value = values.get("pinned")
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{folder / CARD}: field pinned is {value!r}, should be true, false or null")
    return value


def card_of(model: FittedModel, trees: Mapping[Kind, Any]) -> dict[str, Any]:
    """The card's fields for a model. ``trees``: file, SHA-256 and inputs of each stored forest."""
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
        "pinned": provenance.pinned,
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
    """The value of a JSON text. Raises InputError where it is none, and for any NaN, infinite or too large number.

    The error names the field by its dotted path.
    """
    value = json_of(text)
    try:
        numbers = list(_numbers(value, ""))
    except RecursionError:
        raise InputError("is nested too deeply to be read") from None
    for field, number in numbers:
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
