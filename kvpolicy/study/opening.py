"""Workloads by name: those of :mod:`kvpolicy.workload`, recorded traces, and requests of measured runs."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from kvpolicy.simulator.recorded import RECORDED
from kvpolicy.simulator.requests_csv import ARRIVAL, COUNTS, measured_requests
from kvpolicy.workload import Format, Source, open_workload
from kvpolicy.workload.files import cells, lines
from kvpolicy.workload.options import Options

KEPT = 16
"""Opened workloads that a process keeps: to give one a rate, its file is read through."""
MEASURED = "requests"


def _measured(path: Path, options: Options) -> Source:
    options.whole("seed", 0)  # every workload may be given one; these are not drawn
    return measured_requests(path)


def _is_measured(path: Path) -> bool:
    if path.is_dir():
        return False
    first = next((line for _, line in lines(path)), "")
    return {*COUNTS, ARRIVAL} <= {name.strip() for name in cells(first)}


FORMATS = {**RECORDED, MEASURED: Format(f"CSV: {', '.join((*COUNTS, ARRIVAL))}", _measured, _is_measured)}


@lru_cache(maxsize=KEPT)
def opened(workload: str, digest: str) -> Source:
    """The workload of that name. ``digest``: of what it is read from, which tells it from what was there before.

    Raises WorkloadError, a ValueError, for what is not known, listing what is.
    """
    return open_workload(workload, FORMATS)
