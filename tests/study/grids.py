"""A small grid: one workload, three policies, little memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kvpolicy
from kvpolicy.study.report import SweepReport
from tests.study.conftest import grouped

WORKLOAD = "azure-conversation-2023?n=30&context=1024"
POLICIES = ("always-recompute", "always-swap", "threshold:512")
TIGHT = 200
"""Blocks of 16 tokens: three of the longest requests."""


def simulate(hardware: str, cache: Path, **more: Any) -> SweepReport:
    values: dict[str, Any] = {"workloads": [WORKLOAD], "policies": POLICIES, "kv_blocks": [TIGHT], "jobs": 0}
    return kvpolicy.simulate(hardware=hardware, **grouped(cache=cache, **(values | more)))
