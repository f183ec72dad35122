"""A cost model without any measurement: the roofline of a model's shape on a device's data sheet.

Every prediction is flagged as extrapolated and its interval is infinite: nothing here was measured. Facts (a device's
peak rates) are in :mod:`kvpolicy.hardware.sheets`. What share of them is reached is never a fact: it is calibrated from
a trace, or assumed, and which values are plausible stands with the assumptions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvpolicy import extensions
from kvpolicy.cost import store
from kvpolicy.cost.intervals import unbounded
from kvpolicy.cost.laws import Channel, Law, RecomputeRoofline, SwapRoofline
from kvpolicy.cost.model import CostModel, FittedModel, ModelError, Provenance
from kvpolicy.events import KINDS, Kind
from kvpolicy.features import FEATURES
from kvpolicy.hardware import EngineSpec, Geometry
from kvpolicy.hardware.link import header_link
from kvpolicy.hardware.sheets import DeviceSheet, LinkSheet, SheetError, device_sheet, known_sheet, link_sheet
from kvpolicy.shape import ConfigError, ModelShape


@dataclass(frozen=True, slots=True)
class Constant:
    """A calibrated or assumed value, and between what a sane machine puts it."""

    value: float
    unit: str
    low: float
    high: float

    @property
    def plausible(self) -> bool:
        return self.low < self.value < self.high


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What is taken for granted where nothing was measured.

    The four shares of peak rates are medians over published kernel timings of A100 and H100 (AIConfigurator's tables
    of GEMM, context and generation attention, bfloat16; GEMMs of 1024 tokens and more for compute, of 16 and fewer
    for memory): A100 0.89, 0.53, 0.68, 0.59 and H100 0.81, 0.55, 0.79, 0.68, in the order below. The lower of
    the two is taken, and linear layers at 0.75: beside their GEMMs (0.81) they have operators by element, which added
    0.06 at 2048 tokens on LLMServingSim's RTX PRO 6000 table. The others are plain assumptions.
    """

    linear_share: Constant = Constant(0.75, "of peak operations/s", 0.05, 1.0)
    attention_share: Constant = Constant(0.53, "of peak operations/s", 0.02, 1.0)
    weight_share: Constant = Constant(0.68, "of memory bytes/s", 0.1, 1.0)
    kv_share: Constant = Constant(0.59, "of memory bytes/s", 0.05, 1.0)
    step_s: Constant = Constant(2e-3, "s per step executed for the victim alone", 0.0, 0.1)
    recompute_s: Constant = Constant(1e-4, "s per recompute", 0.0, 0.1)
    pinned_share: Constant = Constant(0.8, "of the link's bytes/s, page-locked host memory", 0.05, 1.0)
    pageable_share: Constant = Constant(0.25, "of the link's bytes/s, pageable host memory", 0.01, 1.0)
    copy_s: Constant = Constant(5e-5, "s per copy, each direction", 0.0, 0.1)
    segment_s: Constant = Constant(5e-7, "s per contiguous piece", 0.0, 1e-4)
    swap_s: Constant = Constant(1e-4, "s per swap", 0.0, 0.1)


ASSUMED = Assumptions()

PLAUSIBLE_FLOPS = (1e9, 5e15)
"""Operations per second of anything that serves models: a CPU core to the largest accelerator."""
PLAUSIBLE_LINK_BYTES_PER_S = (1e7, 1e12)
PLAUSIBLE_SEGMENT_S = 1e-4
PLAUSIBLE_FIXED_S = 0.5


def constants_of(law: Law, geometry: Geometry, sheet: DeviceSheet | None = None) -> dict[str, Constant]:
    """The physical constants that a fitted law implies. A rate is left out where its coefficient is 0.

    ``sheet``: no rate can be above its peaks.
    """
    if isinstance(law, RecomputeRoofline):
        return _of_recompute(law, geometry, sheet)
    if isinstance(law, SwapRoofline):
        return _of_swap(law)
    return {}


def _of_recompute(law: RecomputeRoofline, geometry: Geometry, sheet: DeviceSheet | None) -> dict[str, Constant]:
    low, high = PLAUSIBLE_FLOPS if sheet is None else (0.02 * sheet.bf16_flops, _max_flops(sheet))
    found = {
        "fixed_s": Constant(law.fixed_s, "s per recompute", -1.0, PLAUSIBLE_FIXED_S),
        "alone_s": Constant(law.alone_s, "s per step for the victim alone", -1.0, PLAUSIBLE_FIXED_S),
    }
    if law.s_per_token:
        rate = geometry.linear_flops_per_token / law.s_per_token
        found["linear layers"] = Constant(rate, "operations/s", low, high)
    if law.s_per_pair:
        rate = geometry.attention_flops_per_pair / law.s_per_pair
        found["attention"] = Constant(rate, "operations/s", low / 10, high)
    return found


def _max_flops(sheet: DeviceSheet) -> float:
    return max(sheet.bf16_flops, sheet.fp8_flops or 0.0, sheet.int8_ops or 0.0)


def _of_swap(law: SwapRoofline) -> dict[str, Constant]:
    found = {"fixed_s": Constant(law.fixed_s, "s per swap", -1.0, PLAUSIBLE_FIXED_S)}
    for way, channel in (("save", law.save), ("load", law.load)):
        found[f"{way} latency"] = Constant(channel.latency_s, "s", -1.0, PLAUSIBLE_FIXED_S)
        found[f"{way} segment"] = Constant(channel.s_per_segment, "s per contiguous piece", -1.0, PLAUSIBLE_SEGMENT_S)
        if channel.s_per_byte:
            found[f"{way} bandwidth"] = Constant(1 / channel.s_per_byte, "bytes/s", *PLAUSIBLE_LINK_BYTES_PER_S)
    return found


def implausible(laws: Mapping[Kind, Law], geometry: Geometry, sheet: DeviceSheet | None = None) -> tuple[str, ...]:
    """One note for each constant at or beyond the edge of what is plausible."""
    notes = []
    for kind, law in laws.items():
        for name, constant in constants_of(law, geometry, sheet).items():
            if not constant.plausible:
                notes.append(
                    f"{kind}: {name} comes out as {constant.value:.3g} {constant.unit}, plausible is "
                    f"{constant.low:.3g} to {constant.high:.3g}: the trace may not tell it from other constants"
                )
    return tuple(notes)


ANALYTIC = "analytic"
DEFAULT_BUDGET_TOKENS = 2048
"""Of a step, where the engine does not say: vLLM's own where it is not told another; on large devices it takes more."""
UNSAID = EngineSpec()
"""An engine of which nothing is known."""
FLOOR_S = 1e-6


def untrained(
    shape: ModelShape,
    sheet: DeviceSheet,
    link: LinkSheet | None = None,
    engine: EngineSpec = UNSAID,
    assumed: Assumptions = ASSUMED,
) -> FittedModel:
    """The roofline of ``shape`` on ``sheet``; ``link``: the device's usual one where none is given."""
    link = link or link_sheet(sheet.link)
    laws: dict[Kind, Law] = {
        "recompute": _recompute(shape, sheet, engine, assumed),
        "swap": _swap(sheet, link, engine, assumed),
    }
    notes = (
        "untrained: nothing was measured; `kvpolicy profile` and `kvpolicy train` measure this machine",
        f"device {sheet.name}: {sheet.source}",
        f"link {link.name}: {link.source}",
        f"shares of these rates are assumed: {assumed.linear_share.value:g} of compute in linear layers, "
        f"{assumed.attention_share.value:g} in attention, {assumed.weight_share.value:g} of memory bandwidth, "
        f"{_link_share(engine, assumed):g} of the link",
        f"token budget {_budget(engine)}, {engine.ranks} rank{'s' if engine.ranks > 1 else ''}",
    )
    made = Provenance(
        family="analytic",
        hardware=dict(engine.hardware or {"device": sheet.device_names[0]}),
        geometry=Geometry.from_dict(engine.geometry) if engine.geometry else Geometry.of_shape(shape, engine.ranks),
        link=dict(engine.link or header_link(None)),
        block_sizes=(engine.block_size,),
        kv_bytes_per_token=_kv_bytes_per_token(shape, engine),
        trace_digests=(),
        state_ids=(),
        noise={"variation": None},
        held_out={},
        notes=notes,
    )
    # A range that no victim lies in: whatever is predicted is extrapolated.
    nowhere = {kind: dict.fromkeys(FEATURES, (0.0, 0.0)) for kind in KINDS}
    model = FittedModel(ANALYTIC, made, laws, {}, nowhere, dict.fromkeys(KINDS, FLOOR_S), unbounded())
    told = json.dumps([{kind: law.to_dict() for kind, law in laws.items()}, notes], sort_keys=True)
    return replace(model, digest=hashlib.sha256(told.encode()).hexdigest())


def _budget(engine: EngineSpec) -> int:
    return DEFAULT_BUDGET_TOKENS if engine.token_budget is None else engine.token_budget


def _kv_bytes_per_token(shape: ModelShape, engine: EngineSpec) -> float:
    if engine.block_bytes is not None:
        return engine.block_bytes / engine.block_size
    return shape.kv_bytes_per_token / _kv_parts(shape, engine.ranks)


def _kv_parts(shape: ModelShape, ranks: int) -> int:
    """Over how many ranks the KV is parted: never more than there are KV heads."""
    return min(ranks, max(1, shape.kinds[0].attention.kv_heads))


def _recompute(shape: ModelShape, sheet: DeviceSheet, engine: EngineSpec, assumed: Assumptions) -> RecomputeRoofline:
    linear_rate = assumed.linear_share.value * sheet.flops(shape.precision.arithmetic) * engine.ranks
    attention_rate = assumed.attention_share.value * sheet.bf16_flops * engine.ranks
    weight_rate = assumed.weight_share.value * sheet.memory_bytes_per_s * engine.ranks
    kv_rate = assumed.kv_share.value * sheet.memory_bytes_per_s * _kv_parts(shape, engine.ranks)
    window = shape.window_tokens
    return RecomputeRoofline(
        fixed_s=assumed.recompute_s.value,
        alone_s=assumed.step_s.value,
        s_per_token=shape.linear_flops_per_token / linear_rate,
        s_per_pair=shape.attention_flops_per_pair / attention_rate,
        weight_s=shape.steady_weight_bytes / weight_rate,
        expert_s=shape.expert_weight_bytes / weight_rate,
        expert_miss=shape.expert_miss,
        s_per_kv_token=shape.full_kv_bytes_per_token / kv_rate,
        s_per_window_pair=0.0 if window is None else shape.window_flops_per_pair / attention_rate,
        window_tokens=float(window or 0),
        budget_tokens=float(_budget(engine)),
    )


def _link_share(engine: EngineSpec, assumed: Assumptions) -> float:
    return (assumed.pinned_share if engine.pinned else assumed.pageable_share).value


def _swap(sheet: DeviceSheet, link: LinkSheet, engine: EngineSpec, assumed: Assumptions) -> SwapRoofline:
    """A save is felt in full: the step that needs the blocks waits for it. A load beside others takes from them the
    memory bandwidth that it uses."""
    rate = _link_share(engine, assumed) * link.bytes_per_s
    if engine.link.get("kind") == "simulated":
        rate = min(rate, float(engine.link["bytes_per_s"]))
    latency = assumed.copy_s.value + float(engine.link.get("latency_s") or 0.0)
    channel = Channel(latency, 1.0 / rate, assumed.segment_s.value)
    return SwapRoofline(
        save=channel,
        load=channel,
        fixed_s=assumed.swap_s.value,
        alone_s=0.0,
        save_share=1.0,
        load_alone_share=1.0,
        load_beside_share=min(1.0, rate / sheet.memory_bytes_per_s),
        save_queue_share=1.0,
        load_queue_share=1.0,
    )


# ---- by name ----


def load_cost_model(model: str | Path | CostModel, allow_python: bool = True) -> CostModel:
    """The cost model itself, or the one of that name: as :func:`load` has them, or
    ``python:MODULE:FACTORY[,KEY=VALUE...]``, which runs that module: give none that came out of a file, or do not
    ``allow_python``.

    Raises ModelError for what cannot be loaded, :class:`kvpolicy.extensions.ExtensionError` for a module path that is
    refused or leads to no cost model.
    """
    if isinstance(model, CostModel):
        return model
    if isinstance(model, str) and extensions.is_module_path(model):
        found: CostModel = extensions.from_module(model, CostModel, "cost model", allow_python)
        return found
    return load(model)


def load(name: str | Path) -> FittedModel:
    """A cost model by name or folder, as :func:`kvpolicy.cost.store.load`; or an untrained one:
    ``analytic:DEVICE[@LINK]:CONFIG``, CONFIG being a config.json or the folder of one.

    Raises ModelError for what cannot be loaded, and for ``analytic`` alone: only a running engine knows the rest.
    """
    return _load(name, UNSAID, "auto")


def _load(name: str | Path, engine: EngineSpec, kv_cache_dtype: str) -> FittedModel:
    """``engine``: what an untrained model is to count with; its shape and device are those of the name."""
    kind, _, rest = str(name).partition(":")
    if kind != ANALYTIC or Path(name).is_dir():
        return store.load(name)
    device, _, config = rest.partition(":")
    if not device or not config:
        raise ModelError(
            f"cost model {name}: without a running engine it should be analytic:DEVICE[@LINK]:CONFIG, "
            "as analytic:H100-SXM@pcie5:path/to/config.json"
        )
    place, _, link = device.partition("@")
    shape, sheet = _shape(config, kv_cache_dtype), _sheet(place)
    geometry = Geometry.of_shape(shape, engine.ranks)
    if engine.geometry:  # 16 bits are 16 bits: which of the types they are is the engine's to say
        geometry = replace(geometry, dtype=engine.geometry["dtype"])
    same = known_sheet(engine.hardware.get("device")) == sheet
    here = replace(engine, geometry=geometry.to_dict(), block_bytes=None, hardware=engine.hardware if same else {})
    return replace(untrained(shape, sheet, _link(link) if link else None, here), name=str(name))


def _sheet(device: str) -> DeviceSheet:
    try:
        return device_sheet(device)
    except SheetError as error:
        raise ModelError(f"analytic: {error}") from error


def _link(link: str) -> LinkSheet:
    try:
        return link_sheet(link)
    except SheetError as error:
        raise ModelError(f"analytic: {error}") from error


def _shape(config: str, kv_cache_dtype: str) -> ModelShape:
    try:
        return ModelShape.read(config, kv_cache_dtype)
    except ConfigError as error:
        raise ModelError(f"analytic: {error}") from error


def engine_loader(
    config: Mapping[str, Any], engine: EngineSpec, kv_cache_dtype: str = "auto"
) -> Callable[[str], FittedModel]:
    """For :func:`kvpolicy.policy.load` inside a server: ``analytic`` becomes the untrained model of this engine.

    ``config``: the model's Hugging Face configuration as a dictionary. ``engine.hardware["device"]`` finds the sheet.
    ``analytic:DEVICE:CONFIG`` counts with this engine's token budget, ranks and link; whether that device and that
    model are the engine's ``check_fit`` tells. Every other name is loaded as always. Raises ModelError, when
    ``analytic`` is asked for, where the device has no sheet (a CPU), no hardware was given, or the configuration
    cannot be understood.
    """

    def find(name: str) -> FittedModel:
        if name != ANALYTIC:
            return _load(name, engine, kv_cache_dtype)
        device = engine.hardware.get("device")
        if not device:
            raise ModelError("analytic: the engine named no device")
        try:
            shape = ModelShape.from_config(config, kv_cache_dtype)
        except ConfigError as error:
            raise ModelError(f"analytic: the model's configuration: {error}") from error
        return untrained(shape, _sheet(str(device)), engine=engine)

    return find
