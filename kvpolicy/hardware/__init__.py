"""The machine and the model's shape: what a measured cost belongs to; and what vendors say of devices and links."""

from kvpolicy.hardware.engine_spec import EngineSpec
from kvpolicy.hardware.geometry import Geometry, available_memory_bytes, describe, fingerprint, same_machine

__all__ = ["EngineSpec", "Geometry", "available_memory_bytes", "describe", "fingerprint", "same_machine"]
