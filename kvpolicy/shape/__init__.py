"""Model shapes from Hugging Face configurations."""

from kvpolicy.shape.layers import Attention, ConfigError, Mlp
from kvpolicy.shape.model import LayerKind, ModelShape
from kvpolicy.shape.precision import Precision

__all__ = ["Attention", "ConfigError", "LayerKind", "Mlp", "ModelShape", "Precision"]
