"""Lost positions that are computed again, worked by hand; when steps began and ended."""

from __future__ import annotations

from kvpolicy_vllm.plugin.ledger import Ledger, OpenPreemption, Step, StepClock, compose, pairs


class FakeRequest:
    def __init__(self, computed: int) -> None:
        self.num_computed_tokens = computed


def opened(name: str, tokens: int) -> OpenPreemption:
    return OpenPreemption(name, "r", "recompute", tokens, 0.0, 0)


class TestLedger:
    def test_recomputed_positions_worked_by_hand(self) -> None:
        """Lost at 100; 60 are computed again, then 41, of which one is new and would have been a decode."""
        ledger = Ledger()
        ledger.preempted(opened("p", 100))
        first, second = Step(1, 0.0), Step(2, 0.0)
        ledger.count(first, {"r": 60}, {"r": FakeRequest(60)})
        ledger.count(second, {"r": 41}, {"r": FakeRequest(101)})
        assert (first.recomputed_tokens, second.recomputed_tokens) == (60, 40)
        assert first.back == [] and [who.preemption_id for who in second.back] == ["p"]
        part = second.repeated[0]
        assert (part.tokens, part.kv_read_tokens, part.chunk_context, part.decodes) == (40, -101, pairs(60, 101), -1)
        compose(second, {"r": 41}, {"r": FakeRequest(101)})
        left = (second.scheduled_tokens - 40, second.chunk_context - part.chunk_context, second.kv_read_tokens + 101)
        assert left == (1, 0, 101)

    def test_preempted_again_on_the_way_back(self) -> None:
        """Positions up to 30 are charged to the second preemption, those from 30 to 100 to the first."""
        ledger = Ledger()
        ledger.preempted(opened("first", 100))
        ledger.count(Step(1, 0.0), {"r": 30}, {"r": FakeRequest(30)})
        earlier = ledger.preempted(opened("second", 30))
        assert earlier is not None and (earlier.ended, earlier.recomputed_tokens) == ("superseded", 30)
        step = Step(2, 0.0)
        ledger.count(step, {"r": 101}, {"r": FakeRequest(101)})
        assert {part.preemption_id: part.tokens for part in step.repeated} == {"second": 30, "first": 70}
        assert len(ledger) == 0 and not ledger._lost

    def test_a_request_that_ends_first_is_aborted(self) -> None:
        ledger = Ledger()
        ledger.preempted(opened("p", 100))
        outcome = ledger.gone("r", 3.0)
        assert outcome is not None and outcome.ended == "aborted" and len(ledger) == 0


class TestStepClock:
    def test_a_step_lasts_from_update_to_update_less_what_a_tool_took(self) -> None:
        clock, found = StepClock(), []
        for began_s, left_out_s, now in [(1.0, 0.0, 2.0), (2.25, 0.0, 3.0), (3.75, 0.5, 4.0)]:
            clock.leave_out(left_out_s)
            found.append(clock.began_s(Step(0, began_s), now, busy=True))
        assert found == [1.0, 2.0, 3.5]

    def test_a_pause_with_requests_alive_is_no_part_of_a_step(self) -> None:
        clock = StepClock()
        clock.began_s(Step(0, 1.0), 2.0, busy=True)
        assert clock.began_s(Step(1, 9.0), 9.5, busy=True) == 9.0
        assert clock.began_s(Step(2, 9.75), 10.25, busy=True) == 9.5

    def test_after_idling_a_step_begins_when_it_is_scheduled(self) -> None:
        clock = StepClock()
        clock.began_s(Step(0, 1.0), 2.0, busy=False)
        assert clock.began_s(Step(1, 7.0), 8.0, busy=True) == 7.0
