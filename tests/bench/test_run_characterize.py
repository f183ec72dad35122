"""`kvpolicy characterize` taken up again and stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy.cli import main
from kvpolicy.fields import WrongValue
from kvpolicy.overflow import FIGURES, SEQUENCE_LENGTH
from kvpolicy.trace import Trace
from kvpolicy_vllm.bench.budget import Budget
from kvpolicy_vllm.bench.own_server import OwnServer
from kvpolicy_vllm.bench.profile_parts import Rig
from kvpolicy_vllm.bench.reach import QUICK, steps_of
from kvpolicy_vllm.bench.run_characterize import Study, finished_parts
from tests.synthetic import make_trace


def test_a_core_that_was_moved_in_and_not_noted_is_taken_for_done(tmp_path: Path) -> None:
    trace = make_trace(states=2, repeats=1)
    parts = {core: f"memory-b32-pass{number}, timeline-b32-pass{number}" for number, core in enumerate(trace.headers)}
    headers = {core: replace(trace.headers[core], noise={"part": names}) for core, names in parts.items()}
    Trace(headers, trace.tables).write(tmp_path)
    result = finished_parts(tmp_path, {"learning-b32-pass0": "other"})
    assert result.pop("learning-b32-pass0") == "other"
    assert result == {name: core for core, names in parts.items() for name in names.split(", ")}


def test_an_interrupt_names_what_is_kept_and_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    study = Study(tmp_path, {}, {"sequence-length-b32-pass0": "core"}, 0, FIGURES)

    def stopped(*asked: Any) -> None:
        raise KeyboardInterrupt(study.interrupted())

    monkeypatch.setattr(kvpolicy, "characterize", stopped)
    with pytest.raises(SystemExit) as left:
        main(["characterize", "--out", str(tmp_path)])
    assert left.value.code == 130
    err = capsys.readouterr().err
    assert "interrupted: 1 parts are measured and kept in" in err and "the same command again" in err


def test_a_model_with_states_is_refused_and_said_why(tmp_path: Path) -> None:
    server = OwnServer("org/name", (), 528, 2048, 8, 4096, False, 4096, 4, keeps_states=True)
    study = Study(tmp_path, {}, {}, 0, FIGURES)
    rig = Rig(tmp_path, QUICK.learning, None, 0, False, server)
    with pytest.raises(WrongValue, match="whose layers keep states: vLLM makes its blocks as large as a state"):
        study.measure(rig, QUICK, tmp_path, lambda *told: None, Budget.of(None, lambda: 0.0))


def test_no_part_is_begun_after_the_time_is_over(tmp_path: Path) -> None:
    """An engine would be asked for by then; the parts that are left are named."""
    names = [name for step in steps_of(QUICK, (SEQUENCE_LENGTH,), device=False) for name in step.names]
    study = Study(tmp_path, {}, {names[0]: "core"}, 0, (SEQUENCE_LENGTH,))
    now_s = iter((0.0, *[61.0] * 10))
    budget = Budget.of(1.0, lambda: next(now_s))
    (tmp_path / "config.json").write_text("{}")
    study.measure(Rig(tmp_path, QUICK.learning, None, 0, False), QUICK, tmp_path, lambda *told: None, budget)
    assert len(names) > 1 and study.not_begun == tuple(names[1:])
