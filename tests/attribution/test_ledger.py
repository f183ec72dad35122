"""The books of preempted requests, worked by hand. Requests are named by whatever can be a key."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import pytest

from kvpolicy.arrays import causal_pairs
from kvpolicy.attribution.ledger import Ledger, OpenPreemption, Repeated, Step, StepClock


@dataclass(eq=False)
class Body:
    """A request that is equal to nothing but itself, as the built-in simulator's are."""

    name: str


def opened(preemption_id: str, tokens: int, request: Hashable = "r") -> OpenPreemption:
    return OpenPreemption(preemption_id, request, "recompute", tokens, 0.0, 0)


def books(*some: OpenPreemption) -> Ledger[OpenPreemption]:
    ledger: Ledger[OpenPreemption] = Ledger()
    for one in some:
        ledger.add(one)
    return ledger


def counted(
    ledger: Ledger[OpenPreemption], number: int, start: int, end: int, request: Hashable = "r"
) -> Step[OpenPreemption]:
    step: Step[OpenPreemption] = Step(number)
    ledger.count(step, request, start, end)
    return step


class TestLedger:
    @pytest.mark.parametrize("request_key", ["r", 7, Body("r")])
    def test_recomputed_positions_worked_by_hand(self, request_key: Hashable) -> None:
        """Lost at 100; 60 are computed again, then 41, of which one is new and would have been a decode."""
        ledger = books(opened("p", 100, request_key))
        first, second = counted(ledger, 1, 0, 60, request_key), counted(ledger, 2, 60, 101, request_key)
        assert (first.recomputed_tokens, second.recomputed_tokens) == (60, 40)
        assert first.back == [] and [who.preemption_id for who in second.back] == ["p"]
        part = second.repeated[0]
        assert part.parts == (40, -1, -101, causal_pairs(60, 101)) and part.preemption_id == "p"
        second.compose([41], [101])
        assert [whole - lost for whole, lost in zip(second.parts, part.parts, strict=True)] == [1, 1, 101, 0]

    @pytest.mark.parametrize(
        ("start", "end", "left"),
        [
            (0, 60, (0, 0, 0, 0, 0, 0)),  # all of the chunk is computed again: it goes
            (60, 100, (0, 0, 0, 0, 0, 0)),
            (99, 100, (0, 0, 0, 0, 0, 0)),  # one token was a decode: it goes
            (60, 101, (1, 1, 101, 0, 0, 0)),  # one new token: a decode is left
            (60, 103, (3, 0, 0, causal_pairs(100, 103), 1, 100)),  # three new tokens: a chunk that begins at 100
        ],
    )
    def test_what_is_left_of_a_step(self, start: int, end: int, left: tuple[int, ...]) -> None:
        """Lost at 100. Left of tokens, decodes, context read, pairs, chunks, and context that those begin at."""
        ledger = books(opened("p", 100))
        step = counted(ledger, 1, start, end)
        step.compose([end - start], [end])
        (part,) = step.repeated
        whole = (*step.parts, step.prefill_requests, step.prefill_context)
        rest = tuple(a - b for a, b in zip(whole, part[1:], strict=True))
        assert rest == left

    def test_preempted_again_on_the_way_back(self) -> None:
        """Positions up to 30 are charged to the second preemption, those from 30 to 100 to the first."""
        ledger = books(opened("first", 100))
        counted(ledger, 1, 0, 30)
        earlier = ledger.add(opened("second", 30))
        assert earlier is not None and (earlier.ended, earlier.recomputed_tokens) == ("superseded", 30)
        step = counted(ledger, 2, 0, 101)
        assert {part.preemption_id: part.tokens for part in step.repeated} == {"second": 30, "first": 70}
        assert len(ledger) == 0 and not ledger.lost

    def test_outstanding_until_nothing_more_can_be_charged(self) -> None:
        """The first one closes when the second opens, and goes on being charged until its last position is back."""
        first, second = opened("first", 100), opened("second", 30)
        ledger = books(first)
        counted(ledger, 1, 0, 30)
        ledger.add(second)
        assert first.outstanding and second.outstanding
        counted(ledger, 2, 0, 99)
        assert first.outstanding and not second.outstanding
        counted(ledger, 3, 99, 100)
        assert not first.outstanding

    def test_preempted_farther_on_nothing_of_the_earlier_one_is_outstanding(self) -> None:
        first = opened("first", 100)
        ledger = books(first)
        ledger.add(opened("second", 100))
        assert not first.outstanding and len(ledger.lost["r"]) == 1

    def test_what_was_found_in_the_cache_is_known_when_it_resumes(self) -> None:
        """It resumes at 48: 32 were loaded, the first 16 were there still."""
        one = opened("p", 100)
        ledger = books(one)
        one.loaded_tokens = 32
        counted(ledger, 1, 48, 60)
        counted(ledger, 2, 60, 70)
        assert (one.resumed, one.local_hit_tokens, one.recomputed_tokens) == (True, 16, 22)

    def test_a_request_that_ends_first_is_aborted(self) -> None:
        one = opened("p", 100)
        ledger = books(one)
        outcome = ledger.remove("r", 3.0)
        assert outcome is not None and outcome.ended == "aborted" and len(ledger) == 0
        assert not one.outstanding and not ledger.lost and ledger.remove("r", 4.0) is None

    def test_the_wait_for_blocks_is_no_delay_of_the_victim(self) -> None:
        """Preempted at 0, admitted at 2, back at 5."""
        one = opened("p", 10)
        one.admitted_s = 2.0
        outcome = one.close("resumed", 5.0)
        assert (outcome.wait_blocks_s, outcome.victim_delay_s) == (2.0, 3.0)


def test_a_step_is_composed_of_decodes_and_chunks() -> None:
    """Two decodes at 10 and 20 tokens, one chunk of 5 after 7."""
    step: Step[OpenPreemption] = Step(0)
    step.compose([1, 5, 1], [10, 12, 20])
    assert (step.scheduled_tokens, step.scheduled_requests, step.decode_requests) == (7, 3, 2)
    assert (step.kv_read_tokens, step.chunk_context) == (30, 8 + 9 + 10 + 11 + 12)
    assert (step.prefill_requests, step.prefill_context) == (1, 7)


def test_a_part_is_named_in_the_order_of_a_steps_parts() -> None:
    part: Repeated[OpenPreemption] = Repeated(opened("p", 1), 1, 2, 3, 4, 5, 6)
    assert part.parts == (part.tokens, part.decodes, part.kv_read_tokens, part.chunk_context)


class TestStepClock:
    def test_a_step_lasts_from_update_to_update_less_what_a_tool_took(self) -> None:
        clock, found = StepClock(), []
        for began_s, left_out_s, now in [(1.0, 0.0, 2.0), (2.25, 0.0, 3.0), (3.75, 0.5, 4.0)]:
            clock.leave_out(left_out_s)
            found.append(clock.began_s(step(began_s), now, busy=True))
        assert found == [1.0, 2.0, 3.5]

    def test_a_pause_with_requests_alive_is_no_part_of_a_step(self) -> None:
        clock = StepClock()
        clock.began_s(step(1.0), 2.0, busy=True)
        assert clock.began_s(step(9.0), 9.5, busy=True) == 9.0
        assert clock.began_s(step(9.75), 10.25, busy=True) == 9.5

    def test_after_idling_a_step_begins_when_it_is_scheduled(self) -> None:
        clock = StepClock()
        clock.began_s(step(1.0), 2.0, busy=False)
        assert clock.began_s(step(7.0), 8.0, busy=True) == 7.0


def step(began_s: float) -> Step[Any]:
    return Step(0, began_s)
