"""InferCept's minimum-waste rule: the option that leaves less device memory idle, in token-seconds.

Abhyankar et al., "InferCept: Efficient Intercept Support for Augmented Large Language Model Inference", ICML 2024,
PMLR 235:81-95. There a request pauses for a tool; here it is preempted, so keeping its memory is no option. Waste is
memory that does no work times how long. With C the victim's context and C_other that of the requests beside it:

    discard, recomputed in chunks:  T_forward(C) * C / 2 + T_forward(C) * C_other
    swap, out and back:             2 * T_copy(C) * (C + C_other)

A recompute fills its memory chunk by chunk, half of it on the mean, and delays the others by the time it takes; a
copy in either direction is taken to stop the whole batch. Bytes per token are a factor of both sides and left out.
Not taken over: InferCept hides copies within a budget of bytes per iteration and counts those as free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpolicy.cost import CostModel, FittedModel
from kvpolicy.cost.laws import SwapRoofline
from kvpolicy.events import Cost, Option, Preemption
from kvpolicy.features import features_of
from kvpolicy.policy.base import Assessment, PolicyBase, PolicyState, all_on

OWN_SHARE = 0.5
"""Of the victim's memory, held on the mean while chunks fill it evenly."""


@dataclass(frozen=True)
class MinWaste(PolicyBase):
    """Both times come from a cost model. Ties go to the first option: recompute."""

    name: str
    cost_model: CostModel

    def assess(self, situation: Preemption, options: Sequence[Option], state: PolicyState) -> Assessment:
        costs = self.cost_model.predict(situation, options)
        wastes = [self._waste(situation, *pair) for pair in zip(options, costs, strict=True)]
        return all_on(min(range(len(wastes)), key=wastes.__getitem__), len(options)), costs

    def _waste(self, situation: Preemption, option: Option, cost: Cost) -> float:
        own, other = situation.computed_tokens, situation.batch_tokens
        if option.kind == "recompute":
            return discard_waste(cost.recompute_s, own, other)
        return swap_waste(copies_s(self.cost_model, situation, option, cost), own, other)


def discard_waste(forward_s: float, own_tokens: int, other_tokens: int) -> float:
    """Token-seconds of a recompute that takes the engine ``forward_s``."""
    return forward_s * (OWN_SHARE * own_tokens + other_tokens)


def swap_waste(both_copies_s: float, own_tokens: int, other_tokens: int) -> float:
    """Token-seconds of copies that take ``both_copies_s``, out and back together."""
    return both_copies_s * (own_tokens + other_tokens)


def copies_s(model: CostModel, situation: Preemption, option: Option, cost: Cost) -> float:
    """How long the link is busy with both copies, whatever of it the engine feels.

    Of a model whose law knows no link (``linear``): what its prediction puts down to them.
    """
    law = model.laws["swap"] if isinstance(model, FittedModel) else None
    if not isinstance(law, SwapRoofline):
        return cost.save_s + cost.load_s
    x = features_of(situation, option)
    return law.save.seconds(x.save_bytes, x.save_segments) + law.load.seconds(x.load_bytes, x.load_segments)
