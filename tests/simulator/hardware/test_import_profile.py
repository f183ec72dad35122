"""Published tables become step times: measured points as measured, between them linear, beyond them physics."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import kvpolicy
from kvpolicy.cli import main
from kvpolicy.shape import ModelShape
from kvpolicy.simulator.hardware.table_times import load_hardware
from tests.shape.configs import GRANITE_4_SMALL
from tests.simulator import tables
from tests.simulator.hardware.step_loads import SHAPE, step_load
from tests.simulator.tables import CONFIG, LAYERS


def test_a_wrong_link_is_refused_before_a_table_is_read(tmp_path: Path) -> None:
    for wrong in ({"link": "0"}, {"device": "nobody's"}):
        with pytest.raises(ValueError, match="link"):
            kvpolicy.import_profile([tmp_path / "is not there"], tmp_path, SHAPE, **wrong)


def test_tables_of_another_number_of_ranks_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    """Tables without shapes: what their names say of tensor parallelism is all there is to check."""
    (tmp_path / "tp1").mkdir()
    files = []
    for name in ("attention.csv", "dense.csv", "per_sequence.csv"):
        files.append(tmp_path / "tp1" / name)
        files[-1].write_bytes((folder / name).read_bytes())
    with pytest.raises(ValueError, match=r"attention\.csv: its name says tp1, ranks is 2"):
        kvpolicy.import_profile(files, tmp_path / "out", SHAPE, ranks=2, link="pcie5")
    kvpolicy.import_profile(files, tmp_path / "out", SHAPE, ranks=1, link="pcie5")


def test_phases_measured_apart_take_as_long_together(tmp_path: Path) -> None:
    _, dense, each = tables.llmservingsim(tmp_path)
    profile = kvpolicy.import_profile(
        [dense, each, *tables.aiconfigurator_attention(tmp_path)], tmp_path / "out", SHAPE
    )
    times = load_hardware(tmp_path / "out")
    assert profile.model.mixed is None and profile.model.device == "NVIDIA H100 80GB HBM3"
    us = tables.dense_us(272) + tables.sequences_us(17) + LAYERS * ((5 + 256 + 1e-3 * 256 * 257 / 2) + (5 + 163.84))
    assert times.step_s(step_load(16, 1024, ((256, 0),))) == pytest.approx(1e-6 * us, rel=1e-4)
    behind = step_load(chunks=((256, 2048),))
    us = tables.dense_us(256) + tables.sequences_us(1) + LAYERS * (5 + 256 + 1e-3 * behind.chunk_context)
    assert times.step_s(behind) == pytest.approx(1e-6 * us, rel=0.02)
    assert times.beyond(np.array([behind], np.float64)).all()
    assert any("behind context were not measured" in note for note in profile.model.notes)


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    config = dict(CONFIG) | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    with pytest.raises(ValueError, match="mixture of experts"):
        kvpolicy.import_profile(tables.llmservingsim(tmp_path), tmp_path / "out", ModelShape.from_config(config))


def test_layers_that_keep_a_state_are_refused(tmp_path: Path) -> None:
    config = GRANITE_4_SMALL | {"num_local_experts": 0}
    with pytest.raises(ValueError, match="layers that keep a state"):
        kvpolicy.import_profile(tables.llmservingsim(tmp_path), tmp_path / "out", ModelShape.from_config(config))


def test_the_command_is_the_function(tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(CONFIG)))
    files = [str(folder / name) for name in ("attention.csv", "dense.csv", "per_sequence.csv")]
    with pytest.raises(SystemExit) as ended:
        main(["import-profile", *files, "--out", str(tmp_path), "--geometry", str(tmp_path), "--link", "pcie5"])
    assert ended.value.code in (0, None)
    assert "attention, mixed: 256 points, 100% of them measured" in capsys.readouterr().out
    there, here = (json.loads((one / "hardware.json").read_text()) for one in (folder / "out", tmp_path))
    assert here["digest"] == there["digest"]
    with pytest.raises(SystemExit) as ended:
        main(["import-profile", *files[:1], "--out", str(tmp_path), "--geometry", str(tmp_path), "--link", "pcie5"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("kvpolicy: error: no table holds projections")
