"""Tables of several kinds put together to the steps of a whole model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvpolicy.cost.analytic import ASSUMED
from kvpolicy.cost.laws import Channel
from kvpolicy.hardware import Geometry
from kvpolicy.hardware.link import GivenLink
from kvpolicy.hardware.sheets import DeviceSheet, devices, known_sheet, link_sheet, links
from kvpolicy.shape import ModelShape
from kvpolicy.simulator.hardware import grids, operators
from kvpolicy.simulator.hardware.grids import Attention
from kvpolicy.simulator.hardware.operator_tables import Opened, TableError, opened, with_operator
from kvpolicy.simulator.hardware.operators import Products, Told
from kvpolicy.simulator.hardware.table_times import Engine, HardwareModel

SHAPELESS = "llmservingsim"
"""Layouts whose operators are named, but not how wide they are or for how many heads."""
TENSOR_PARALLEL = re.compile(r"(?<![a-z0-9])tp(\d+)(?![a-z0-9])", re.IGNORECASE)
LLMSERVINGSIM_DENSE = ("llmservingsim dense", "llmservingsim layers")


@dataclass(frozen=True, slots=True)
class Imported:
    """What :func:`import_profile` made, and where it is."""

    model: HardwareModel
    file: Path

    def text(self) -> str:
        model = self.model
        lines = [f"{self.file}: {model.device}, {model.geometry['layers']} layers, {model.ranks} rank(s)"]
        lines += [f"  {one['file']}: {one['told']} ({one['layout']}, {one['rows']} rows)" for one in model.inputs]
        for name in ("prefill", "decode", "mixed"):
            grid = getattr(model, name)
            if grid is not None:
                lines.append(f"  attention, {name}: {len(grid.seconds)} points, {grid.measured:.0%} of them measured")
                if grid.measured < 1 and grid.unseen_error is not None:
                    lines[-1] += (
                        f", the others told by a fit whose mean error on unseen points is {grid.unseen_error:.1%}"
                    )
        engine = model.engine
        lines.append(
            f"  engine's own time: {engine.per_step_s * 1e3:g} ms a step, {engine.per_chunk_step_s * 1e3:g} ms more "
            f"with a chunk, attention of uneven contexts {engine.uneven:+.1%}: {engine.source}"
        )
        lines.append(f"  copies, not measured: {model.copies_source}")
        return "\n".join(lines + [f"  note: {note}" for note in model.notes])


def import_profile(
    tables: Sequence[Path],
    out: Path,
    geometry: Path | ModelShape,
    ranks: int = 1,
    device: str | None = None,
    link: str | None = None,
    step_s: float = 0.0,
    chunk_step_s: float = 0.0,
    uneven: float = 0.0,
    engine_source: str = "",
) -> Imported:
    """Make the hardware model of one LLM on one device from tables of measured operator times.

    ``geometry``: a config.json, the folder of one, or a shape. ``ranks``: tensor parallel; tables have to be of one
    rank's share, and communication is not counted. ``device``: its name, where the tables do not tell it or
    leave out what its data sheet can tell. ``link``: by name, or BYTES_PER_S[,LATENCY_S]; the device's usual one
    without it. ``step_s``, ``chunk_step_s``, ``uneven``: what no table holds, as
    :class:`~kvpolicy.simulator.hardware.table_times.Engine`, and ``engine_source``: where they are from. Raises
    ValueError for what is missing, and for a mixture of experts.
    """
    shape = geometry if isinstance(geometry, ModelShape) else ModelShape.read(geometry)
    if shape.expert_weight_bytes:
        raise ValueError(f"{geometry}: a mixture of experts: no table in a known layout holds experts' times")
    engine = _engine(step_s, chunk_step_s, uneven, engine_source)
    if link or device:  # what can be told to be wrong without the tables is, before they are read
        _copies(link, known_sheet(device))
    _refuse_other_ranks(tables, ranks)
    files = opened(tables)
    named = next((one.device for one in files if one.device), None)
    sheet = known_sheet(device or named)
    copies, copies_source = _copies(link, sheet)
    made = _whole(files, Geometry.of_shape(shape, ranks), ranks, sheet)
    tokens, sequences, attention = made
    model = HardwareModel(
        device=device or named or "unnamed in the tables",
        geometry=asdict(Geometry.of_shape(shape, ranks)),
        ranks=ranks,
        engine=engine,
        tokens=tokens.curve,
        sequences=sequences.curve,
        prefill=attention.prefill,
        decode=attention.decode,
        mixed=attention.mixed,
        copies=copies,
        copies_source=copies_source,
        inputs=tuple(one.described(told) for part in made for one, told in part.by),
        notes=_notes(files, made, ranks),
    )
    return Imported(model, model.write(out))


def _refuse_other_ranks(tables: Sequence[Path], ranks: int) -> None:
    """Not every layout has a column for it; names of files and their folders tell, where anything does."""
    for file in tables:
        told = [int(number) for part in file.parts[-2:] for number in TENSOR_PARALLEL.findall(part)]
        if told and told[-1] != ranks:
            raise TableError(f"{file}: its name says tp{told[-1]}, --ranks is {ranks}: both should be the same")


def _engine(step_s: float, chunk_step_s: float, uneven: float, source: str) -> Engine:
    for name, value in (("step_s", step_s), ("chunk_step_s", chunk_step_s), ("uneven", uneven)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} is {value}, should be 0 or above")
    if not (step_s or chunk_step_s or uneven):
        return Engine()
    if not source:
        raise ValueError("engine_source is missing: where the engine's own time was measured")
    return Engine(step_s, chunk_step_s, uneven, source)


def _notes(files: Sequence[Opened], made: tuple[Told, Told, Attention], ranks: int) -> tuple[str, ...]:
    notes = [note for part in made for note in part.notes]
    used = {one.file for part in made for one, _ in part.by}
    notes += [f"{one.file.name}: not used" for one in files if one.file not in used]
    devices = sorted({one.device for one in files if one.device})
    if len(devices) > 1:
        notes.append(f"tables of several devices: {', '.join(devices)}")
    shapeless = [one.file.name for one in files if one.file in used and one.layout.startswith(SHAPELESS)]
    if shapeless:
        notes.append(f"{', '.join(shapeless)}: no column tells the shape; that it is this model's is taken on trust")
    if ranks > 1:
        notes.append(f"{ranks} ranks: their communication is in no table and not counted")
    return tuple(dict.fromkeys(notes))


def _whole(
    files: Sequence[Opened], geometry: Geometry, ranks: int, sheet: DeviceSheet | None
) -> tuple[Told, Told, Attention]:
    gemm = with_operator(files, "aiconfigurator gemm")
    products = None if gemm is None else Products(gemm)
    tokens = _tokens(files, geometry, ranks, products, sheet)
    sequences = _sequences(files, geometry, ranks, products)
    if products is not None:
        tokens = Told(tokens.curve, tokens.by, (*tokens.notes, *products.notes))
    return tokens, sequences, _attention(files, geometry)


def _tokens(
    files: Sequence[Opened], geometry: Geometry, ranks: int, products: Products | None, sheet: DeviceSheet | None
) -> Told:
    for layout in LLMSERVINGSIM_DENSE:
        dense = with_operator(files, layout)
        if dense is not None:
            return operators.of_layers(dense, geometry.layers)
    vidur = with_operator(files, "vidur linear operators")
    if vidur is not None:
        return operators.of_vidur(vidur, geometry, ranks)
    if products is None:
        raise TableError(
            "no table tells projections and MLP: give LLMServingSim's dense or layers table, Vidur's linear operators "
            "or AIConfigurator's gemm"
        )
    if sheet is None:
        raise ValueError(
            f"--device: matrix products alone need a device with a data sheet, for operators by element; there are "
            f"{', '.join(devices())}"
        )
    return operators.of_products(products, geometry, sheet)


def _sequences(files: Sequence[Opened], geometry: Geometry, ranks: int, products: Products | None) -> Told:
    for layout in ("llmservingsim per-sequence", "llmservingsim layers"):
        one = with_operator(files, layout, "lm_head")
        if one is not None:
            return operators.of_sequences(one)
    if products is None:
        raise TableError("no table tells the head: give LLMServingSim's per-sequence table or AIConfigurator's gemm")
    return operators.head_of_products(products, geometry, ranks)


def _attention(files: Sequence[Opened], geometry: Geometry) -> Attention:
    mixed = with_operator(files, "llmservingsim attention")
    if mixed is not None:
        return grids.of_mixed(mixed, geometry.layers)
    prefill = with_operator(files, "aiconfigurator attention", "prefill attention")
    decode = with_operator(files, "aiconfigurator attention", "decode attention")
    if prefill is None or decode is None:
        raise TableError(
            "no table tells attention: give LLMServingSim's attention table, or AIConfigurator's context and "
            "generation attention together"
        )
    return grids.of_phases(prefill, decode, geometry)


def _copies(link: str | None, sheet: DeviceSheet | None) -> tuple[Channel, str]:
    name = link or (sheet.link if sheet else None)
    if name is None:
        raise ValueError(
            f"--link: the device has no data sheet; name its link ({', '.join(links())}) "
            "or give BYTES_PER_S[,LATENCY_S]"
        )
    segment = ASSUMED.segment_s.value
    if name.casefold() not in links() and name[:1].isdigit():
        try:
            given = GivenLink.parse(name)
        except ValueError as error:
            raise ValueError(f"--{error}") from error
        channel = Channel(given.latency_s, 1 / given.bytes_per_s, segment)
        return channel, f"as given: {name}; {segment:g} s per piece assumed"
    found = link_sheet(name)
    share, latency_s = ASSUMED.pinned_share.value, ASSUMED.copy_s.value
    source = (
        f"{share:g} of {found.bytes_per_s:g} bytes/s ({found.source}), {latency_s:g} s per copy and {segment:g} s per "
        "piece, all assumed"
    )
    return Channel(latency_s, 1 / (share * found.bytes_per_s), segment), source
