"""Exact costs: what a step took too long, shared by the preemptions that made it so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy.attribution.ledger import Repeated
from kvpolicy.simulator import StepLoad
from kvpolicy.simulator.builtin.costs import charge, seconds, without
from kvpolicy.simulator.builtin.live_request import Step
from kvpolicy.simulator.hardware.law_times import ConstantTimes

TIMES = ConstantTimes(fixed_s=1.0, per_part_s=(0.01, 0.0, 0.0, 0.0, 0.0, 0.0))


class Account(SimpleNamespace):
    """What is charged."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def account() -> Any:
    return Account(engine_s=0.0, others_s=0.0)


def repeated(opened: Any, tokens: int) -> Repeated[Any]:
    return Repeated(opened, tokens=tokens, kv_read_tokens=0, chunk_context=0, decodes=0, prefills=1, prefill_context=0)


def step(end_s: float, tokens: int, *parts: Repeated[Any], requests: int = 4) -> Step:
    made = Step(0)
    made.began_s, made.end_s = 10.0, 10.0 + end_s
    made.scheduled_tokens, made.scheduled_requests = tokens, requests
    made.repeated = list(parts)
    return made


def copy_of(owner: Any, start_s: float, end_s: float) -> Any:
    return SimpleNamespace(account=owner), SimpleNamespace(start_s=start_s, end_s=end_s)


def test_repeated_parts_are_taken_out_of_a_load() -> None:
    load = StepLoad(104, 4, 900, 5050, 1, 7)
    part = Repeated(
        account(), tokens=100, kv_read_tokens=50, chunk_context=5050, decodes=1, prefills=1, prefill_context=7
    )
    assert without(load, [part]) == StepLoad(4, 3, 850, 0, 0, 0)


def test_a_step_that_computes_nothing_takes_no_time() -> None:
    assert seconds(TIMES, StepLoad(0, 0, 0, 0, 0, 0)) == 0.0
    assert seconds(TIMES, StepLoad(1, 1, 0, 0, 0, 0)) == pytest.approx(1.01)


def test_a_recompute_costs_what_its_tokens_add_and_the_others_wait_for_it() -> None:
    victim = account()
    charge(step(2.0, 100, repeated(victim, 60)), [], TIMES)
    assert victim.engine_s == pytest.approx(0.6)
    assert victim.others_s == pytest.approx(3 * 0.6)


def test_a_step_of_repeated_tokens_alone_counts_in_full() -> None:
    victim = account()
    charge(step(2.0, 100, repeated(victim, 100), requests=1), [], TIMES)
    assert (victim.engine_s, victim.others_s) == (pytest.approx(2.0), 0.0)


def test_a_copy_and_a_recompute_share_a_step_by_their_seconds() -> None:
    """0.6 s of repeated tokens beside 0.2 s of a copy within the step, which takes 0.8 s too long: 3 to 1."""
    victim, other = account(), account()
    charge(step(2.2, 100, repeated(victim, 60)), [copy_of(other, 9.0, 10.2)], TIMES)
    assert victim.engine_s == pytest.approx(0.6)
    assert other.engine_s == pytest.approx(0.2)
    assert other.others_s == pytest.approx(4 * 0.2)


def test_a_copy_outside_the_step_is_charged_nothing() -> None:
    other = account()
    charge(step(3.0, 100), [copy_of(other, 9.0, 10.0)], TIMES)
    assert other.engine_s == 0.0
