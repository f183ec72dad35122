"""Machines, as named by ``--hardware``: times of steps and copies, and the size of a KV block; and the simulated link
that ``--link`` puts in place of the hardware's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvpolicy import cost
from kvpolicy.arrays import Floats
from kvpolicy.cost import FittedModel
from kvpolicy.events import Direction
from kvpolicy.fields import WrongValue
from kvpolicy.hardware import EngineSpec, Geometry
from kvpolicy.hardware.link import SimulatedLink, header_link
from kvpolicy.hardware.sheets import known_sheet
from kvpolicy.simulator import StepLoad, Times
from kvpolicy.simulator.hardware.law_times import law_times
from kvpolicy.simulator.hardware.table_times import FILE, HardwareModel, TableTimes, load_hardware
from kvpolicy.stored_values import read_json
from kvpolicy.study.cache import path_digest
from kvpolicy.study.config import HARDWARE_FORMS
from kvpolicy.study.inputs import HardwareObject, Named, hardware_named

MAX_CACHED = 16
"""Machines that a process keeps open."""
PROBE_BYTES = 2**28
"""Bytes of the copy by which a link's bandwidth is determined: enough for its latency not to matter."""


@dataclass(frozen=True, eq=False)
class Machine:
    """A device with a model on it."""

    times: Times
    geometry: Geometry
    kv_bytes_per_token: float
    hardware: Mapping[str, Any]
    """As in a trace's header: ``device`` at least."""
    digest: str
    model_loader: Callable[[EngineSpec], Callable[[str], FittedModel]]
    """Makes a loader of cost models by name, as a server on this machine has: ``analytic`` is its own."""
    own_model: str | None
    """Name of a cost model for this machine; None without one."""
    link: Mapping[str, Any] = field(default_factory=lambda: header_link(None))
    """As in a trace's header; for a cost model that was measured behind a simulated link, that link."""
    facts: tuple[str, ...] = ()
    """Where its constants come from."""
    unmeasured: tuple[str, ...] = ()
    """What was not measured, in words."""
    piece_bytes_per_token: float | None = None
    """Contiguous bytes of a block per token, where they were measured."""

    def segment_bytes(self, block_size: int) -> int:
        """Contiguous bytes of a block: as measured, else one layer's page with keys and values together, as the
        plugin assumes and FlashAttention has it."""
        if self.piece_bytes_per_token is not None:
            return max(1, round(self.piece_bytes_per_token * block_size))
        return max(1, self.block_bytes(block_size) // self.geometry.layers)

    def block_bytes(self, block_size: int) -> int:
        return round(self.kv_bytes_per_token * block_size)

    @property
    def device(self) -> str:
        return str(self.hardware.get("device"))

    @property
    def waits_for_copies(self) -> bool:
        """Whether a step waits for the copies that it brings, as on a CPU, whose memory is the host's."""
        return self.device == "cpu" and self.link["kind"] == "native"

    def slowdown(self, times: Times) -> float:
        """Share by which a copy slows the steps beside it: its share of the device memory's bandwidth.

        0 where that bandwidth is unknown.
        """
        sheet = known_sheet(self.device)
        if sheet is None:
            return 0.0
        rate = PROBE_BYTES / times.copy_s("load", PROBE_BYTES, 1, PROBE_BYTES)
        return min(1.0, rate / sheet.memory_bytes_per_s)


def open_machine(hardware: str | HardwareObject) -> Machine:
    """The machine of that name or object. Raises KVPolicyError, naming file and field, where it cannot be opened."""
    return machine_named(hardware_named(hardware))


def machine_named(hardware: Named[HardwareObject]) -> Machine:
    """See :func:`open_machine`."""
    return _by_name(hardware.label) if hardware.value is None else _of_object(hardware)


@lru_cache(maxsize=MAX_CACHED)
def _of_object(hardware: Named[HardwareObject]) -> Machine:
    model = hardware.value
    assert model is not None
    if isinstance(model, HardwareModel):
        return _of_tables(TableTimes(model))

    def load(name: str) -> FittedModel:
        return model if name == hardware.label else cost.load(name)

    return replace(_of_model(model, hardware.label), digest=hardware.digest, model_loader=lambda engine: load)


def _by_name(spec: str) -> Machine:
    path = next((Path(text) for text in (spec, spec.partition(":")[2]) if text and Path(text).exists()), None)
    return _opened(spec, "" if path is None else path_digest(path))


@lru_cache(maxsize=MAX_CACHED)
def _opened(spec: str, digest: str) -> Machine:
    """``digest``: of the files it is read from, so that changed files are opened again."""
    if (Path(spec) / FILE).is_file() or Path(spec).name == FILE:
        return _of_tables(load_hardware(spec))
    if Path(spec).is_dir() or spec in cost.shipped():
        return _of_model(cost.load(spec), spec)
    place, colon, config = spec.partition(":")
    if not colon or not place or not config:
        raise WrongValue(
            "hardware", f"{spec!r}: should be {HARDWARE_FORMS}; shipped models: {', '.join(cost.shipped())}"
        )
    return _by_sheet(spec, config)


def _of_tables(times: TableTimes) -> Machine:
    geometry = Geometry.from_dict(times.model.geometry)
    known = known_sheet(times.model.device) is not None
    config = _config_of(geometry, times.model.ranks)
    return Machine(
        times=times,
        geometry=geometry,
        kv_bytes_per_token=float(geometry.kv_bytes_per_token),
        hardware={"device": times.model.device},
        digest=times.model.digest,
        model_loader=lambda engine: cost.engine_loader(config, replace(engine, ranks=times.model.ranks)),
        own_model=cost.ANALYTIC if known else None,
        facts=(times.source, *times.model.notes),
        unmeasured=(f"copies between host and device: {times.model.copies_source}",),
    )


def _of_model(model: FittedModel, name: str) -> Machine:
    """The machine of a cost model; ``name``: the model's name in its loader."""
    provenance = _with_one_table(model, name).provenance
    return Machine(
        times=law_times(model),
        geometry=provenance.geometry,
        kv_bytes_per_token=provenance.kv_bytes_per_token,
        hardware=provenance.hardware,
        digest=model.digest,
        model_loader=lambda engine: cost.load,
        own_model=name,
        link=provenance.link,
        piece_bytes_per_token=_piece_bytes_per_token(model),
        facts=(f"cost model {name}, trained on {provenance.hardware.get('device')}", *provenance.notes),
    )


def _with_one_table(model: FittedModel, name: str) -> FittedModel:
    """The model itself. Raises WrongValue where requests of its engine have several block tables."""
    provenance, geometry = model.provenance, model.provenance.geometry
    if geometry.state_layers or provenance.block_layers < geometry.attention_layers:
        raise WrongValue(
            "hardware",
            f"{name}: is of an LLM with {geometry.window_layers} layers with a window and {geometry.state_layers} that "
            "keep a state; a simulated engine has one block table, should be of an LLM all of whose layers keep every "
            "token",
        )
    return model


def _piece_bytes_per_token(model: FittedModel) -> float | None:
    """Contiguous bytes per token in the model's traces, where they agree; else None."""
    low, high = model.ranges["swap"].get("segment_bytes", (0.0, 0.0))
    sizes = model.provenance.block_sizes
    per_token = low / min(sizes)
    return per_token if per_token > 0 and per_token == high / max(sizes) else None


def _by_sheet(spec: str, config: str) -> Machine:
    model = _with_one_table(cost.load(f"{cost.ANALYTIC}:{spec}"), spec)
    provenance = model.provenance
    config_fields = read_json(_config_file(config))

    def by_sheet(engine: EngineSpec) -> Callable[[str], FittedModel]:
        load = cost.engine_loader(config_fields, engine)
        # In full, so that a named link is part of it.
        return lambda name: load(f"{cost.ANALYTIC}:{spec}" if name == cost.ANALYTIC else name)

    return Machine(
        times=law_times(model),
        geometry=provenance.geometry,
        kv_bytes_per_token=provenance.kv_bytes_per_token,
        hardware=provenance.hardware,
        digest=model.digest,
        model_loader=by_sheet,
        own_model=cost.ANALYTIC,
        facts=tuple(note for note in provenance.notes if note.startswith(("device ", "link "))),
        unmeasured=("all of it: " + next(note for note in provenance.notes if note.startswith("shares ")),),
    )


def _config_file(config: str) -> Path:
    return Path(config) / "config.json" if Path(config).is_dir() else Path(config)


def _config_of(geometry: Geometry, ranks: int) -> Mapping[str, Any]:
    """A config.json of this shape, for all ranks together."""
    return {
        "model_type": "llama",
        "num_hidden_layers": geometry.layers,
        "hidden_size": geometry.hidden,
        "num_attention_heads": geometry.heads * ranks,
        "num_key_value_heads": geometry.kv_heads * ranks,
        "head_dim": geometry.head_dim,
        "intermediate_size": geometry.intermediate * ranks,
        "vocab_size": geometry.vocab,
        "torch_dtype": geometry.dtype,
    }


@dataclass(frozen=True, slots=True)
class Behind:
    """Implements :class:`~kvpolicy.simulator.Times`: the steps of other times, and copies over a simulated link."""

    times: Times
    link: SimulatedLink

    @property
    def steps_of(self) -> Times:
        """The times that the steps are taken from, which may know their measured range."""
        return self.times

    @property
    def source(self) -> str:
        link = self.link
        link_text = f"{link.bytes_per_s:g} bytes/s and {link.latency_s:g} s"
        return f"{self.times.source}; copies over a given link of {link_text} instead"

    def step_s(self, load: StepLoad) -> float:
        return self.times.step_s(load)

    def steps_s(self, loads: Floats) -> Floats:
        return self.times.steps_s(loads)

    def copy_s(self, direction: Direction, copied_bytes: int, segments: int, segment_bytes: int) -> float:
        return self.link.seconds(copied_bytes)
