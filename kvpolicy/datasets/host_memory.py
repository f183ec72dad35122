"""Kind of host memory that a trace's copies used: page-locked (pinned) or pageable. Costs of swaps differ by it."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow.compute as pc

from kvpolicy.trace import Trace, TraceError


def pinned_by_core(folder: str, trace: Trace) -> dict[str, bool]:
    """Whether each engine core copied from and to page-locked memory.

    Cores without transfers are absent, and so are those of simulators, whose links have no kind of host memory.
    An engine has one host pool, so a core whose transfers say both is refused with TraceError. ``folder``: name of the
    trace in it.
    """
    transfers = trace.table("transfers")
    pinned: dict[str, bool] = {}
    for value in (True, False):
        for core in pc.unique(transfers.filter(pc.equal(transfers["pinned"], value))["core"]).to_pylist():
            if trace.headers[core].source == "simulation":
                continue
            if core in pinned:
                raise TraceError(
                    f"{folder}: table transfers, core {core}: pinned is true in some rows and false in others, should "
                    "be the same in all of an engine core"
                )
            pinned[core] = value
    return pinned


def common_host_memory(traces_by_name: Mapping[str, Trace]) -> bool | None:
    """Whether the host pools of all cores were page-locked; None without transfers. ``traces_by_name``: by folder.

    Raises TraceError, naming both cores, where they differ.
    """
    pinned = {
        core: value for name, trace in traces_by_name.items() for core, value in pinned_by_core(name, trace).items()
    }
    cores = {value: core for core, value in pinned.items()}
    if len(cores) > 1:
        raise TraceError(
            f"cores {cores[True]} and {cores[False]} copied over page-locked and over pageable host memory (table "
            "transfers, column pinned); use the logs of one kind at a time"
        )
    return next(iter(cores), None)


def memory_name(pinned: bool) -> str:
    return "page-locked" if pinned else "pageable"
