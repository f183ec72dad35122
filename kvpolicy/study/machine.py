"""What ``--hardware`` names: how long steps and copies take, and what a KV block weighs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvpolicy import cost
from kvpolicy.cost import ModelError
from kvpolicy.cost.sheets import known_sheet
from kvpolicy.hardware import Geometry
from kvpolicy.simulator import Times
from kvpolicy.simulator.hardware import FILE, load_hardware
from kvpolicy.simulator.times import law_times, untrained_times

FORMS = (
    "a folder that `kvpolicy import-profile` wrote, a cost model (a folder, or the name of one that ships), "
    "or DEVICE[@LINK]:CONFIG, as H100-SXM@pcie5:path/to/config.json"
)


@dataclass(frozen=True, slots=True)
class Machine:
    """One device with one model on it."""

    times: Times
    geometry: Geometry
    kv_bytes_per_token: float
    hardware: Mapping[str, Any]
    """As in a trace's header: ``device`` at least."""
    digest: str
    unmeasured: tuple[str, ...] = ()
    """What of it nobody has measured, for a person."""

    def block_bytes(self, block_size: int) -> int:
        return round(self.kv_bytes_per_token * block_size)

    @property
    def waits_for_copies(self) -> bool:
        """Whether a step waits for the copies that it brings, as on a CPU, whose memory is the host's."""
        return self.hardware.get("device") == "cpu"

    def slowdown(self, bytes_per_s: float) -> float:
        """Share by which a copy at that rate slows the steps beside it: what it takes of the memory's bandwidth.

        0 where nobody says what the device's memory gives.
        """
        sheet = known_sheet(self.hardware.get("device"))
        return 0.0 if sheet is None else min(1.0, bytes_per_s / sheet.memory_bytes_per_s)
