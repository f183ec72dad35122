"""Cost models: what an option will cost the engine. Loading one imports nothing that trains one."""

from kvpolicy.cost.model import CostModel, FittedModel, ModelError, ModelWarning
from kvpolicy.cost.store import holds_model, shipped
from kvpolicy.cost.untrained import ANALYTIC, Engine, engine_loader, load, untrained

__all__ = [
    "ANALYTIC",
    "CostModel",
    "Engine",
    "FittedModel",
    "ModelError",
    "ModelWarning",
    "engine_loader",
    "holds_model",
    "load",
    "shipped",
    "untrained",
]
