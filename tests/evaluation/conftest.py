"""A log of random decisions, in memory and on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy.trace import Trace
from tests.synthetic_logs import LogPlan, make_log

PLAN = LogPlan(decisions=1500)


@pytest.fixture(scope="session")
def log() -> Trace:
    return make_log(1, PLAN, host_full_share=0.1)


@pytest.fixture(scope="session")
def folder(log: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log") / "log"
    log.write(folder)
    return folder
