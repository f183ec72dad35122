"""Import of measured operator tables: tables of several kinds are combined into a hardware model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpolicy.cost import ModelWarning
from kvpolicy.cost.analytic import ASSUMED
from kvpolicy.cost.laws import Channel
from kvpolicy.errors import InputError
from kvpolicy.fields import WrongValue, parsed
from kvpolicy.hardware import Geometry
from kvpolicy.hardware.engine_time import EngineTime
from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.hardware.sheets import DeviceSheet, devices, known_sheet, link_sheet, links
from kvpolicy.shape import ModelShape
from kvpolicy.simulator.hardware import grids, operators
from kvpolicy.simulator.hardware.communication import with_all_reduces
from kvpolicy.simulator.hardware.grids import Attention
from kvpolicy.simulator.hardware.operator_tables import TableError, TableFile, read_files, with_operator
from kvpolicy.simulator.hardware.operators import Products, SourcedCurve
from kvpolicy.simulator.hardware.table_times import HardwareModel

SHAPELESS = "llmservingsim"
"""Prefix of layouts that name operators but not their widths or numbers of heads."""
TENSOR_PARALLEL = re.compile(r"(?<![a-z0-9])tp(\d+)(?![a-z0-9])", re.IGNORECASE)
LLMSERVINGSIM_DENSE = ("llmservingsim dense", "llmservingsim layers")


@dataclass(frozen=True, slots=True)
class Imported:
    """The hardware model that :func:`import_profile` made, and its file."""

    model: HardwareModel
    file: Path

    def text(self) -> str:
        model = self.model
        lines = [f"{self.file}: {model.device}, {model.geometry['layers']} layers, {model.ranks} rank(s)"]
        lines += [
            f"  {table['file']}: {table['told']} ({table['layout']}, {table['rows']} rows)" for table in model.inputs
        ]
        for name in ("prefill", "decode", "mixed"):
            grid = getattr(model, name)
            if grid is not None:
                lines.append(f"  attention, {name}: {len(grid.seconds)} points, {grid.measured:.0%} of them measured")
                if grid.measured < 1 and grid.unseen_error is not None:
                    lines[-1] += (
                        f", the others predicted by a fit whose mean error on unseen points is {grid.unseen_error:.1%}"
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
    link: SimulatedLink | str | None = None,
    engine: EngineTime = EngineTime(),
    all_reduce: Path | None = None,
) -> Imported:
    """Make the hardware model of one LLM on one device from tables of measured operator times.

    ``geometry``: a config.json, the folder of one, or a shape. ``ranks``: tensor-parallel ranks; tables must hold one
    rank's share. ``device``: its name, needed where the tables do not name it or its
    data sheet has to supply what they lack. ``link``: a name, or BYTES_PER_S[,LATENCY_S]; the device's usual link by
    default. ``engine``: the engine's own time, which no table holds. ``all_reduce``: Vidur's
    table of all-reduces on the device, for the communication between ranks, without which several ranks' steps are
    too short, with a warning. Raises InputError for missing inputs, for a
    mixture of experts, and for layers that keep a state.
    """
    shape = geometry if isinstance(geometry, ModelShape) else ModelShape.read(geometry)
    if shape.expert_weight_bytes:
        raise InputError(f"{geometry}: a mixture of experts: no table in a known layout holds experts' times")
    if shape.state_bytes:
        raise InputError(f"{geometry}: layers that keep a state: no table in a known layout holds their times")
    if all_reduce is not None and ranks == 1:
        raise WrongValue("all_reduce", f"is {all_reduce}, should be given with 2 ranks or more: one rank has nobody")
    if link or device:  # report errors that do not need the tables before reading them
        _copies(link, known_sheet(device))
    _refuse_other_ranks(tables, ranks)
    files = read_files(tables)
    device_in_tables = next((table_file.device for table_file in files if table_file.device), None)
    sheet = known_sheet(device or device_in_tables)
    copies, copies_source = _copies(link, sheet)
    rank = Geometry.of_shape(shape, ranks)
    tokens, sequences, attention = _model_parts(files, rank, ranks, sheet)
    if all_reduce is not None:
        tokens = with_all_reduces(tokens, all_reduce, rank, ranks)
    parts = (tokens, sequences, attention)
    model = HardwareModel(
        device=device or device_in_tables or "unnamed in the tables",
        geometry=rank.to_dict(),
        ranks=ranks,
        engine=engine,
        tokens=tokens.curve,
        sequences=sequences.curve,
        prefill=attention.prefill,
        decode=attention.decode,
        mixed=attention.mixed,
        copies=copies,
        copies_source=copies_source,
        inputs=tuple(source.described(content) for part in parts for source, content in part.sources),
        notes=_notes(files, parts),
    )
    if model.lacks_communication:
        warnings.warn(f"{out}: {model.lacks_communication}; --all-reduce FILE gives it", ModelWarning, stacklevel=2)
    return Imported(model, model.write(out))


def _refuse_other_ranks(tables: Sequence[Path], ranks: int) -> None:
    """Check ranks by the names of files and folders, as not every layout has a column for them."""
    for file in tables:
        named_ranks = [int(number) for part in file.parts[-2:] for number in TENSOR_PARALLEL.findall(part)]
        if named_ranks and named_ranks[-1] != ranks:
            raise TableError(f"{file}: its name says tp{named_ranks[-1]}, ranks is {ranks}: both should be the same")


def _notes(files: Sequence[TableFile], parts: tuple[SourcedCurve, SourcedCurve, Attention]) -> tuple[str, ...]:
    notes = [note for part in parts for note in part.notes]
    used = {source.file for part in parts for source, _ in part.sources}
    notes += [f"{table_file.file.name}: not used" for table_file in files if table_file.file not in used]
    device_names = sorted({table_file.device for table_file in files if table_file.device})
    if len(device_names) > 1:
        notes.append(f"tables of several devices: {', '.join(device_names)}")
    shapeless = [
        table_file.file.name
        for table_file in files
        if table_file.file in used and table_file.layout.startswith(SHAPELESS)
    ]
    if shapeless:
        notes.append(f"{', '.join(shapeless)}: no column gives the shape, which is assumed to be this model's")
    return tuple(dict.fromkeys(notes))


def _model_parts(
    files: Sequence[TableFile], geometry: Geometry, ranks: int, sheet: DeviceSheet | None
) -> tuple[SourcedCurve, SourcedCurve, Attention]:
    gemm_file = with_operator(files, "aiconfigurator gemm")
    products = None if gemm_file is None else Products(gemm_file)
    tokens = _tokens(files, geometry, ranks, products, sheet)
    sequences = _sequences(files, geometry, ranks, products)
    if products is not None:
        tokens = SourcedCurve(tokens.curve, tokens.sources, (*tokens.notes, *products.notes))
    return tokens, sequences, _attention(files, geometry)


def _tokens(
    files: Sequence[TableFile], geometry: Geometry, ranks: int, products: Products | None, sheet: DeviceSheet | None
) -> SourcedCurve:
    for layout in LLMSERVINGSIM_DENSE:
        dense = with_operator(files, layout)
        if dense is not None:
            return operators.of_layers(dense, geometry.layers)
    vidur = with_operator(files, "vidur linear operators")
    if vidur is not None:
        return operators.of_vidur(vidur, geometry, ranks)
    if products is None:
        raise TableError(
            "no table holds projections and MLP: give LLMServingSim's dense or layers table, Vidur's linear operators "
            "or AIConfigurator's gemm"
        )
    if sheet is None:
        needs = f"operators by element need its data sheet; there are {', '.join(devices())}"
        raise WrongValue("device", f"is missing: {needs}")
    return operators.of_products(products, geometry, sheet)


def _sequences(files: Sequence[TableFile], geometry: Geometry, ranks: int, products: Products | None) -> SourcedCurve:
    for layout in ("llmservingsim per-sequence", "llmservingsim layers"):
        table_file = with_operator(files, layout, "lm_head")
        if table_file is not None:
            return operators.of_sequences(table_file)
    if products is None:
        raise TableError("no table holds the head: give LLMServingSim's per-sequence table or AIConfigurator's gemm")
    return operators.head_of_products(products, geometry, ranks)


def _attention(files: Sequence[TableFile], geometry: Geometry) -> Attention:
    mixed = with_operator(files, "llmservingsim attention")
    if mixed is not None:
        return grids.of_mixed(mixed, geometry.layers)
    prefill = with_operator(files, "aiconfigurator attention", "prefill attention")
    decode = with_operator(files, "aiconfigurator attention", "decode attention")
    if prefill is None or decode is None:
        raise TableError(
            "no table holds attention: give LLMServingSim's attention table, or AIConfigurator's context and "
            "generation attention together"
        )
    return grids.of_phases(prefill, decode, geometry)


def _copies(link: SimulatedLink | str | None, sheet: DeviceSheet | None) -> tuple[Channel, str]:
    name = link or (sheet.link if sheet else None)
    if name is None:
        known = f"name its link ({', '.join(links())}) or give BYTES_PER_S[,LATENCY_S]"
        raise WrongValue("link", f"is missing, and the device has no data sheet: {known}")
    segment_s = ASSUMED.segment_s.value
    if isinstance(name, SimulatedLink) or (name.casefold() not in links() and name[:1].isdigit()):
        simulated: SimulatedLink = parsed("link", name, SimulatedLink)
        source = f"as given: {simulated.text}; {segment_s:g} s per piece assumed"
        return Channel(simulated.latency_s, 1 / simulated.bytes_per_s, segment_s), source
    link_data = link_sheet(name)
    share, latency_s = ASSUMED.pinned_share.value, ASSUMED.copy_s.value
    source = (
        f"{share:g} of {link_data.bytes_per_s:g} bytes/s ({link_data.source}), {latency_s:g} s per copy and "
        f"{segment_s:g} s per piece, all assumed"
    )
    return Channel(latency_s, 1 / (share * link_data.bytes_per_s), segment_s), source
