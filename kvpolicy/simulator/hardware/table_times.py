"""A hardware model made of measured tables: a folder with one JSON file, and the ``Times`` it stands for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kvpolicy.arrays import Flags, Floats, Ints
from kvpolicy.cost.laws import Channel
from kvpolicy.errors import KVPolicyError
from kvpolicy.events import Direction
from kvpolicy.hardware import Geometry
from kvpolicy.hardware.engine_time import EngineTime
from kvpolicy.simulator.base import StepLoad
from kvpolicy.simulator.hardware.interpolation import TERMS, compiled

FILE = "hardware.json"
KIND = "kvpolicy hardware model"
SCHEMA_VERSION = 1


class HardwareError(KVPolicyError):
    """A hardware model that cannot be used; the message names file and field."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of a step's operators by a count of tokens or sequences."""

    at: tuple[float, ...]
    seconds: tuple[float, ...]
    per_more_s: float
    """Per token or sequence beyond the last."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Seconds of a step's attention at every combination of its axes; flat, the last axis runs fastest."""

    axes: Mapping[str, tuple[float, ...]]
    seconds: tuple[float, ...]
    constants: tuple[float, ...]
    """Of :data:`~kvpolicy.simulator.hardware.interpolation.TERMS`: by these it goes on beyond its edges."""
    measured: float
    """Share of its points that were measured; a regressor fitted to those that were told the others."""
    unseen_error: float | None = None
    """That regressor's mean relative error on measured points that it had not seen; None where there were too few."""


AXES: Mapping[str, tuple[str, ...]] = {
    "prefill": ("tokens", "context"),
    "decode": ("requests", "context"),
    "mixed": ("tokens", "context", "requests", "decode_context"),
}


@dataclass(frozen=True, slots=True)
class HardwareModel:
    """What a step of one model on one device takes, and what its copies take, in seconds."""

    device: str
    geometry: Mapping[str, Any]
    """Of one rank, as :class:`kvpolicy.hardware.Geometry`."""
    ranks: int
    engine: EngineTime
    tokens: Curve
    """All that works token by token, over all layers: projections, MLP, norms, embedding."""
    sequences: Curve
    """The head and the sampler, by requests in the step."""
    prefill: Grid
    decode: Grid
    mixed: Grid | None
    """Chunks and decoding requests in one step; None: they take as long as apart."""
    copies: Channel
    copies_source: str
    inputs: tuple[Mapping[str, Any], ...]
    """The tables: file, SHA-256, layout, rows, what they told."""
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def block_bytes(self, block_size: int) -> int:
        """Of one KV block over all layers of one rank."""
        return block_size * Geometry(**self.geometry).kv_bytes_per_token

    def write(self, folder: Path) -> Path:
        """Into ``folder``, which is made; a model that is there is replaced."""
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / FILE
        head = {"kind": KIND, "schema_version": SCHEMA_VERSION, "digest": self.digest}
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in (head | asdict(self)).items()]
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        return file


def load_hardware(path: Path | str) -> TableTimes:
    """The ``Times`` in a folder that ``kvpolicy import-profile`` wrote. Raises :class:`HardwareError`."""
    return TableTimes(read_hardware(path))


def read_hardware(path: Path | str) -> HardwareModel:
    """Raises :class:`HardwareError` naming file and field for what is no hardware model, or was changed."""
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HardwareError(f"{file}: not a readable hardware model: {error}") from error
    if not isinstance(told, dict) or told.get("kind") != KIND:
        raise HardwareError(f"{file}: not a hardware model; `kvpolicy import-profile` makes one")
    if told.get("schema_version") != SCHEMA_VERSION:
        raise HardwareError(f"{file}: schema_version is {told.get('schema_version')!r}, should be {SCHEMA_VERSION}")
    try:
        model = _model(told)
    except HardwareError as error:
        raise HardwareError(f"{file}: {error}") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise HardwareError(f"{file}: a field is missing or of another type: {error}") from error
    if model.digest != told.get("digest"):
        raise HardwareError(f"{file}: its content is not that of its digest: changed by hand, or damaged")
    return model


def _model(told: Mapping[str, Any]) -> HardwareModel:
    mixed = told["mixed"]
    return HardwareModel(
        device=str(told["device"]),
        geometry=dict(told["geometry"]),
        ranks=int(told["ranks"]),
        engine=_engine(told["engine"]),
        tokens=_curve("tokens", told["tokens"]),
        sequences=_curve("sequences", told["sequences"]),
        prefill=_grid("prefill", told["prefill"]),
        decode=_grid("decode", told["decode"]),
        mixed=None if mixed is None else _grid("mixed", mixed),
        copies=Channel(*_numbers("copies", [told["copies"][name] for name in COPIES])),
        copies_source=str(told["copies_source"]),
        inputs=tuple(dict(one) for one in told["inputs"]),
        notes=tuple(map(str, told["notes"])),
    )


def _engine(told: Mapping[str, Any]) -> EngineTime:
    per_step_s, per_chunk_step_s, uneven = _numbers("engine", [told[name] for name in ENGINE])
    return EngineTime(per_step_s, per_chunk_step_s, uneven, str(told["source"]))


ENGINE = ("per_step_s", "per_chunk_step_s", "uneven")
COPIES = ("latency_s", "s_per_byte", "s_per_segment")


def _numbers(name: str, values: Any) -> tuple[float, ...]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise HardwareError(f"field {name} holds {value!r}, should hold finite numbers, 0 or above")
    return tuple(map(float, values))


def _axis(name: str, values: Any) -> tuple[float, ...]:
    axis = _numbers(name, values)
    if len(axis) < 2 or any(low >= high for low, high in pairwise(axis)):
        raise HardwareError(f"field {name} should hold two rising numbers or more")
    return axis


def _curve(name: str, told: Mapping[str, Any]) -> Curve:
    at, seconds = _axis(f"{name}.at", told["at"]), _numbers(f"{name}.seconds", told["seconds"])
    if len(at) != len(seconds):
        raise HardwareError(f"field {name}.seconds holds {len(seconds)} numbers, should hold {len(at)}")
    return Curve(at, seconds, _numbers(f"{name}.per_more_s", [told["per_more_s"]])[0])


def _grid(name: str, told: Mapping[str, Any]) -> Grid:
    axes = {axis: _axis(f"{name}.axes.{axis}", told["axes"][axis]) for axis in AXES[name]}
    seconds, points = _numbers(f"{name}.seconds", told["seconds"]), 1
    for axis in axes.values():
        points *= len(axis)
    if len(seconds) != points or min(seconds) <= 0:
        raise HardwareError(f"field {name}.seconds should hold {points} times above 0, holds {len(seconds)} numbers")
    constants = _numbers(f"{name}.constants", told["constants"])
    if len(constants) != len(TERMS) or max(constants) <= 0:
        raise HardwareError(f"field {name}.constants should hold {len(TERMS)} numbers, not all of them 0")
    error = told["unseen_error"]
    return Grid(axes, seconds, constants, float(told["measured"]), None if error is None else float(error))


@dataclass(frozen=True)
class TableTimes:
    """Implements :class:`~kvpolicy.simulator.base.Times` by a :class:`HardwareModel`."""

    model: HardwareModel
    _data: Floats = field(init=False, repr=False, compare=False)
    _starts: Ints = field(init=False, repr=False, compare=False)
    _step: Callable[..., float] = field(init=False, repr=False, compare=False)
    _steps: Callable[..., None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        made = (*_packed(self.model), *compiled())
        for name, value in zip(("_data", "_starts", "_step", "_steps"), made, strict=True):
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[type[TableTimes], tuple[HardwareModel]]:
        """Sweeps hand it to other processes."""
        return TableTimes, (self.model,)

    @property
    def source(self) -> str:
        files = ", ".join(str(one["file"]) for one in self.model.inputs)
        return (
            f"steps: measured tables {files} ({self.model.device}); engine's own time: {self.model.engine.source}; "
            f"copies not measured: {self.model.copies_source}"
        )

    def step_s(self, load: StepLoad) -> float:
        return self._step(self._data, self._starts, *load[:5])

    def steps_s(self, loads: Floats) -> Floats:
        rows = np.ascontiguousarray(loads, np.float64)
        found = np.empty(len(rows))
        self._steps(self._data, self._starts, rows, found)
        return found

    def copy_s(self, direction: Direction, copied_bytes: int, segments: int, segment_bytes: int) -> float:
        """Alike in both directions."""
        return self.model.copies.seconds(copied_bytes, segments)

    def beyond(self, loads: Floats) -> Flags:
        """Which of these steps lie beyond what the tables hold, where physics alone goes on. Rows as ``steps_s``."""
        scheduled, decode, kv_read, pairs, prefills = np.asarray(loads, np.float64).T[:5]
        chunk = scheduled - decode
        context = np.where(chunk > 0, (pairs - chunk * (chunk + 1) / 2) / np.maximum(chunk, 1), 0.0)
        each = np.where(decode > 0, kv_read / np.maximum(decode, 1), 0.0)
        out = (scheduled > self.model.tokens.at[-1]) | (decode + prefills > self.model.sequences.at[-1])
        both = (chunk > 0) & (decode > 0)
        apart = np.ones_like(both)
        if self.model.mixed is not None:
            out |= both & _outside(self.model.mixed, (chunk, context, decode, each))
            apart = ~both
        out |= apart & (chunk > 0) & _outside(self.model.prefill, (chunk, context))
        out |= apart & (decode > 0) & _outside(self.model.decode, (decode, each))
        return np.asarray(out, np.bool_)


def _outside(grid: Grid, values: tuple[Floats, ...]) -> Flags:
    found = np.zeros(len(values[0]), np.bool_)
    for axis, value in zip(grid.axes.values(), values, strict=True):
        found |= (value < axis[0]) | (value > axis[-1])
    return found


def _packed(model: HardwareModel) -> tuple[Floats, Ints]:
    """The parts of :data:`~kvpolicy.simulator.hardware.interpolation.PARTS`, one after the other, and where each
    begins.
    """
    mixed = model.mixed
    engine = model.engine
    parts = (
        model.tokens.at, model.tokens.seconds, model.sequences.at, model.sequences.seconds,
        *model.prefill.axes.values(), model.prefill.seconds, *model.decode.axes.values(), model.decode.seconds,
        *(mixed.axes.values() if mixed else ((),) * 4), mixed.seconds if mixed else (),
        (model.tokens.per_more_s,), (model.sequences.per_more_s,), model.prefill.constants, model.decode.constants,
        mixed.constants if mixed else (), (engine.per_step_s, engine.per_chunk_step_s, engine.uneven),
    )  # fmt: skip
    data = np.concatenate([np.array(one, np.float64) for one in parts])
    return data, np.cumsum([0, *map(len, parts)]).astype(np.int64)
