"""A cost model without measurements: the roofline of a model's shape on a device's data sheet.

Nothing here was measured, so every prediction is flagged as extrapolated and its interval is infinite. Facts (a
device's peak rates) are in :mod:`kvpolicy.hardware.sheets`. The share of a peak rate that is reached is calibrated from
a trace or assumed. The plausible range of each share is given with the assumptions.
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
from kvpolicy.fields import refuse_other
from kvpolicy.hardware import EngineSpec, Geometry
from kvpolicy.hardware.link import header_link
from kvpolicy.hardware.sheets import DeviceSheet, LinkSheet, SheetError, device_sheet, known_sheet, link_sheet
from kvpolicy.shape import ConfigError, ModelShape


@dataclass(frozen=True, slots=True)
class Constant:
    """A calibrated or assumed value with its plausible range."""

    value: float
    unit: str
    low: float
    high: float

    @property
    def plausible(self) -> bool:
        return self.low < self.value < self.high


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Values used where nothing was measured.

    The four shares of peak rates are medians over published kernel timings of A100 and H100 (AIConfigurator's tables
    of GEMM, context and generation attention, bfloat16; GEMMs of 1024 tokens and more for compute, of 16 and fewer
    for memory): A100 0.89, 0.53, 0.68, 0.59 and H100 0.81, 0.55, 0.79, 0.68, in the order below. The lower of the two
    is used. Linear layers are set to 0.75, because beside their GEMMs (0.81) they contain elementwise operators, which
    added 0.06 at 2048 tokens on LLMServingSim's RTX PRO 6000 table. The other values are plain assumptions.
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
"""Operations per second, from a CPU core to the largest accelerator."""
PLAUSIBLE_LINK_BYTES_PER_S = (1e7, 1e12)
PLAUSIBLE_SEGMENT_S = 1e-4
PLAUSIBLE_FIXED_S = 0.5


def constants_of(law: Law, geometry: Geometry, sheet: DeviceSheet | None = None) -> dict[str, Constant]:
    """The physical constants that a fitted law implies. A rate with coefficient 0 is omitted.

    ``sheet``: its peaks are upper bounds of the rates.
    """
    if isinstance(law, RecomputeRoofline):
        return _recompute_constants(law, geometry, sheet)
    if isinstance(law, SwapRoofline):
        return _swap_constants(law)
    return {}


def _recompute_constants(law: RecomputeRoofline, geometry: Geometry, sheet: DeviceSheet | None) -> dict[str, Constant]:
    low, high = PLAUSIBLE_FLOPS if sheet is None else (0.02 * sheet.bf16_flops, _max_flops(sheet))
    constants = {
        "fixed_s": Constant(law.fixed_s, "s per recompute", -1.0, PLAUSIBLE_FIXED_S),
        "alone_s": Constant(law.alone_s, "s per step for the victim alone", -1.0, PLAUSIBLE_FIXED_S),
    }
    if law.s_per_token:
        rate = geometry.linear_flops_per_token / law.s_per_token
        constants["linear layers"] = Constant(rate, "operations/s", low, high)
    if law.s_per_pair:
        rate = geometry.attention_flops_per_pair / law.s_per_pair
        constants["attention"] = Constant(rate, "operations/s", low / 10, high)
    if law.s_per_window_pair and geometry.window_layers:
        rate = geometry.window_flops_per_pair / law.s_per_window_pair
        constants["attention within windows"] = Constant(rate, "operations/s", low / 10, high)
    return constants


def _max_flops(sheet: DeviceSheet) -> float:
    return max(sheet.bf16_flops, sheet.fp8_flops or 0.0, sheet.int8_ops or 0.0)


def _swap_constants(law: SwapRoofline) -> dict[str, Constant]:
    constants = {"fixed_s": Constant(law.fixed_s, "s per swap", -1.0, PLAUSIBLE_FIXED_S)}
    for direction, channel in (("save", law.save), ("load", law.load)):
        constants[f"{direction} latency"] = Constant(channel.latency_s, "s", -1.0, PLAUSIBLE_FIXED_S)
        constants[f"{direction} segment"] = Constant(
            channel.s_per_segment, "s per contiguous piece", -1.0, PLAUSIBLE_SEGMENT_S
        )
        if channel.s_per_byte:
            constants[f"{direction} bandwidth"] = Constant(
                1 / channel.s_per_byte, "bytes/s", *PLAUSIBLE_LINK_BYTES_PER_S
            )
    return constants


def implausible(laws: Mapping[Kind, Law], geometry: Geometry, sheet: DeviceSheet | None = None) -> tuple[str, ...]:
    """One note for each constant at or beyond the edge of its plausible range."""
    notes = []
    for kind, law in laws.items():
        for name, constant in constants_of(law, geometry, sheet).items():
            if not constant.plausible:
                notes.append(
                    f"{kind}: {name} is fitted as {constant.value:.3g} {constant.unit}, plausible is "
                    f"{constant.low:.3g} to {constant.high:.3g}: the trace may not separate it from other constants"
                )
    return tuple(notes)


ANALYTIC = "analytic"
DEFAULT_BUDGET_TOKENS = 2048
"""Token budget of a step if the engine reports none: vLLM's default, which is higher on large devices."""
UNKNOWN_ENGINE = EngineSpec()
"""An engine of which nothing is known but the defaults."""
FLOOR_S = 1e-6


def untrained(
    shape: ModelShape,
    sheet: DeviceSheet,
    link: LinkSheet | None = None,
    engine: EngineSpec = UNKNOWN_ENGINE,
    assumed: Assumptions = ASSUMED,
) -> FittedModel:
    """The roofline of ``shape`` on ``sheet``; ``link`` defaults to the device's usual one."""
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
        f"{_link_share(engine, assumed):g} of the link{' (pageable host memory)' if engine.pinned is False else ''}",
        f"token budget {_budget(engine)}, "
        + ("1 rank" if engine.ranks == 1 else f"{engine.ranks} ranks, whose communication is not counted"),
    )
    provenance = Provenance(
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
        pinned=engine.pinned is not False,
    )
    # No victim lies in these ranges, so every prediction counts as extrapolated.
    empty_ranges = {kind: dict.fromkeys(FEATURES, (0.0, 0.0)) for kind in KINDS}
    model = FittedModel(ANALYTIC, provenance, laws, {}, empty_ranges, dict.fromkeys(KINDS, FLOOR_S), unbounded())
    content = json.dumps([{kind: law.to_dict() for kind, law in laws.items()}, notes], sort_keys=True)
    return replace(model, digest=hashlib.sha256(content.encode()).hexdigest())


def _budget(engine: EngineSpec) -> int:
    return DEFAULT_BUDGET_TOKENS if engine.token_budget is None else engine.token_budget


def _kv_bytes_per_token(shape: ModelShape, engine: EngineSpec) -> float:
    if engine.block_bytes is not None:
        return engine.block_bytes / engine.block_size
    return shape.kv_bytes_per_token / _kv_parts(shape, engine.ranks)


def _kv_parts(shape: ModelShape, ranks: int) -> int:
    """Ranks that the KV cache is split over: at most the number of KV heads."""
    return min(ranks, max(1, shape.attention.kv_heads))


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
    return (assumed.pageable_share if engine.pinned is False else assumed.pinned_share).value


def _swap(sheet: DeviceSheet, link: LinkSheet, engine: EngineSpec, assumed: Assumptions) -> SwapRoofline:
    """The swap law. No step waits for a copy; beside steps it costs them the memory bandwidth that it uses.

    A victim that is being loaded holds memory that nobody uses. Where requests are preempted for want of memory, that
    costs as much of the engine's time as it is a share of the memory.
    """
    rate = _link_share(engine, assumed) * link.bytes_per_s
    if engine.link.get("kind") == "simulated":
        rate = min(rate, float(engine.link["bytes_per_s"]))
    latency = assumed.copy_s.value + float(engine.link.get("latency_s") or 0.0)
    channel = Channel(latency, 1.0 / rate, assumed.segment_s.value)
    beside_share = min(1.0, rate / sheet.memory_bytes_per_s)
    return SwapRoofline(
        save=channel,
        load=channel,
        fixed_s=assumed.swap_s.value,
        alone_s=0.0,
        save_share=beside_share,
        load_alone_share=1.0,
        load_beside_share=beside_share,
        save_queue_share=0.0,
        load_queue_share=1.0,
        load_held_share=1.0,
    )


# ---- by name ----


def load_cost_model(model: str | Path | CostModel, allow_python: bool = True) -> CostModel:
    """Return a cost model as it is, or load one by name.

    A name is one that :func:`load` takes, or ``python:MODULE:FACTORY[,KEY=VALUE...]``. The latter runs that module, so
    names that were read from a file must be loaded without ``allow_python``.

    Raises ModelError for a model that cannot be loaded, :class:`kvpolicy.extensions.ExtensionError` for a module path
    that is refused or yields no cost model.
    """
    if isinstance(model, CostModel):
        return model
    if isinstance(model, str) and extensions.is_module_path(model):
        loaded: CostModel = extensions.from_module(model, CostModel, "cost model", allow_python)
        return loaded
    return load(model)


def load(name: str | Path, pinned: bool = True) -> FittedModel:
    """Load a cost model by name or folder, as :func:`kvpolicy.cost.store.load`, or build an untrained one.

    The name of an untrained model is ``analytic:DEVICE[@LINK]:CONFIG``, where CONFIG is a config.json or its folder.
    ``pinned``: whether its host memory is page-locked; a trained model has that of its measurements.

    Raises ModelError for a model that cannot be loaded, and for plain ``analytic``, which needs a running engine;
    WrongValue for anything but a text and a path.
    """
    refuse_other("cost_model", name, (str, Path), "a CostModel, a folder or a name")
    if isinstance(name, str) and extensions.is_module_path(name):
        raise ModelError(
            f"cost model {name!r}: names a module, should be a model with laws; a cost model of your own decides in a "
            f"policy, as cheapest:{name}"
        )
    return _load(name, replace(UNKNOWN_ENGINE, pinned=pinned), "auto")


def _load(name: str | Path, engine: EngineSpec, kv_cache_dtype: str) -> FittedModel:
    """``engine``: the engine that an untrained model is built for; shape and device come from the name."""
    kind, _, rest = str(name).partition(":")
    if kind != ANALYTIC or Path(name).is_dir():
        return store.load(name)
    device, _, config = rest.partition(":")
    if not device or not config:
        raise ModelError(
            f"cost model {name}: without a running engine it should be analytic:DEVICE[@LINK]:CONFIG, "
            "as analytic:H100-SXM@pcie5:path/to/config.json"
        )
    device_name, _, link = device.partition("@")
    sheet, sheet_of_link = _sheet(device_name), _link(link) if link else None
    shape = _shape(config, kv_cache_dtype)
    geometry = Geometry.of_shape(shape, engine.ranks)
    if engine.geometry:  # 16-bit types cost the same, so the engine's type is taken
        geometry = replace(geometry, dtype=engine.geometry["dtype"])
    same_device = known_sheet(engine.hardware.get("device")) == sheet
    # Of windows and states the engine alone knows how many layers share a block; see check_fit for the rest.
    block_bytes = engine.block_bytes if geometry.window_layers or geometry.state_layers else None
    target = replace(
        engine, geometry=geometry.to_dict(), block_bytes=block_bytes, hardware=engine.hardware if same_device else {}
    )
    return replace(untrained(shape, sheet, sheet_of_link, target), name=str(name))


def _sheet(device: str) -> DeviceSheet:
    try:
        return device_sheet(device)
    except SheetError as error:
        raise ModelError(str(error)) from error


def _link(link: str) -> LinkSheet:
    try:
        return link_sheet(link)
    except SheetError as error:
        raise ModelError(str(error)) from error


def _shape(config: str, kv_cache_dtype: str) -> ModelShape:
    try:
        return ModelShape.read(config, kv_cache_dtype)
    except ConfigError as error:
        raise ModelError(str(error)) from error


def engine_loader(
    config: Mapping[str, Any], engine: EngineSpec, kv_cache_dtype: str = "auto"
) -> Callable[[str], FittedModel]:
    """Loader for :func:`kvpolicy.policy.load` inside a server: ``analytic`` is the untrained model of this engine.

    ``config``: the model's Hugging Face configuration as a dictionary. ``engine.hardware["device"]`` selects the data
    sheet. ``analytic:DEVICE:CONFIG`` uses this engine's token budget, ranks and link; ``check_fit`` verifies that
    device and model are the engine's. Every other name is loaded as by :func:`load`.

    For ``analytic`` the loader raises ModelError if the device has no sheet (a CPU), the engine names no device, or the
    configuration is not supported.
    """

    def load_for_engine(name: str) -> FittedModel:
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

    return load_for_engine
