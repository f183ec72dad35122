"""What ``--hardware`` names: how long steps and copies take, and what a KV block weighs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvpolicy.cost import Engine, FittedModel
from kvpolicy.cost.sheets import known_sheet
from kvpolicy.hardware import Geometry
from kvpolicy.simulator import Times

FORMS = (
    "a folder that `kvpolicy import-profile` wrote, a cost model (a folder, or the name of one that ships), "
    "or DEVICE[@LINK]:CONFIG, as H100-SXM@pcie5:path/to/config.json"
)
PROBE_BYTES = 2**28
"""Bytes of the copy that a link's bandwidth is told by: so many that its latency does not matter."""


@dataclass(frozen=True)
class Machine:
    """One device with one model on it."""

    times: Times
    geometry: Geometry
    kv_bytes_per_token: float
    hardware: Mapping[str, Any]
    """As in a trace's header: ``device`` at least."""
    digest: str
    model_loader: Callable[[Engine], Callable[[str], FittedModel]]
    """Loads cost models by name as a server of this machine would: ``analytic`` is its own."""
    own_model: str | None
    """Name of a cost model that fits it, where there is one."""
    unmeasured: tuple[str, ...] = ()
    """What of it nobody has measured, for a person."""

    def block_bytes(self, block_size: int) -> int:
        return round(self.kv_bytes_per_token * block_size)

    @property
    def waits_for_copies(self) -> bool:
        """Whether a step waits for the copies that it brings, as on a CPU, whose memory is the host's."""
        return self.hardware.get("device") == "cpu"

    def slowdown(self, times: Times) -> float:
        """Share by which a copy slows the steps beside it: what it takes of the device memory's bandwidth.

        0 where nobody says what that is.
        """
        sheet = known_sheet(self.hardware.get("device"))
        if sheet is None:
            return 0.0
        rate = PROBE_BYTES / times.copy_s("load", PROBE_BYTES, 1, PROBE_BYTES)
        return min(1.0, rate / sheet.memory_bytes_per_s)
