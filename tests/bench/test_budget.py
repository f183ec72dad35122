"""A profile's time: what is measured first, until when, and what another call makes up for."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from kvpolicy_vllm.bench.budget import (
    Budget,
    after,
    coarse_first,
    in_time,
    in_turn,
    making_up,
    next_job,
    next_part,
)
from kvpolicy_vllm.bench.job import Job
from kvpolicy_vllm.bench.profile_parts import QUICK, Part, parts_of
from kvpolicy_vllm.bench.states import Span, State, check_states, grid

SPAN = Span(64, 1000, 3, 4000, 2048)
STATES = grid(32, 9, SPAN, random.Random(0))
CHECKS = check_states(32, SPAN)
JOB = Job({}, STATES, CHECKS, check_pairs=2, repeats=1, first_repeat=0, seed=0)


def tokens(state: State) -> int:
    return state.prompt_tokens + state.decoded_tokens


def test_the_extremes_come_first_and_then_the_middle_of_every_gap() -> None:
    ranked = sorted(STATES, key=tokens)
    assert [ranked.index(state) for state in coarse_first(STATES)] == [0, 8, 4, 2, 6, 1, 3, 5, 7]
    for count in range(4):
        assert set(coarse_first(STATES[:count])) == set(STATES[:count])


def test_whatever_is_measured_by_then_is_spread_over_all_lengths() -> None:
    """No gap between measured lengths is more than twice another, at any time."""
    states = grid(32, 40, SPAN, random.Random(1))
    ranked, order = sorted(states, key=tokens), coarse_first(states)
    for count in range(2, 40):
        places = sorted(ranked.index(state) for state in order[:count])
        gaps = [after - before for before, after in pairwise(places)]
        assert max(gaps) <= 2 * min(gaps) + 2


def test_what_was_left_out_comes_before_what_was_measured() -> None:
    missing = {STATES[3].state_id: 2, STATES[5].state_id: 1}
    job = in_time(JOB, 100.0, missing)
    assert [state.state_id for state in job.states[:2]] == list(missing)
    assert job.states[2:] == tuple(state for state in coarse_first(STATES) if state.state_id not in missing)
    assert (job.end_s, job.in_order, job.requested) == (100.0, True, JOB.requested)


def test_a_further_pass_measures_only_what_is_missing() -> None:
    missing = {STATES[3].state_id: 2, CHECKS[0].state_id: 1, "b64-003": 5}
    job = making_up(JOB, missing)
    assert job.requested == {STATES[3].state_id: 2, CHECKS[0].state_id: 1}
    assert after(missing, job, {}) == {"b64-003": 5}
    assert after(missing, job, {STATES[3].state_id: 1}) == {"b64-003": 5, STATES[3].state_id: 1}


def test_what_several_passes_leave_out_adds_up() -> None:
    once = after({}, JOB, {"b32-001": 1})
    assert after(once, JOB, {"b32-001": 1, "b32-002": 1}) == {"b32-001": 2, "b32-002": 1}


def test_parts_follow_until_nothing_is_missing() -> None:
    parts = parts_of(QUICK, device=False)
    done: dict[str, str] = {}
    for part in parts:
        assert next_part(parts, QUICK.passes, done, {"b64-001": 1}) == part
        done[part.name] = "core"
    assert next_part(parts, QUICK.passes, done, {}) is None
    further = next_part(parts, QUICK.passes, done, {"b64-001": 1})
    assert further == Part.of(QUICK.passes, 64, True)
    done[further.name] = "core"
    assert next_part(parts, QUICK.passes, done, {"check-swap-b64": 1}) == Part.of(QUICK.passes + 1, 64, True)
    assert next_part(parts, QUICK.passes, done, {"of-another-profile": 1}) is None


def test_states_over_pageable_memory_belong_to_parts_of_their_own() -> None:
    pinned, pageable = Part.of(0, 32, True), Part.of(0, 32, False)
    assert pinned.has("b32-001") and pinned.has("check-swap-b32") and not pinned.has("b32-001-pageable")
    assert pageable.has("b32-001-pageable") and pageable.has("check-swap-b32-pageable") and not pageable.has("b32-001")
    assert not pinned.has("b3-001") and not pinned.has("check-swap-b132")


def test_time_is_shared_among_the_parts_that_follow() -> None:
    now_s = [10.0]
    budget = Budget.of(2.0, lambda: now_s[0])
    assert budget.limited and budget.share_end_s(3) == 50.0 and not budget.over
    now_s[0], budget.overhead_s = 100.0, 29.0
    assert not budget.over and budget.share_end_s(1) == 130.0
    budget.overhead_s = 30.0
    assert budget.over, "an engine would start and measure nothing"
    unlimited = Budget.of(None, lambda: now_s[0])
    assert unlimited.share_end_s(3) is None and not unlimited.over and not unlimited.limited


def test_what_an_engine_takes_besides_is_the_largest_so_far() -> None:
    now_s = [100.0]
    budget = Budget.of(10.0, lambda: now_s[0])
    budget.learn(start_s=40.0, measured_s=35.0)
    assert budget.overhead_s == 25.0
    budget.learn(start_s=90.0, measured_s=2.0)
    assert budget.overhead_s == 25.0


def test_page_locked_memory_comes_first_where_time_is_limited() -> None:
    parts = parts_of(QUICK, device=True)
    unlimited, limited = (Budget.of(minutes, lambda: 0.0) for minutes in (None, 5.0))
    assert in_turn(parts, unlimited) == parts
    pinned = [part for part in parts if part.pin_memory]
    assert list(in_turn(parts, limited)[: len(pinned)]) == pinned and len(pinned) < len(parts)


def test_jobs_follow_until_all_is_measured_or_the_time_is_over() -> None:
    """Of QUICK's parts, two block sizes in two passes; the first leaves out a state."""
    now_s = [0.0]
    parts, done, missing = parts_of(QUICK, device=False), dict[str, str](), {STATES[3].state_id: 1}

    def following(minutes: float | None, left_out: dict[str, int]) -> tuple[str, Job] | None:
        budget = Budget.of(None if minutes is None else minutes - now_s[0] / 60, lambda: now_s[0])
        turn = next_job(parts, QUICK.passes, lambda part: JOB, done, left_out, budget)
        return turn and (turn[0].name, turn[1])

    assert following(None, {}) == (parts[0].name, JOB), "without a limit nothing is put in another order"
    name, job = following(4.0, {}) or ("", JOB)
    assert (name, job.end_s, job.in_order) == (parts[0].name, 120.0, True), "half of the time: another part follows"
    assert job.states == coarse_first(STATES)
    done[name], now_s[0] = "core", 60.0
    name, job = following(4.0, missing) or ("", JOB)
    assert (name, job.end_s, job.states[0]) == (parts[1].name, 240.0, STATES[3])
    now_s[0] = 240.0
    assert following(4.0, missing) is None, "the time is over"
    done |= {part.name: "core" for part in parts}
    assert following(None, {}) is None, "all is measured"
    name, job = following(None, missing) or ("", JOB)
    assert name == Part.of(QUICK.passes, 32, True).name and job.requested == missing


@pytest.mark.parametrize("job", [JOB, in_time(JOB, 5.0, {}), making_up(JOB, {"b32-001": 2})])
def test_a_job_travels_to_its_engine(job: Job, tmp_path: Path) -> None:
    assert Job.from_dict(job.to_dict()) == job
    assert replace(job, wanted={}).requested == {}
