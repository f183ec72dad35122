"""Cost models: what an option will cost the engine. Loading one imports nothing that trains one."""

from kvpolicy.cost.live import LiveCost, LiveCosts
from kvpolicy.cost.model import CostModel, FittedModel, ModelError, ModelWarning
from kvpolicy.cost.store import load, shipped
from kvpolicy.cost.undisturbed import StepTimeModel

__all__ = [
    "CostModel",
    "FittedModel",
    "LiveCost",
    "LiveCosts",
    "ModelError",
    "ModelWarning",
    "StepTimeModel",
    "load",
    "shipped",
]
