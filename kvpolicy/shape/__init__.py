"""Model shapes from Hugging Face configurations."""

from kvpolicy.shape.layers import Attention, ConfigError, Mlp
from kvpolicy.shape.precision import Precision
from kvpolicy.shape.transformer import LayerKind, ModelShape

__all__ = ["Attention", "ConfigError", "LayerKind", "Mlp", "ModelShape", "Precision"]
