"""What vLLM 0.32 takes where a server's flags say nothing, by device: ``EngineArgs.get_batch_defaults``, API server."""

from __future__ import annotations

from dataclasses import dataclass

from kvpolicy.hardware.sheets import known_sheet

GIB = 2**30


@dataclass(frozen=True, slots=True)
class ServerDefaults:
    """Flags of one server."""

    token_budget: int
    max_num_seqs: int
    asynchronous: bool
    """Whether it schedules one step ahead."""


CPU = ServerDefaults(2048, 128, False)
LARGEST = ServerDefaults(16384, 1024, True)
LARGE = ServerDefaults(8192, 1024, True)
OTHER = ServerDefaults(2048, 256, True)
"""Also of an A100 of whatever size, and of a device whose memory nobody knows."""


def server_defaults(device: str) -> ServerDefaults:
    """By the name that a trace's header or a data sheet has for it; memory as its data sheet says."""
    if device == "cpu":
        return CPU
    sheet = known_sheet(device)
    if sheet is None:
        return OTHER
    if sheet.memory_bytes >= 160 * GIB:
        return LARGEST
    names = " ".join((sheet.name, *sheet.device_names)).casefold()
    return LARGE if sheet.memory_bytes >= 70 * GIB and "a100" not in names else OTHER
