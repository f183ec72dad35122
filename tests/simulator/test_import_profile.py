"""Published tables become step times: measured points as measured, between them linear, beyond them physics."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpolicy
from kvpolicy import policy
from kvpolicy.cli import main
from kvpolicy.hardware.engine_time import EngineTime
from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.shape import ModelShape
from kvpolicy.simulator import Builtin, MemorySink, Server
from kvpolicy.simulator.base import StepLoad
from kvpolicy.simulator.hardware import table_times
from kvpolicy.simulator.hardware.grids import between_neighbours
from kvpolicy.simulator.hardware.operator_tables import TableError
from kvpolicy.simulator.hardware.table_times import HardwareError, TableTimes, load_hardware
from kvpolicy.study.machine import Behind
from kvpolicy.workload import Request, Workload
from tests.simulator import tables
from tests.simulator.tables import CONFIG, LAYERS
from tests.simulator.worlds import LINEAR

COLUMNS = ("scheduled_tokens", "decode_requests", "kv_read_tokens", "chunk_context", "scheduled_requests")
"""Of a trace's steps: what tells whether a step lies within the tables, requests for prefills."""
SHAPE = ModelShape.from_config(CONFIG)


def load(decode: int = 0, context: int = 0, chunks: tuple[tuple[int, int], ...] = ()) -> StepLoad:
    """Requests that decode behind ``context`` tokens, the new one in, and chunks of (tokens, tokens before them)."""
    return StepLoad(
        scheduled_tokens=decode + sum(c for c, _ in chunks),
        decode_requests=decode,
        kv_read_tokens=decode * context,
        chunk_context=sum(c * k + c * (c + 1) // 2 for c, k in chunks),
        prefill_requests=len(chunks),
        prefill_context_tokens=sum(k for _, k in chunks),
    )


def worked(decode: int, context: int, chunk: int = 0, before: int = 0) -> float:
    """Seconds of a step by the laws that the tables were made from."""
    us = tables.dense_us(decode + chunk) + tables.sequences_us(decode + (chunk > 0))
    return 1e-6 * (us + LAYERS * tables.attention_us(chunk, before, decode, context))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hardware")
    kvpolicy.import_profile(tables.llmservingsim(made), made / "out", SHAPE, link="pcie5")
    return made


@pytest.fixture(scope="module")
def times(folder: Path) -> TableTimes:
    return load_hardware(folder / "out")


def test_a_measured_step_takes_what_was_measured(times: TableTimes) -> None:
    assert times.step_s(load(16, 1024)) == pytest.approx(worked(16, 1024), rel=1e-5)
    assert times.step_s(load(chunks=((256, 64),))) == pytest.approx(worked(0, 0, 256, 64), rel=1e-5)
    assert times.step_s(load(4, 256, ((64, 1024),))) == pytest.approx(worked(4, 256, 64, 1024), rel=1e-5)


def test_between_measured_points_times_are_linear_in_each_axis(times: TableTimes) -> None:
    assert times.step_s(load(10, 700)) == pytest.approx(worked(10, 700), rel=1e-5)
    assert times.step_s(load(10, 700, ((64, 300),))) == pytest.approx(worked(10, 700, 64, 300), rel=1e-5)


def test_beyond_the_tables_physics_goes_on_and_says_so(times: TableTimes) -> None:
    inside = np.array([load(10, 700), load(4, 256, ((64, 1024),)), load(chunks=((256, 0),))], np.float64)
    outside = [load(64, 20_000), load(200, 500), load(chunks=((1024, 16_000),)), load(4, 256, ((512, 0),) * 3)]
    assert not times.beyond(inside).any()
    assert times.beyond(np.array(outside, np.float64)).all()
    assert times.step_s(outside[0]) == pytest.approx(worked(64, 20_000), rel=0.02)
    assert times.step_s(outside[1]) == pytest.approx(worked(200, 500), rel=0.02)
    assert times.step_s(outside[2]) == pytest.approx(worked(0, 0, 1024, 16_000), rel=0.02)


@pytest.mark.parametrize("leap", [True, False])
def test_steps_beyond_the_tables_are_counted_in_a_run(times: TableTimes, leap: bool) -> None:
    """Two requests of 4090 prompt tokens and 100 of output: the tables end at 4096 tokens of context."""
    server = Server(16, 1024, 600, 600, token_budget=1024, hardware={"device": "simulated"})
    source = Workload("long", (Request(0.0, 4090, 100), Request(0.0, 4090, 100)), 0)
    sink = MemorySink()
    done = Builtin(leap=leap).run(source, policy.load("always-recompute"), server, times, sink=sink)
    assert done.trace is not None
    rows = np.array([[row[name] for name in COLUMNS] for row in done.trace.rows("steps")], np.float64)
    rows[:, 4] -= rows[:, 1]
    assert done.summary.extrapolated_steps == times.beyond(rows).sum() > 90
    behind = Behind(times, SimulatedLink(1e9))
    again = Builtin(leap=leap).run(source, policy.load("always-recompute"), server, behind)
    assert again.summary.extrapolated_steps == done.summary.extrapolated_steps
    assert Builtin().run(source, policy.load("always-recompute"), server, LINEAR).summary.extrapolated_steps is None


def test_several_prompts_cost_less_than_one_as_long_as_they_together(times: TableTimes) -> None:
    four, one = load(chunks=((256, 0),) * 4), load(chunks=((1024, 0),))
    saved = LAYERS * 1e-9 * (one.chunk_context - four.chunk_context) - 1e-6 * (
        tables.sequences_us(4) - tables.sequences_us(1)
    )
    assert times.step_s(one) - times.step_s(four) == pytest.approx(saved, rel=0.02)


def test_rows_and_single_steps_agree(times: TableTimes) -> None:
    rng = np.random.default_rng(0)
    drawn = rng.integers((0, 1, 2, 0), (90, 6000, 2000, 5000), (200, 4)).tolist()
    loads = [load(n, d, ((c, k),)) for n, d, c, k in drawn]
    assert times.steps_s(np.array(loads, np.float64)).tolist() == [times.step_s(one) for one in loads]


def test_another_process_gets_the_same_times(times: TableTimes) -> None:
    copied = pickle.loads(pickle.dumps(times))
    assert copied == times
    assert copied.step_s(load(10, 700)) == times.step_s(load(10, 700))


def test_more_work_never_takes_less_along_decode(times: TableTimes) -> None:
    grown = [times.step_s(load(n, 900)) for n in range(1, 200)]
    assert grown == sorted(grown)
    grown = [times.step_s(load(30, d)) for d in range(1, 20_000, 50)]
    assert grown == sorted(grown)


def test_the_engines_own_time_comes_on_top(folder: Path, tmp_path: Path, times: TableTimes) -> None:
    files = [folder / name for name in ("attention.csv", "dense.csv", "per_sequence.csv")]
    kvpolicy.import_profile(files, tmp_path, SHAPE, link="pcie5", engine=EngineTime(1e-3, 2e-3, 0.5, "a test"))
    slower = load_hardware(tmp_path)
    decode = LAYERS * 1e-6 * tables.attention_us(0, 0, 16, 1024)
    assert slower.step_s(load(16, 1024)) - times.step_s(load(16, 1024)) == pytest.approx(1e-3 + 0.5 * decode)
    chunk, both = load(chunks=((256, 64),)), load(16, 1024, ((64, 64),))
    assert slower.step_s(chunk) - times.step_s(chunk) == pytest.approx(3e-3)
    assert slower.step_s(both) - times.step_s(both) == pytest.approx(3e-3 + 0.5 * decode)
    assert "a test" in slower.source
    with pytest.raises(ValueError, match="source is missing"):
        kvpolicy.import_profile(files, tmp_path, SHAPE, link="pcie5", engine=EngineTime(1e-3))
    with pytest.raises(ValueError, match=r"uneven is -1\.0"):
        kvpolicy.import_profile(files, tmp_path, SHAPE, link="pcie5", engine=EngineTime(uneven=-1.0))


def test_copies_are_stated_and_named_as_not_measured(folder: Path, tmp_path: Path, times: TableTimes) -> None:
    assert times.copy_s("save", 10**9, 100, 10**7) == pytest.approx(5e-5 + 1e9 / (0.8 * 63.015e9) + 100 * 5e-7)
    assert "copies not measured" in times.source and "PCI Express" in times.source
    files = [folder / name for name in ("attention.csv", "dense.csv", "per_sequence.csv")]
    kvpolicy.import_profile(files, tmp_path, SHAPE, link="2e9,0.001")
    assert load_hardware(tmp_path).copy_s("load", 10**9, 0, 1) == pytest.approx(0.501)
    for wrong in ("0", "-1e9", "1e9,x", "nan"):
        with pytest.raises(ValueError, match="link"):
            kvpolicy.import_profile(files, tmp_path, SHAPE, link=wrong)
    with pytest.raises(ValueError, match="link is missing, and the device has no data sheet: name its link"):
        kvpolicy.import_profile(files, tmp_path, SHAPE)


def test_a_wrong_link_is_told_before_a_table_is_read(tmp_path: Path) -> None:
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


def test_a_hole_in_the_table_is_told_by_a_fit_and_counted(tmp_path: Path) -> None:
    files = tables.llmservingsim(tmp_path)
    rows = files[0].read_text().splitlines()
    files[0].write_text("\n".join(row for row in rows if not row.startswith("64,64,4,")) + "\n")
    made = kvpolicy.import_profile(files, tmp_path / "out", SHAPE, link="pcie5")
    assert made.model.mixed is not None and made.model.mixed.measured == pytest.approx(252 / 256)
    assert "predicted by a fit whose mean error on unseen points" in made.text()
    found = load_hardware(tmp_path / "out").step_s(load(4, 256, ((64, 64),)))
    assert found == pytest.approx(worked(4, 256, 64, 64), rel=0.05)


def test_what_is_unknown_lies_between_its_neighbours() -> None:
    nothing = np.nan
    assert between_neighbours(np.array([0.0, nothing, nothing, 0.3])) == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert between_neighbours(np.array([[1.0, nothing], [3.0, nothing]])) == pytest.approx(
        np.array([[1.0, 5 / 3], [3.0, 7 / 3]])
    )
    assert between_neighbours(np.array([nothing, nothing])).tolist() == [0.0, 0.0]


def test_a_block_is_as_large_as_the_shape_says(times: TableTimes) -> None:
    assert times.model.block_bytes(16) == 16 * LAYERS * 2 * 2 * 64 * 2


def test_phases_measured_apart_take_as_long_together(tmp_path: Path) -> None:
    _, dense, each = tables.llmservingsim(tmp_path)
    made = kvpolicy.import_profile([dense, each, *tables.aiconfigurator_attention(tmp_path)], tmp_path / "out", SHAPE)
    times = load_hardware(tmp_path / "out")
    assert made.model.mixed is None and made.model.device == "NVIDIA H100 80GB HBM3"
    us = tables.dense_us(272) + tables.sequences_us(17) + LAYERS * ((5 + 256 + 1e-3 * 256 * 257 / 2) + (5 + 163.84))
    assert times.step_s(load(16, 1024, ((256, 0),))) == pytest.approx(1e-6 * us, rel=1e-4)
    behind = load(chunks=((256, 2048),))
    us = tables.dense_us(256) + tables.sequences_us(1) + LAYERS * (5 + 256 + 1e-3 * behind.chunk_context)
    assert times.step_s(behind) == pytest.approx(1e-6 * us, rel=0.02)
    assert times.beyond(np.array([behind], np.float64)).all()
    assert any("behind context were not measured" in note for note in made.model.notes)


def test_heads_that_nobody_measured_are_told_by_a_fit_and_noted(tmp_path: Path) -> None:
    _, dense, each = tables.llmservingsim(tmp_path)
    other = tables.aiconfigurator_attention(tmp_path, heads=16, kv_heads=4)
    made = kvpolicy.import_profile([dense, each, *other], tmp_path / "out", SHAPE)
    assert made.model.decode.measured == made.model.prefill.measured == 0.0
    assert sum("8 heads on 2 KV heads not measured" in note for note in made.model.notes) == 2
    assert load_hardware(tmp_path / "out").step_s(load(16, 1024)) > 0


SHAPES = ((768, 512), (512, 512), (2048, 512), (512, 1024), (4096, 512))
"""Joined q, k, v; output; joined gate and up; down; head."""


def test_matrix_products_make_layers_and_head(tmp_path: Path) -> None:
    files = [tables.gemm(tmp_path, SHAPES), *tables.aiconfigurator_attention(tmp_path)]
    made = kvpolicy.import_profile(files, tmp_path / "out", SHAPE)
    times = load_hardware(tmp_path / "out")
    linear = LAYERS * (4 * 10 + sum(n * k for n, k in SHAPES[:4]) / 1e6 * 16) + 10 + 16 * 4096 * 512 / 1e6
    elementwise = LAYERS * (4 * 2.5e-6 + 16 * (8 * 512 + 2 * (512 + 128) + 3 * 1024) * 2 / (0.68 * 3350e9))
    attention = LAYERS * 1e-6 * (5 + 0.01 * 16 * 1024)
    assert times.step_s(load(16, 1024)) == pytest.approx(1e-6 * linear + elementwise + attention, rel=1e-4)
    assert any("operators" in note or "are in no table" in note for note in made.model.notes)
    fewer = [tables.gemm(tmp_path, SHAPES[1:]), *files[1:]]
    guessed = kvpolicy.import_profile(fewer, tmp_path / "out", SHAPE)
    assert any("768 x 512 not measured" in note for note in guessed.model.notes)


def test_vidurs_operators_are_those_of_the_same_model(tmp_path: Path) -> None:
    files = [tables.vidur(tmp_path), tables.gemm(tmp_path, SHAPES), *tables.aiconfigurator_attention(tmp_path)]
    kvpolicy.import_profile(files, tmp_path / "out", SHAPE)
    us = LAYERS * 9 * (5 + 0.01 * 16) + 2 + (10 + 16 * 4096 * 512 / 1e6) + LAYERS * (5 + 0.01 * 16 * 1024)
    assert load_hardware(tmp_path / "out").step_s(load(16, 1024)) == pytest.approx(1e-6 * us, rel=1e-4)
    with pytest.raises(TableError, match="no rows of attn_pre_proj for hidden 512"):
        kvpolicy.import_profile([tables.vidur(tmp_path, workers=2), *files[1:]], tmp_path / "out", SHAPE)


def test_what_is_missing_or_told_twice_is_said(tmp_path: Path) -> None:
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
    made = kvpolicy.import_profile([attention, dense, each, context, generation], out, SHAPE)
    assert {"context.parquet: not used", "generation.parquet: not used"} <= set(made.model.notes)


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    config = dict(CONFIG) | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    with pytest.raises(ValueError, match="mixture of experts"):
        kvpolicy.import_profile(tables.llmservingsim(tmp_path), tmp_path / "out", ModelShape.from_config(config))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("schema_version", 2, "schema_version is 2"),
        ("kind", "model", "not a hardware model"),
        ("ranks", None, "ranks is None, should be a whole number"),
        ("tokens", {"at": [1, 1], "seconds": [1, 1], "per_more_s": 0}, "tokens.at should hold two rising"),
        ("tokens", {"at": [1, 2], "seconds": [1], "per_more_s": 0}, "tokens.seconds holds 1"),
        ("sequences", {"at": [1, 2], "seconds": [1, float("nan")], "per_more_s": 0}, "sequences.seconds holds nan"),
        ("device", "another", "not that of its digest"),
    ],
)
def test_a_damaged_model_is_refused_by_file_and_field(
    folder: Path, tmp_path: Path, field: str, value: object, said: str
) -> None:
    told = json.loads((folder / "out" / "hardware.json").read_text()) | {field: value}
    (tmp_path / "hardware.json").write_text(json.dumps(told))
    with pytest.raises(HardwareError, match=said) as refused:
        load_hardware(tmp_path)
    assert str(tmp_path / "hardware.json") in str(refused.value)


WRONG: tuple[Any, ...] = (None, True, -1, "x", [], [None], {}, {"a": None})


def test_whatever_stands_where_in_a_model_it_is_read_or_refused(folder: Path, tmp_path: Path) -> None:
    told = json.loads((folder / "out" / "hardware.json").read_text())
    places = [(told, name) for name in told if name != "kind"]
    parts = ("engine", "tokens", "prefill", "copies", "geometry")
    places += [(told[part], inner) for part in parts for inner in told[part]]
    places += [(told["decode"]["axes"], "context"), (told["inputs"], 0)]
    for values, name in places:
        before = values[name]
        for wrong in (wrong for wrong in WRONG if wrong != before or type(wrong) is not type(before)):
            values[name] = wrong
            (tmp_path / "hardware.json").write_text(json.dumps(told))
            with pytest.raises(HardwareError, match=r"hardware\.json: "):
                load_hardware(tmp_path)
        values[name] = before


@pytest.mark.parametrize("fault", [TypeError, KeyError, AttributeError, ValueError])
@pytest.mark.parametrize("part", ["_grid", "_engine", "HardwareModel"])
def test_a_fault_of_the_code_is_not_blamed_on_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, part: str, fault: type[Exception]
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise fault("a fault")

    monkeypatch.setattr(table_times, part, broken)
    with pytest.raises(fault, match="a fault") as error:
        load_hardware(folder / "out")
    assert not isinstance(error.value, HardwareError)


def test_grids_of_another_size_and_files_that_are_none_are_refused(folder: Path, tmp_path: Path) -> None:
    told = json.loads((folder / "out" / "hardware.json").read_text())
    told["decode"]["seconds"] = told["decode"]["seconds"][1:]
    (tmp_path / "hardware.json").write_text(json.dumps(told))
    with pytest.raises(HardwareError, match=r"decode\.seconds should hold 16 times"):
        load_hardware(tmp_path)
    (tmp_path / "hardware.json").write_text("{")
    with pytest.raises(HardwareError, match="not a readable hardware model"):
        load_hardware(tmp_path)


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
