"""What `kvpolicy characterize` is going to measure, before any engine starts; and what it says when it is stopped."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy import trace as traces
from kvpolicy.cli import main
from kvpolicy.datasets.profiles import dataset_of
from kvpolicy.overflow import BLOCK_SIZE, EVICTED_TOKENS, FIGURES, MEMORY, SEQUENCE_LENGTH, TIMELINE, figure_and_level
from kvpolicy.reporting.measurements import material
from kvpolicy.trace import Trace
from kvpolicy_vllm.bench.profile_results import finish_core
from kvpolicy_vllm.bench.reach import (
    ARMS,
    FULL_CPU,
    FULL_DEVICE,
    LEARNING,
    QUICK,
    Reach,
    load_of,
    runs_of,
    steps_of,
    study_states,
    time_left,
)
from kvpolicy_vllm.bench.run_characterize import Study, finished_parts
from kvpolicy_vllm.bench.serve_job import ServedJob
from kvpolicy_vllm.bench.states import free_blocks_for, running_for
from tests.synthetic import make_trace

REACHES = (QUICK, FULL_CPU, FULL_DEVICE)
SINGLE = (BLOCK_SIZE, EVICTED_TOKENS, SEQUENCE_LENGTH)


@pytest.mark.parametrize("device", [False, True])
def test_every_pass_measures_everything_once_and_every_other_one_backwards(device: bool) -> None:
    steps = [step for step in steps_of(QUICK, FIGURES, device) if set(step.figures) <= set(SINGLE)]
    passes = [[step for step in steps if step.part.number == number] for number in range(QUICK.passes)]
    kinds = [[(step.figures, step.part.block_size, step.part.pin_memory) for step in some] for some in passes]
    assert kinds[1] == kinds[0][::-1] and len(set(kinds[0])) == len(kinds[0])
    pageable = [one for one in kinds[0] if not one[2]]
    assert len(pageable) == (len(QUICK.block_sizes) if device else 0)


@pytest.mark.parametrize("reach", REACHES)
def test_no_two_parts_have_one_name_and_learning_comes_before_it_is_used(reach: Reach) -> None:
    steps = steps_of(reach, FIGURES, False)
    names = [name for step in steps for name in step.names]
    assert len(set(names)) == len(names)
    learns = [at for at, step in enumerate(steps) if LEARNING in step.figures]
    assert max(learns) < min(at for at, step in enumerate(steps) if MEMORY in step.figures)


def test_only_what_is_wanted_is_measured() -> None:
    assert {step.figures for step in steps_of(QUICK, [SEQUENCE_LENGTH], False)} == {(SEQUENCE_LENGTH,)}
    assert {step.figures for step in steps_of(QUICK, [TIMELINE], False)} == {(LEARNING,), (TIMELINE,)}


def test_what_is_done_is_left_out_whatever_it_was_measured_with() -> None:
    """First one figure alone, then all: the engine that would measure several measures those that are missing."""
    alone = {name for step in steps_of(QUICK, [MEMORY], False) for name in step.names}
    left = [step.without(alone) for step in steps_of(QUICK, FIGURES, False)]
    figures = [figure for step in left for figure in step.figures]
    assert MEMORY not in figures and LEARNING not in figures and TIMELINE in figures
    everything = [name for step in steps_of(QUICK, FIGURES, False) for name in step.names]
    assert sorted(everything) == sorted([*alone, *(name for step in left for name in step.names)])
    assert not any(step.without(everything).expected_s for step in left)


def test_states_are_natural_and_named_after_figure_and_level() -> None:
    states = study_states(QUICK, SEQUENCE_LENGTH, 32)
    assert [figure_and_level(state.state_id) for state in states] == [(SEQUENCE_LENGTH, n) for n in QUICK.lengths]
    assert all(state.cause == "memory" and len(state.other_prompts) == 15 for state in states)
    (two,) = study_states(QUICK, BLOCK_SIZE, 64)
    assert figure_and_level(two.state_id) == (BLOCK_SIZE, 64) and len(two.other_prompts) == 1
    assert two.prompt_tokens + two.decoded_tokens == QUICK.block_size_tokens


@pytest.mark.parametrize("more", [0, 1, 7])
@pytest.mark.parametrize(("victims", "blocks_each"), [(1, 4), (2, 1), (3, 2), (8, 4)])
def test_so_many_free_blocks_make_so_many_victims(victims: int, blocks_each: int, more: int) -> None:
    """vLLM's rule played through: whoever finds no block has the last one go, whose blocks are then free."""

    def evicted(running: int, free: int) -> int:
        gone, at = 0, 0
        while at < running - gone:
            if free:
                free, at = free - 1, at + 1
            else:
                free, gone = free + blocks_each, gone + 1
        return gone

    running = running_for(victims, blocks_each) + more
    free = free_blocks_for(victims, running, blocks_each)
    assert free == more and evicted(running, free) == victims
    assert evicted(running, free + 2) < victims
    assert free_blocks_for(victims, running - more - 1, blocks_each) < 0


@pytest.mark.parametrize("reach", REACHES)
def test_overflows_of_several_victims_are_all_beside_as_many_requests_as_the_largest_wants(reach: Reach) -> None:
    states = study_states(reach, EVICTED_TOKENS, 32)
    assert [(state.victims, figure_and_level(state.state_id)) for state in states] == [
        (count, (EVICTED_TOKENS, count)) for count in reach.victims
    ]
    (running,) = {1 + len(state.other_prompts) for state in states}
    assert running == running_for(max(reach.victims), reach.victim_tokens // 32)
    with pytest.raises(ValueError, match="victim_tokens is 100, should be whole blocks of 32"):
        study_states(replace(reach, victim_tokens=100), EVICTED_TOKENS, 32)


def test_each_repeat_serves_every_level_under_every_policy_in_an_order_of_its_own() -> None:
    runs = runs_of(QUICK, MEMORY, 0, seed=0)
    wanted = Counter((level, arm) for level in QUICK.levels for arm in ARMS)
    for repeat in range(QUICK.served_repeats):
        assert Counter((run.level, run.arm) for run in runs if run.repeat == repeat) == wanted
    orders = {tuple(run.arm for run in runs[at : at + 3]) for at in range(0, len(runs), 3)}
    assert len(orders) > 2, "the order of policies alternates"
    assert runs == runs_of(QUICK, MEMORY, 0, seed=0) != runs_of(QUICK, MEMORY, 0, seed=1)
    assert {run.repeat for run in runs_of(QUICK, MEMORY, 1, seed=0)} == {100, 101, 102}
    assert {run.state_id for run in runs_of(QUICK, TIMELINE, 0, seed=0)} == {"timeline/12"}


def test_the_papers_requests_and_ours_by_hand() -> None:
    paper = load_of(1.0)
    assert (paper.blocks_each, paper.all_blocks) == (79, 32 * 79 + 1)
    assert paper.scaling().startswith("32 requests x 1500 in / 1024 out, all at once: as the paper's; 2528 blocks")
    ours = load_of(1 / 8)
    assert (ours.prompt_tokens, ours.output_tokens, ours.blocks_each) == (188, 128, 10)
    assert [ours.blocks_at(level) for level in (10, 12, 60)] == [33, 39, 193]
    assert "lengths 0.125 of the paper's 32 x 1500 in / 1024 out" in ours.scaling()
    assert load_of(1 / 8, requests=4).blocks_at(10) == 12, "one request always fits"


def test_a_job_travels_as_json() -> None:
    runs = tuple(runs_of(QUICK, TIMELINE, 0, seed=0))
    job = ServedJob({"model": "m"}, QUICK.load, {arm: arm for arm in ARMS}, runs, 3)
    assert ServedJob.from_dict(job.to_dict()) == job
    assert job.blocks_at(100) == QUICK.load.all_blocks


def test_time_left_by_what_was_expected_and_what_it_took() -> None:
    steps = steps_of(QUICK, FIGURES, False)
    whole = sum(step.expected_s for step in steps)
    assert time_left(steps, 0, 0.0, 5.0) is None
    half = time_left(steps, 0, 0.5, 10.0)
    assert half == pytest.approx(10.0 * (whole / (0.5 * steps[0].expected_s) - 1))
    rest = whole - steps[0].expected_s - steps[1].expected_s
    later = time_left([steps[0].without(steps[0].names), *steps[1:]], 2, 0.0, 20.0)
    assert later == pytest.approx(20.0 / steps[1].expected_s * rest), "what was found done tells nothing of this time"


def test_a_core_that_was_moved_in_and_not_noted_is_taken_for_done(tmp_path: Path) -> None:
    made = make_trace(states=2, repeats=1)
    parts = {core: f"memory-b32-pass{number}, timeline-b32-pass{number}" for number, core in enumerate(made.headers)}
    headers = {core: replace(made.headers[core], noise={"part": names}) for core, names in parts.items()}
    Trace(headers, made.tables).write(tmp_path)
    found = finished_parts(tmp_path, {"learning-b32-pass0": "other"})
    assert found.pop("learning-b32-pass0") == "other"
    assert found == {name: core for core, names in parts.items() for name in names.split(", ")}


def test_who_stops_it_is_told_what_is_kept_and_leaves_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    study = Study(tmp_path, {}, {"sequence-length-b32-pass0": "core"}, 0, FIGURES)

    def stopped(*asked: Any) -> None:
        raise KeyboardInterrupt(study.interrupted())

    monkeypatch.setattr(kvpolicy, "characterize", stopped)
    with pytest.raises(SystemExit) as left:
        main(["characterize", "--out", str(tmp_path)])
    assert left.value.code == 130
    told = capsys.readouterr().err
    assert "interrupted: 1 parts are measured and kept in" in told and "the same command again" in told


def overflow_of_two(made: Trace) -> Trace:
    """Every labelled preemption has gone together with a second one, which no window names."""
    tables = dict(made.tables)
    for name, marks in (("decisions", ("preemption_id", "decision_id")), ("outcomes", ("preemption_id",))):
        rows = made.rows(name)
        rows += [row | {mark: f"{row[mark]}-second" for mark in marks} for row in rows]
        tables[name] = traces.from_rows(name, rows).append_column("core", [[row["core"] for row in rows]])
    return Trace(made.headers, tables)


def test_an_overflow_of_two_is_one_point_with_the_cost_of_both(tmp_path: Path) -> None:
    made = make_trace(states=4, repeats=1)
    both = overflow_of_two(made)
    both.write(tmp_path)
    for core in made.headers:
        finish_core(tmp_path / core, 0, {"variation": 0.01}, "scaled")
    found, single = material(traces.read(tmp_path)), material(made)
    assert found.header.notes == "scaled"
    assert [one.victims for one in found.overflows] == [2] * len(single.overflows)
    for one, other in zip(found.overflows, single.overflows, strict=True):
        assert one.evicted_tokens == 2 * other.evicted_tokens
        assert one.engine_s == pytest.approx(2 * other.engine_s)
    left_out = dataset_of({"made": traces.read(tmp_path)}).left_out
    assert left_out["preemptions beside the one that a window names"] == len(single.overflows)
