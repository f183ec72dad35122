"""Operators put together to layers and head."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvpolicy
from kvpolicy.simulator.hardware.operator_tables import TableError
from kvpolicy.simulator.hardware.table_times import load_hardware
from tests.simulator import tables
from tests.simulator.hardware.step_loads import SHAPE, step_load
from tests.simulator.tables import LAYERS

SHAPES = ((768, 512), (512, 512), (2048, 512), (512, 1024), (4096, 512))
"""Joined q, k, v; output; joined gate and up; down; head."""


def test_matrix_products_make_layers_and_head(tmp_path: Path) -> None:
    files = [tables.gemm(tmp_path, SHAPES), *tables.aiconfigurator_attention(tmp_path)]
    profile = kvpolicy.import_profile(files, tmp_path / "out", SHAPE)
    times = load_hardware(tmp_path / "out")
    linear = LAYERS * (4 * 10 + sum(n * k for n, k in SHAPES[:4]) / 1e6 * 16) + 10 + 16 * 4096 * 512 / 1e6
    elementwise = LAYERS * (4 * 2.5e-6 + 16 * (8 * 512 + 2 * (512 + 128) + 3 * 1024) * 2 / (0.68 * 3350e9))
    attention = LAYERS * 1e-6 * (5 + 0.01 * 16 * 1024)
    assert times.step_s(step_load(16, 1024)) == pytest.approx(1e-6 * linear + elementwise + attention, rel=1e-4)
    assert any("operators" in note or "are in no table" in note for note in profile.model.notes)
    fewer = [tables.gemm(tmp_path, SHAPES[1:]), *files[1:]]
    guessed = kvpolicy.import_profile(fewer, tmp_path / "out", SHAPE)
    assert any("768 x 512 not measured" in note for note in guessed.model.notes)


def test_operators_of_vidur_fit_their_own_model_alone(tmp_path: Path) -> None:
    files = [tables.vidur(tmp_path), tables.gemm(tmp_path, SHAPES), *tables.aiconfigurator_attention(tmp_path)]
    kvpolicy.import_profile(files, tmp_path / "out", SHAPE)
    us = LAYERS * 9 * (5 + 0.01 * 16) + 2 + (10 + 16 * 4096 * 512 / 1e6) + LAYERS * (5 + 0.01 * 16 * 1024)
    assert load_hardware(tmp_path / "out").step_s(step_load(16, 1024)) == pytest.approx(1e-6 * us, rel=1e-4)
    with pytest.raises(TableError, match="no rows of attn_pre_proj for hidden 512"):
        kvpolicy.import_profile([tables.vidur(tmp_path, workers=2), *files[1:]], tmp_path / "out", SHAPE)


def test_missing_and_repeated_operators_are_named(tmp_path: Path) -> None:
    attention, dense, each = tables.llmservingsim(tmp_path)
    context, generation = tables.aiconfigurator_attention(tmp_path)
    out = tmp_path / "out"
    for files, said in (
        ([attention, each], "no table holds projections and MLP"),
        ([attention, dense], "no table holds the head"),
        ([dense, each, context], "no table holds attention"),
        ([attention, dense, each, attention], "hold the same operators"),
    ):
        with pytest.raises(TableError, match=said):
            kvpolicy.import_profile(files, out, SHAPE, link="pcie5")
    unknown = tables.write(tmp_path / "unknown.csv", [{"layer": "gate", "tokens": n, "time_us": 1.0} for n in (1, 2)])
    with pytest.raises(TableError, match="operator 'gate' has no known place"):
        kvpolicy.import_profile([attention, unknown, each], out, SHAPE, link="pcie5")
    only = tables.write(tmp_path / "only.csv", [{"layer": "o_proj", "tokens": n, "time_us": 1.0} for n in (1, 2)])
    with pytest.raises(TableError, match="no operator qkv_proj or q_proj"):
        kvpolicy.import_profile([attention, only, each], out, SHAPE, link="pcie5")
    assert not out.exists()
    profile = kvpolicy.import_profile([attention, dense, each, context, generation], out, SHAPE)
    assert {"context.parquet: not used", "generation.parquet: not used"} <= set(profile.model.notes)
