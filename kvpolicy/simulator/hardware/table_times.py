"""Hardware models made from measured tables: a folder with one JSON file, and the ``Times`` that it defines."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kvpolicy.arrays import Flags, Floats, Ints
from kvpolicy.cost import ModelWarning
from kvpolicy.cost.laws import Channel
from kvpolicy.errors import InputError, KVPolicyError
from kvpolicy.events import Direction
from kvpolicy.hardware import Geometry
from kvpolicy.hardware.engine_time import EngineTime
from kvpolicy.simulator.base import StepLoad
from kvpolicy.simulator.hardware.interpolation import TERMS, compiled
from kvpolicy.stored_values import is_number, list_at, number_at, object_at, read_json, text_at, value_at, whole_at

FILE = "hardware.json"
KIND = "kvpolicy hardware model"
SCHEMA_VERSION = 1
ALL_REDUCE = "vidur all-reduce"
"""Layout of the table that communication between ranks is taken from, among a model's inputs."""


class HardwareError(KVPolicyError):
    """An unusable hardware model; the message names file and field."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of a step's operators by number of tokens or sequences."""

    at: tuple[float, ...]
    seconds: tuple[float, ...]
    per_more_s: float
    """Seconds per token or sequence beyond the last point."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Seconds of a step's attention at every combination of axis values; flat, the last axis runs fastest."""

    axes: Mapping[str, tuple[float, ...]]
    seconds: tuple[float, ...]
    constants: tuple[float, ...]
    """Constants of :data:`~kvpolicy.simulator.hardware.interpolation.TERMS`, for extrapolation beyond the edges."""
    measured: float
    """Share of the points that were measured; a regressor fitted to measured points predicts the others."""
    unseen_error: float | None = None
    """The regressor's mean relative error on held-out measured points; None where there were too few."""


AXES: Mapping[str, tuple[str, ...]] = {
    "prefill": ("tokens", "context"),
    "decode": ("requests", "context"),
    "mixed": ("tokens", "context", "requests", "decode_context"),
}


@dataclass(frozen=True, slots=True)
class HardwareModel:
    """Times of steps and copies of one model on one device, in seconds."""

    device: str
    geometry: Mapping[str, Any]
    """Fields of one rank's :class:`kvpolicy.hardware.Geometry`."""
    ranks: int
    engine: EngineTime
    tokens: Curve
    """Operators that work token by token, over all layers: projections, MLP, norms, embedding."""
    sequences: Curve
    """The head and the sampler, by requests in the step."""
    prefill: Grid
    decode: Grid
    mixed: Grid | None
    """Chunks and decoding requests in one step; None: they take as long as apart."""
    copies: Channel
    copies_source: str
    inputs: tuple[Mapping[str, Any], ...]
    """The tables used: file, SHA-256, layout, rows, and what was taken from them."""
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def lacks_communication(self) -> str:
        """That steps are too short for want of communication between ranks, in words; empty where they are not."""
        if self.ranks == 1 or any(table.get("layout") == ALL_REDUCE for table in self.inputs):
            return ""
        return (
            f"no table of all-reduces of {self.ranks} ranks of {self.device}: steps are WITHOUT communication between "
            "ranks, and too short by it"
        )

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one KV block over all layers of one rank."""
        return block_size * Geometry.from_dict(self.geometry).kv_bytes_per_token

    def write(self, folder: Path) -> Path:
        """Write into ``folder``, which is created; an existing model is replaced."""
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / FILE
        head = {"kind": KIND, "schema_version": SCHEMA_VERSION, "digest": self.digest}
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in (head | asdict(self)).items()]
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        return file


def load_hardware(path: Path | str) -> TableTimes:
    """The ``Times`` in a folder that ``kvpolicy import-profile`` wrote. Raises :class:`HardwareError`.

    Warns where they are those of several ranks without their communication.
    """
    model = read_hardware(path)
    if model.lacks_communication:
        warnings.warn(f"hardware model {path}: {model.lacks_communication}", ModelWarning, stacklevel=2)
    return TableTimes(model)


def read_hardware(path: Path | str) -> HardwareModel:
    """Read a hardware model. Raises :class:`HardwareError`, naming file and field, for any other or a changed file."""
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    try:
        fields = read_json(file)
    except (OSError, InputError) as error:
        raise HardwareError(f"{file}: not a readable hardware model: {error}") from error
    if not isinstance(fields, dict) or fields.get("kind") != KIND:
        raise HardwareError(f"{file}: not a hardware model; `kvpolicy import-profile` makes one")
    if type(fields.get("schema_version")) is not int or fields["schema_version"] != SCHEMA_VERSION:
        raise HardwareError(f"{file}: schema_version is {fields.get('schema_version')!r}, should be {SCHEMA_VERSION}")
    try:
        model = _model(fields)
    except (HardwareError, InputError) as error:
        raise HardwareError(f"{file}: {error}") from error
    if model.digest != fields.get("digest"):
        raise HardwareError(f"{file}: its content is not that of its digest: changed by hand, or damaged")
    return model


def _model(fields: Mapping[str, Any]) -> HardwareModel:
    Geometry.from_dict(object_at(fields, "geometry"))
    copies = [value_at(fields, "copies", name) for name in COPIES]
    return HardwareModel(
        device=text_at(fields, "device"),
        geometry=dict(object_at(fields, "geometry")),
        ranks=whole_at(fields, "ranks"),
        engine=_engine(fields),
        tokens=_curve(fields, "tokens"),
        sequences=_curve(fields, "sequences"),
        prefill=_grid(fields, "prefill"),
        decode=_grid(fields, "decode"),
        mixed=None if value_at(fields, "mixed") is None else _grid(fields, "mixed"),
        copies=Channel(*_numbers("copies", copies)),
        copies_source=text_at(fields, "copies_source"),
        inputs=tuple(dict(object_at({"inputs": table}, "inputs")) for table in list_at(fields, "inputs")),
        notes=tuple(text_at({"notes": note}, "notes") for note in list_at(fields, "notes")),
    )


def _engine(fields: Mapping[str, Any]) -> EngineTime:
    constants = [value_at(fields, "engine", name) for name in ENGINE]
    per_step_s, per_chunk_step_s, uneven = _numbers("engine", constants)
    return EngineTime(per_step_s, per_chunk_step_s, uneven, text_at(fields, "engine", "source"))


ENGINE = ("per_step_s", "per_chunk_step_s", "uneven")
COPIES = ("latency_s", "s_per_byte", "s_per_segment")


def _numbers(name: str, values: list[Any]) -> tuple[float, ...]:
    for value in values:
        if not (is_number(value) and value >= 0):
            raise HardwareError(f"field {name} holds {value!r}, should hold finite numbers, 0 or above")
    return tuple(map(float, values))


def _numbers_at(fields: Mapping[str, Any], *path: str) -> tuple[float, ...]:
    return _numbers(".".join(path), list_at(fields, *path))


def _axis_at(fields: Mapping[str, Any], *path: str) -> tuple[float, ...]:
    axis = _numbers_at(fields, *path)
    if len(axis) < 2 or any(low >= high for low, high in pairwise(axis)):
        raise HardwareError(f"field {'.'.join(path)} should hold two rising numbers or more")
    return axis


def _curve(fields: Mapping[str, Any], name: str) -> Curve:
    at, seconds = _axis_at(fields, name, "at"), _numbers_at(fields, name, "seconds")
    if len(at) != len(seconds):
        raise HardwareError(f"field {name}.seconds holds {len(seconds)} numbers, should hold {len(at)}")
    return Curve(at, seconds, _numbers(f"{name}.per_more_s", [value_at(fields, name, "per_more_s")])[0])


def _grid(fields: Mapping[str, Any], name: str) -> Grid:
    axes = {axis: _axis_at(fields, name, "axes", axis) for axis in AXES[name]}
    seconds, points = _numbers_at(fields, name, "seconds"), 1
    for axis in axes.values():
        points *= len(axis)
    if len(seconds) != points or min(seconds) <= 0:
        raise HardwareError(f"field {name}.seconds should hold {points} times above 0, holds {len(seconds)} numbers")
    constants = _numbers_at(fields, name, "constants")
    if len(constants) != len(TERMS) or max(constants) <= 0:
        raise HardwareError(f"field {name}.constants should hold {len(TERMS)} numbers, not all of them 0")
    unseen = value_at(fields, name, "unseen_error")
    unseen_error = None if unseen is None else number_at(fields, name, "unseen_error")
    return Grid(axes, seconds, constants, number_at(fields, name, "measured"), unseen_error)


@dataclass(frozen=True)
class TableTimes:
    """Implements :class:`~kvpolicy.simulator.base.Times` by a :class:`HardwareModel`."""

    model: HardwareModel
    _data: Floats = field(init=False, repr=False, compare=False)
    _starts: Ints = field(init=False, repr=False, compare=False)
    _step: Callable[..., float] = field(init=False, repr=False, compare=False)
    _steps: Callable[..., None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        values = (*_packed(self.model), *compiled())
        for name, value in zip(("_data", "_starts", "_step", "_steps"), values, strict=True):
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[type[TableTimes], tuple[HardwareModel]]:
        """Pickle by the model alone: compiled functions cannot travel to other processes."""
        return TableTimes, (self.model,)

    @property
    def source(self) -> str:
        files = ", ".join(str(table["file"]) for table in self.model.inputs)
        lacks = f"; {self.model.lacks_communication}" if self.model.lacks_communication else ""
        return (
            f"steps: measured tables {files} ({self.model.device}){lacks}; engine's own time: "
            f"{self.model.engine.source}; copies not measured: {self.model.copies_source}"
        )

    def step_s(self, load: StepLoad) -> float:
        return self._step(self._data, self._starts, *load[:5])

    def steps_s(self, loads: Floats) -> Floats:
        rows = np.ascontiguousarray(loads, np.float64)
        seconds = np.empty(len(rows))
        self._steps(self._data, self._starts, rows, seconds)
        return seconds

    def copy_s(self, direction: Direction, copied_bytes: int, segments: int, segment_bytes: int) -> float:
        """The same in both directions."""
        return self.model.copies.seconds(copied_bytes, segments)

    def beyond(self, loads: Floats) -> Flags:
        """Which steps lie outside the tables, where times are extrapolated by physics. Rows as for ``steps_s``."""
        scheduled, decode, kv_read, pairs, prefills = np.asarray(loads, np.float64).T[:5]
        chunk = scheduled - decode
        context = np.where(chunk > 0, (pairs - chunk * (chunk + 1) / 2) / np.maximum(chunk, 1), 0.0)
        decode_context = np.where(decode > 0, kv_read / np.maximum(decode, 1), 0.0)
        outside = (scheduled > self.model.tokens.at[-1]) | (decode + prefills > self.model.sequences.at[-1])
        mixed_step = (chunk > 0) & (decode > 0)
        unmixed = np.ones_like(mixed_step)
        if self.model.mixed is not None:
            outside |= mixed_step & _outside(self.model.mixed, (chunk, context, decode, decode_context))
            unmixed = ~mixed_step
        outside |= unmixed & (chunk > 0) & _outside(self.model.prefill, (chunk, context))
        outside |= unmixed & (decode > 0) & _outside(self.model.decode, (decode, decode_context))
        return np.asarray(outside, np.bool_)


def _outside(grid: Grid, values: tuple[Floats, ...]) -> Flags:
    outside = np.zeros(len(values[0]), np.bool_)
    for axis, value in zip(grid.axes.values(), values, strict=True):
        outside |= (value < axis[0]) | (value > axis[-1])
    return outside


def _packed(model: HardwareModel) -> tuple[Floats, Ints]:
    """The concatenated :data:`~kvpolicy.simulator.hardware.interpolation.PARTS`, and where each begins."""
    mixed = model.mixed
    engine = model.engine
    parts = (
        model.tokens.at, model.tokens.seconds, model.sequences.at, model.sequences.seconds,
        *model.prefill.axes.values(), model.prefill.seconds, *model.decode.axes.values(), model.decode.seconds,
        *(mixed.axes.values() if mixed else ((),) * 4), mixed.seconds if mixed else (),
        (model.tokens.per_more_s,), (model.sequences.per_more_s,), model.prefill.constants, model.decode.constants,
        mixed.constants if mixed else (), (engine.per_step_s, engine.per_chunk_step_s, engine.uneven),
    )  # fmt: skip
    data = np.concatenate([np.array(values, np.float64) for values in parts])
    return data, np.cumsum([0, *map(len, parts)]).astype(np.int64)
