"""The machine and the model's shape that measured costs belong to, and data sheets of devices and links."""

from kvpolicy.hardware.engine_spec import EngineSpec
from kvpolicy.hardware.geometry import (
    Geometry,
    available_memory_bytes,
    describe,
    fingerprint,
    same_machine,
    total_memory_bytes,
)

__all__ = [
    "EngineSpec",
    "Geometry",
    "available_memory_bytes",
    "describe",
    "fingerprint",
    "same_machine",
    "total_memory_bytes",
]
