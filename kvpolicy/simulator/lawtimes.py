"""Steps and copies by the laws of a cost model: measured ones where it was trained, else a roofline."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvpolicy.cost.laws import RecomputeRoofline, SwapRoofline
from kvpolicy.cost.model import FittedModel, ModelError
from kvpolicy.cost.undisturbed import FULL_AFTERMATH_TOKENS, StepTimeModel
from kvpolicy.simulator.protocol import Direction, Floats, StepLoad


@dataclass(frozen=True)
class LawTimes:
    """Implements :class:`~kvpolicy.simulator.protocol.Times`.

    Steps of a trained model are its d0, what a chunk leaves to the two steps after it added to its own; those of an
    untrained one are the roofline that its recomputes are priced by. Copies are those of its link, one direction each.
    Raises ModelError for a model without d0 whose law of recomputes is no roofline, and for a law of swaps that knows
    no link.
    """

    model: FittedModel
    _swap: SwapRoofline = field(init=False, repr=False, compare=False)
    _steps: _Fitted | _Roofline = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        swap, recompute = self.model.laws["swap"], self.model.laws["recompute"]
        if not isinstance(swap, SwapRoofline):
            raise ModelError(f"cost model {self.model.name}: its law of swaps knows no link; train family boosted")
        object.__setattr__(self, "_swap", swap)
        if self.model.step_time is not None:
            object.__setattr__(self, "_steps", _Fitted(self.model.step_time))
        elif isinstance(recompute, RecomputeRoofline) and recompute.weight_s > 0:
            object.__setattr__(self, "_steps", _Roofline(recompute))
        else:
            raise ModelError(f"cost model {self.model.name}: it knows no step times; profile and train one")

    @property
    def source(self) -> str:
        made = self.model.provenance
        if self.model.step_time is not None:
            return f"cost model {self.model.name}: steps and copies measured on {made.hardware.get('device')}"
        return f"cost model {self.model.name}: roofline of the data sheet, steps and copies not measured"

    def step_s(self, load: StepLoad) -> float:
        return float(self.steps_s(np.array([load], dtype=np.float64))[0])

    def steps_s(self, loads: Floats) -> Floats:
        return self._steps.seconds(loads)

    def copy_s(self, direction: Direction, copied_bytes: int, segments: int, segment_bytes: int) -> float:
        channel = self._swap.save if direction == "save" else self._swap.load
        return channel.seconds(copied_bytes, segments)


@dataclass(frozen=True, slots=True)
class _Fitted:
    d0: StepTimeModel

    def seconds(self, loads: Floats) -> Floats:
        tokens, decodes = loads[:, 0], loads[:, 1]
        parts = np.asarray(self.d0.per_part_s)
        chunk = np.clip((tokens - decodes) / FULL_AFTERMATH_TOKENS, 0.0, 1.0)
        found = self.d0.fixed_s + loads[:, :4] @ parts[:4] + chunk * parts[4:].sum()
        return np.asarray(np.where(tokens > 0, found, 0.0), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class _Roofline:
    """As :func:`kvpolicy.cost.laws.recompute_seconds` has a step: the engine's own time, linear layers at the root of
    compute and weight traffic squared, attention at the longer of compute and KV traffic."""

    law: RecomputeRoofline

    def seconds(self, loads: Floats) -> Floats:
        tokens, _, read, pairs, _, before = loads.T
        law = self.law
        traffic_s = law.weight_s + law.expert_s * (1.0 - law.expert_miss**tokens)
        linear_s = np.sqrt((law.s_per_token * tokens) ** 2 + traffic_s**2)
        attention_s = np.maximum(law.s_per_pair * (pairs + read), law.s_per_kv_token * (read + before))
        return np.asarray(np.where(tokens > 0, law.alone_s + linear_s + attention_s, 0.0), dtype=np.float64)
