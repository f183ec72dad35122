"""Cost models: predict what each option of a preemption costs the engine. Loading one imports no training code."""

from kvpolicy.cost.analytic import ANALYTIC, engine_loader, load, load_cost_model, untrained
from kvpolicy.cost.model import CostModel, FittedModel, ModelError, ModelWarning
from kvpolicy.cost.store import holds_model, shipped

__all__ = [
    "ANALYTIC",
    "CostModel",
    "FittedModel",
    "ModelError",
    "ModelWarning",
    "engine_loader",
    "holds_model",
    "load",
    "load_cost_model",
    "shipped",
    "untrained",
]
