"""Parts of a study: every level in every pass, nothing twice, and the time left."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kvpolicy.overflow import BLOCK_SIZE, EVICTED_TOKENS, FIGURES, MEMORY, SEQUENCE_LENGTH, TIMELINE, figure_and_level
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


def test_each_repeat_serves_every_level_under_every_policy_in_an_order_of_its_own() -> None:
    runs = runs_of(QUICK, MEMORY, 0, seed=0)
    expected = Counter((level, arm) for level in QUICK.levels for arm in ARMS)
    for repeat in range(QUICK.served_repeats):
        assert Counter((run.level, run.arm) for run in runs if run.repeat == repeat) == expected
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
    tables = replace(ours, held_blocks=15, max_held_blocks=22)
    assert (tables.all_blocks, tables.blocks_at(60)) == (32 * 15 + 1, round(0.6 * 32 * 15) + 1)
    assert tables.blocks_at(1) == 22 + 2, "also while it holds most"


def test_time_left_by_what_was_expected_and_what_it_took() -> None:
    steps = steps_of(QUICK, FIGURES, False)
    whole = sum(step.expected_s for step in steps)
    assert time_left(steps, 0, 0.0, 5.0) is None
    half = time_left(steps, 0, 0.5, 10.0)
    assert half == pytest.approx(10.0 * (whole / (0.5 * steps[0].expected_s) - 1))
    rest = whole - steps[0].expected_s - steps[1].expected_s
    later = time_left([steps[0].without(steps[0].names), *steps[1:]], 2, 0.0, 20.0)
    assert later == pytest.approx(20.0 / steps[1].expected_s * rest), "what was found done tells nothing of this time"
