"""The constants behind the laws: what each means, which values are plausible, what is assumed before any measurement.

Facts (a device's peak rates) are in :mod:`kvpolicy.hardware.sheets`. What share of them is reached is never a fact: it
is calibrated from a trace, or assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvpolicy.cost.laws import Law, RecomputeRoofline, SwapRoofline
from kvpolicy.events import Kind
from kvpolicy.hardware import Geometry
from kvpolicy.hardware.sheets import DeviceSheet


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
    low, high = PLAUSIBLE_FLOPS if sheet is None else (0.02 * sheet.bf16_flops, _most_flops(sheet))
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


def _most_flops(sheet: DeviceSheet) -> float:
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
