"""Step times by tables: measured points as measured, between them linear, beyond them physics."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpolicy
from kvpolicy import policy
from kvpolicy.hardware.engine_time import EngineTime
from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.simulator import Builtin, MemorySink, Server
from kvpolicy.simulator.hardware import table_times
from kvpolicy.simulator.hardware.table_times import HardwareError, TableTimes, load_hardware
from kvpolicy.study.machine import Behind
from kvpolicy.workload import Request, Workload
from tests.simulator import tables
from tests.simulator.hardware.step_loads import SHAPE, expected_s, step_load
from tests.simulator.tables import LAYERS
from tests.simulator.worlds import LINEAR

COLUMNS = ("scheduled_tokens", "decode_requests", "kv_read_tokens", "chunk_context", "scheduled_requests")
"""Of a trace's steps: what tells whether a step lies within the tables, requests for prefills."""


@pytest.fixture(scope="module")
def times(folder: Path) -> TableTimes:
    return load_hardware(folder / "out")


def test_a_measured_step_takes_what_was_measured(times: TableTimes) -> None:
    assert times.step_s(step_load(16, 1024)) == pytest.approx(expected_s(16, 1024), rel=1e-5)
    assert times.step_s(step_load(chunks=((256, 64),))) == pytest.approx(expected_s(0, 0, 256, 64), rel=1e-5)
    assert times.step_s(step_load(4, 256, ((64, 1024),))) == pytest.approx(expected_s(4, 256, 64, 1024), rel=1e-5)


def test_between_measured_points_times_are_linear_in_each_axis(times: TableTimes) -> None:
    assert times.step_s(step_load(10, 700)) == pytest.approx(expected_s(10, 700), rel=1e-5)
    assert times.step_s(step_load(10, 700, ((64, 300),))) == pytest.approx(expected_s(10, 700, 64, 300), rel=1e-5)


def test_beyond_the_tables_physics_goes_on_and_says_so(times: TableTimes) -> None:
    inside = np.array([step_load(10, 700), step_load(4, 256, ((64, 1024),)), step_load(chunks=((256, 0),))], np.float64)
    outside = [
        step_load(64, 20_000),
        step_load(200, 500),
        step_load(chunks=((1024, 16_000),)),
        step_load(4, 256, ((512, 0),) * 3),
    ]
    assert not times.beyond(inside).any()
    assert times.beyond(np.array(outside, np.float64)).all()
    assert times.step_s(outside[0]) == pytest.approx(expected_s(64, 20_000), rel=0.02)
    assert times.step_s(outside[1]) == pytest.approx(expected_s(200, 500), rel=0.02)
    assert times.step_s(outside[2]) == pytest.approx(expected_s(0, 0, 1024, 16_000), rel=0.02)


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
    four, one = step_load(chunks=((256, 0),) * 4), step_load(chunks=((1024, 0),))
    saved = LAYERS * 1e-9 * (one.chunk_context - four.chunk_context) - 1e-6 * (
        tables.sequences_us(4) - tables.sequences_us(1)
    )
    assert times.step_s(one) - times.step_s(four) == pytest.approx(saved, rel=0.02)


def test_rows_and_single_steps_agree(times: TableTimes) -> None:
    rng = np.random.default_rng(0)
    drawn = rng.integers((0, 1, 2, 0), (90, 6000, 2000, 5000), (200, 4)).tolist()
    loads = [step_load(n, d, ((c, k),)) for n, d, c, k in drawn]
    assert times.steps_s(np.array(loads, np.float64)).tolist() == [times.step_s(one) for one in loads]


def test_another_process_gets_the_same_times(times: TableTimes) -> None:
    copied = pickle.loads(pickle.dumps(times))
    assert copied == times
    assert copied.step_s(step_load(10, 700)) == times.step_s(step_load(10, 700))


def test_more_work_never_takes_less_along_decode(times: TableTimes) -> None:
    grown = [times.step_s(step_load(n, 900)) for n in range(1, 200)]
    assert grown == sorted(grown)
    grown = [times.step_s(step_load(30, d)) for d in range(1, 20_000, 50)]
    assert grown == sorted(grown)


def test_the_engines_own_time_comes_on_top(folder: Path, tmp_path: Path, times: TableTimes) -> None:
    files = [folder / name for name in ("attention.csv", "dense.csv", "per_sequence.csv")]
    kvpolicy.import_profile(files, tmp_path, SHAPE, link="pcie5", engine=EngineTime(1e-3, 2e-3, 0.5, "a test"))
    slower = load_hardware(tmp_path)
    decode = LAYERS * 1e-6 * tables.attention_us(0, 0, 16, 1024)
    assert slower.step_s(step_load(16, 1024)) - times.step_s(step_load(16, 1024)) == pytest.approx(1e-3 + 0.5 * decode)
    chunk, both = step_load(chunks=((256, 64),)), step_load(16, 1024, ((64, 64),))
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


def test_a_block_is_as_large_as_the_shape_says(times: TableTimes) -> None:
    assert times.model.block_bytes(16) == 16 * LAYERS * 2 * 2 * 64 * 2


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
    result = json.loads((folder / "out" / "hardware.json").read_text()) | {field: value}
    (tmp_path / "hardware.json").write_text(json.dumps(result))
    with pytest.raises(HardwareError, match=said) as refused:
        load_hardware(tmp_path)
    assert str(tmp_path / "hardware.json") in str(refused.value)


def test_grids_of_another_size_and_files_that_are_none_are_refused(folder: Path, tmp_path: Path) -> None:
    values = json.loads((folder / "out" / "hardware.json").read_text())
    values["decode"]["seconds"] = values["decode"]["seconds"][1:]
    (tmp_path / "hardware.json").write_text(json.dumps(values))
    with pytest.raises(HardwareError, match=r"decode\.seconds should hold 16 times"):
        load_hardware(tmp_path)
    (tmp_path / "hardware.json").write_text("{")
    with pytest.raises(HardwareError, match="not a readable hardware model"):
        load_hardware(tmp_path)


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
