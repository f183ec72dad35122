"""Steps and copies by the laws of a cost model: measured ones where it was trained, else a roofline."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

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
    Raises ModelError for a trained model without d0, and for one whose law of swaps knows no link.
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
        elif isinstance(recompute, RecomputeRoofline) and not self.model.provenance.trace_digests:
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
        return self._steps.one(load)

    def steps_s(self, loads: Floats) -> Floats:
        return self._steps.many(loads)

    def copy_s(self, direction: Direction, copied_bytes: int, segments: int, segment_bytes: int) -> float:
        channel = self._swap.save if direction == "save" else self._swap.load
        return channel.seconds(copied_bytes, segments)


@dataclass(frozen=True, slots=True)
class _Fitted:
    """Both forms add in the same order, so that they agree to the last bit."""

    d0: StepTimeModel

    def one(self, load: StepLoad) -> float:
        tokens, decodes, read, pairs = load[:4]
        if tokens <= 0:
            return 0.0
        per_token, per_decode, per_read, per_pair, *aftermath = self.d0.per_part_s
        chunk = min(1.0, max(0.0, (tokens - decodes) / FULL_AFTERMATH_TOKENS))
        parts = per_token * tokens + per_decode * decodes + per_read * read + per_pair * pairs
        return self.d0.fixed_s + parts + sum(aftermath) * chunk

    def many(self, loads: Floats) -> Floats:
        tokens, decodes, read, pairs = loads.T[:4]
        per_token, per_decode, per_read, per_pair, *aftermath = self.d0.per_part_s
        chunk = np.minimum(1.0, np.maximum(0.0, (tokens - decodes) / FULL_AFTERMATH_TOKENS))
        parts = per_token * tokens + per_decode * decodes + per_read * read + per_pair * pairs
        return np.asarray(np.where(tokens > 0, self.d0.fixed_s + parts + sum(aftermath) * chunk, 0.0), np.float64)


@dataclass(frozen=True, slots=True)
class _Roofline:
    """As :func:`kvpolicy.cost.laws.recompute_seconds` has a step: the engine's own time, linear layers at the root of
    compute and weight traffic squared, attention at the longer of compute and KV traffic."""

    law: RecomputeRoofline

    def one(self, load: StepLoad) -> float:
        tokens, _, read, pairs, _, before = load
        law = self.law
        if tokens <= 0:
            return 0.0
        traffic_s = law.weight_s
        if law.expert_s:
            traffic_s += law.expert_s * (1.0 - float(np.power(law.expert_miss, float(tokens))))
        compute_s = law.s_per_token * tokens
        linear_s = sqrt(compute_s * compute_s + traffic_s * traffic_s)
        return law.alone_s + linear_s + max(law.s_per_pair * (pairs + read), law.s_per_kv_token * (read + before))

    def many(self, loads: Floats) -> Floats:
        tokens, _, read, pairs, _, before = loads.T
        law = self.law
        traffic_s = law.weight_s + law.expert_s * (1.0 - np.power(law.expert_miss, tokens))
        compute_s = law.s_per_token * tokens
        linear_s = np.sqrt(compute_s * compute_s + traffic_s * traffic_s)
        attention_s = np.maximum(law.s_per_pair * (pairs + read), law.s_per_kv_token * (read + before))
        return np.asarray(np.where(tokens > 0, law.alone_s + linear_s + attention_s, 0.0), dtype=np.float64)
