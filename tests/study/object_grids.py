"""A grid whose workload or hardware is an object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kvpolicy
from kvpolicy import Workload
from kvpolicy.study.config import Run, Serving
from kvpolicy.study.report import SweepReport
from kvpolicy.workload import open_workload

NAME = "azure-conversation-2023?n=30&context=1024"
MODEL = "cpu-llama-native"
TIGHT = 200


def workload(name: str = NAME) -> Workload:
    source = open_workload(f"{name}&seed=0")
    return Workload(source.name, tuple(source), source.seed, source.source)


def simulate(workload: Any, hardware: Any, cache: Path, **more: Any) -> SweepReport:
    run = Run(cache=cache, **({"jobs": 0} | more))
    report = kvpolicy.simulate([workload], ["always-swap"], [TIGHT], hardware, serving=Serving(32), run=run)
    assert report.ok, report.text()
    return report
