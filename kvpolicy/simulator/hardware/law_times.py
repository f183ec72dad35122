"""Times of steps and copies by laws: constants, or those of a cost model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvpolicy.arrays import Floats
from kvpolicy.attribution import StepTimeModel
from kvpolicy.cost import FittedModel, ModelError
from kvpolicy.cost.laws import Channel, RecomputeRoofline, SwapRoofline
from kvpolicy.events import Direction
from kvpolicy.simulator.base import LOAD, StepLoad


@dataclass(frozen=True, slots=True)
class ConstantTimes:
    """Linear in what a step computes and a copy moves, with constants from the user; also for tests."""

    fixed_s: float = 5e-3
    per_part_s: tuple[float, ...] = (1e-5, 1e-5, 1e-8, 1e-9, 0.0, 0.0)
    """Seconds per unit of each of :data:`LOAD`."""
    copy_latency_s: float = 1e-4
    copy_bytes_per_s: float = 1e10
    per_segment_s: float = 0.0
    source: str = "constants, made up"

    def __post_init__(self) -> None:
        if len(self.per_part_s) != len(LOAD) or self.copy_bytes_per_s <= 0:
            raise ModelError(f"{self}: per_part_s should hold {len(LOAD)} numbers, copy_bytes_per_s be above 0")

    def step_s(self, load: StepLoad) -> float:
        return linear(self.fixed_s, self.per_part_s, load)

    def steps_s(self, loads: Floats) -> Floats:
        return np.asarray(linear(self.fixed_s, self.per_part_s, loads.T), dtype=np.float64)

    def copy_s(self, direction: Direction, copied_bytes: int, segments: int, segment_bytes: int) -> float:
        return self.copy_latency_s + copied_bytes / self.copy_bytes_per_s + segments * self.per_segment_s


def linear(fixed_s: float, per_part_s: tuple[float, ...], parts: StepLoad | Floats) -> float:
    """Weighted sum of numbers, or of columns, added in a fixed order so that both agree to the last bit."""
    total = fixed_s
    for seconds, part in zip(per_part_s, parts, strict=True):
        total = total + seconds * part
    return total


class StepLaw(Protocol):
    """Seconds of steps from the columns of :data:`LOAD`; arrays give an array."""

    def seconds(self, parts: StepLoad | Floats) -> Any: ...


@dataclass(frozen=True, slots=True)
class FittedSteps:
    """The step-time model (what a step takes undisturbed) of a trained cost model.

    There a step's time also depends on the prefills of the two steps before it, which leave cold caches. Here this
    aftermath is charged to the prefill's own step: the sum is the same, one or two steps earlier.
    """

    model: StepTimeModel

    def seconds(self, parts: StepLoad | Floats) -> Any:
        return self.model.own_s(parts[0], parts[1], parts[2], parts[3])


@dataclass(frozen=True, slots=True)
class RooflineSteps:
    """Step times by the constants of a :class:`RecomputeRoofline`, which hold for any chunk.

    Linear layers take the root of compute squared plus weight traffic squared. Attention of chunks takes the longer of
    compute and KV traffic; decodes take their KV traffic. Layers with a window count as if every chunk saw a full one.
    """

    law: RecomputeRoofline

    def seconds(self, parts: StepLoad | Floats) -> Any:
        tokens, decodes, read_tokens, pairs, context_tokens = parts[0], parts[1], parts[2], parts[3], parts[5]
        law = self.law
        chunks = tokens - decodes
        weights = law.weight_s
        if law.expert_s:
            weights = weights + law.expert_s * (1.0 - law.expert_miss**tokens)
        linear_s = np.sqrt((law.s_per_token * tokens) ** 2 + weights**2)
        compute_s = law.s_per_pair * pairs
        if law.s_per_window_pair:
            compute_s = compute_s + law.s_per_window_pair * np.minimum(pairs, law.window_tokens * chunks)
        attention_s = np.maximum(compute_s, law.s_per_kv_token * (context_tokens + chunks))
        return law.alone_s + linear_s + attention_s + law.s_per_kv_token * read_tokens


@dataclass(frozen=True, slots=True)
class LawTimes:
    """Times by a cost model: steps by its step-time model or roofline, copies by its link."""

    law: StepLaw
    save: Channel
    load: Channel
    source: str

    def step_s(self, load: StepLoad) -> float:
        return float(self.law.seconds(load))

    def steps_s(self, loads: Floats) -> Floats:
        return np.asarray(self.law.seconds(loads.T), dtype=np.float64)

    def copy_s(self, direction: Direction, copied_bytes: int, segments: int, segment_bytes: int) -> float:
        channel = self.save if direction == "save" else self.load
        return channel.seconds(copied_bytes, segments)


def law_times(model: FittedModel) -> LawTimes:
    """Step and copy times of a cost model, trained or not. Its residuals concern whole preemptions and are left out.

    Raises ModelError where the model has neither a step-time model nor a roofline, or no link: a linear law does not
    separate a copy's duration from its effect on the engine.
    """
    swap, recompute = model.laws["swap"], model.laws["recompute"]
    if not isinstance(swap, SwapRoofline):
        raise ModelError(f"cost model {model.name}: its law of swap is no roofline and knows no copy times")
    link = f"save {_channel_text(swap.save)}, load {_channel_text(swap.load)}"
    if model.step_time is not None:
        law: StepLaw = FittedSteps(model.step_time)
        steps_source = f"step-time model fitted on {model.step_time.fitted_on}, {model.step_time.steps} steps"
    elif isinstance(recompute, RecomputeRoofline):
        law = RooflineSteps(recompute)
        steps_source = "roofline of " + ("; ".join(model.provenance.notes) or "its training traces")
    else:
        raise ModelError(f"cost model {model.name}: it has no step times; profile this machine and train one")
    return LawTimes(law, swap.save, swap.load, f"cost model {model.name}: {steps_source}; {link}")


def _channel_text(channel: Channel) -> str:
    rate = f"{1e-9 / channel.s_per_byte:.3g} GB/s" if channel.s_per_byte else "no time per byte"
    return f"{channel.latency_s:.3g} s and {rate}"
