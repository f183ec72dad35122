"""A hardware model imported from published tables, on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvpolicy
from tests.simulator import tables
from tests.simulator.hardware.step_loads import SHAPE


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hardware")
    kvpolicy.import_profile(tables.llmservingsim(made), made / "out", SHAPE, link="pcie5")
    return made
