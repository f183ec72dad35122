"""Costs of both options by a model."""

from __future__ import annotations

from kvpolicy.cost.model import CostModel
from kvpolicy.events import Cost, Preemption
from tests.synthetic import options_for


def predicted(model: CostModel, victim: Preemption) -> tuple[Cost, ...]:
    return model.predict(victim, options_for(victim))
