"""A grid of chosen policies over one workload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvpolicy
from kvpolicy.study.config import Run
from kvpolicy.study.report import SweepReport

WORKLOAD = "azure-conversation-2023?n=30&context=1024"
TIGHT = 200


def simulate(hardware: str, cache: Path, policies: Sequence[Any], **more: Any) -> SweepReport:
    return kvpolicy.simulate([WORKLOAD], policies, [TIGHT], hardware, run=Run(cache=cache, **({"jobs": 0} | more)))
