"""Cost models: what an option will cost the engine. Loading one imports nothing that trains one."""

from kvpolicy.cost.model import CostModel, FittedModel, ModelError, ModelWarning
from kvpolicy.cost.store import load, shipped

__all__ = ["CostModel", "FittedModel", "ModelError", "ModelWarning", "load", "shipped"]
