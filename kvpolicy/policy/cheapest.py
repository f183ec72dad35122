"""The option a cost model predicts to take the least engine time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpolicy.cost import CostModel
from kvpolicy.events import Cost, Option, Preemption
from kvpolicy.policy.protocol import Assessment, PolicyBase, PolicyState, all_on


@dataclass(frozen=True)
class Cheapest(PolicyBase):
    """Ties go to the first option: recompute."""

    name: str
    cost_model: CostModel

    def assess(self, situation: Preemption, options: Sequence[Option], state: PolicyState) -> Assessment:
        costs = self.cost_model.predict(situation, options)
        return all_on(lowest(costs), len(options)), costs


def lowest(costs: Sequence[Cost]) -> int:
    """Index of the lowest predicted ``engine_s``, the first of equals."""
    return min(range(len(costs)), key=lambda i: costs[i].engine_s)
