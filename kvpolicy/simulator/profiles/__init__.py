"""Measured tables of operators made into a hardware model: ``kvpolicy import-profile``."""

from __future__ import annotations

from kvpolicy.simulator.profiles.importing import Imported, import_profile

__all__ = ["Imported", "import_profile"]
