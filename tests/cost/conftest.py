"""A stored model, to read and to damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy.training import train
from tests.synthetic import CostLaw, make_trace


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    make_trace(seed=1, states=160, law=CostLaw(bend=0.4)).write(folder / "trace")
    train([folder / "trace"], folder / "mine")
    return folder / "mine"


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    for file in trained.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path
