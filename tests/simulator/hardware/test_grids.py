"""Grids of measured points: holes filled from neighbours or by a fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvpolicy
from kvpolicy.simulator.hardware.grids import between_neighbours
from kvpolicy.simulator.hardware.table_times import load_hardware
from tests.simulator import tables
from tests.simulator.hardware.step_loads import SHAPE, expected_s, step_load


def test_a_hole_in_the_table_is_filled_by_a_fit_and_counted(tmp_path: Path) -> None:
    files = tables.llmservingsim(tmp_path)
    rows = files[0].read_text().splitlines()
    files[0].write_text("\n".join(row for row in rows if not row.startswith("64,64,4,")) + "\n")
    profile = kvpolicy.import_profile(files, tmp_path / "out", SHAPE, link="pcie5")
    assert profile.model.mixed is not None and profile.model.mixed.measured == pytest.approx(252 / 256)
    assert "predicted by a fit whose mean error on unseen points" in profile.text()
    seconds = load_hardware(tmp_path / "out").step_s(step_load(4, 256, ((64, 64),)))
    assert seconds == pytest.approx(expected_s(4, 256, 64, 64), rel=0.05)


def test_unknown_points_are_filled_from_their_neighbours() -> None:
    nothing = np.nan
    assert between_neighbours(np.array([0.0, nothing, nothing, 0.3])) == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert between_neighbours(np.array([[1.0, nothing], [3.0, nothing]])) == pytest.approx(
        np.array([[1.0, 5 / 3], [3.0, 7 / 3]])
    )
    assert between_neighbours(np.array([nothing, nothing])).tolist() == [0.0, 0.0]


def test_head_counts_without_measurements_are_filled_by_a_fit_and_noted(tmp_path: Path) -> None:
    _, dense, each = tables.llmservingsim(tmp_path)
    other = tables.aiconfigurator_attention(tmp_path, heads=16, kv_heads=4)
    profile = kvpolicy.import_profile([dense, each, *other], tmp_path / "out", SHAPE)
    assert profile.model.decode.measured == profile.model.prefill.measured == 0.0
    assert sum("8 heads on 2 KV heads not measured" in note for note in profile.model.notes) == 2
    assert load_hardware(tmp_path / "out").step_s(step_load(16, 1024)) > 0
