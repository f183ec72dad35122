"""Oracles worked by hand: the cheaper option of one preemption, and the best schedule of a few."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvpolicy.events import Kind
from kvpolicy.policy import Policy, decide, load
from kvpolicy.simulator import Link, Server, Summary, Tail
from kvpolicy.simulator.base import DecisionObserver
from kvpolicy.simulator.hardware.law_times import ConstantTimes
from kvpolicy.simulator.oracle import MAX_CHOICES, Oracle, best_in_hindsight
from tests.synthetic import options_for, situation

NEVER = Tail(0.0, 0.0, 0.0)
PER_TOKEN_S, PER_PAIR_S = 1e-4, 1e-8
SERVER = Server(
    block_size=32, block_bytes=32_000, device_blocks=100, host_blocks=100, token_budget=210, link=Link(saves_wait=True)
)


def times(copy_bytes_per_s: float) -> ConstantTimes:
    """2 ms a step, 0.1 ms a token; of a chunk 10 ns a pair."""
    return ConstantTimes(2e-3, (PER_TOKEN_S, 0.0, 0.0, PER_PAIR_S, 0.0, 0.0), 0.0, copy_bytes_per_s)


VICTIM = replace(
    situation(500, 32, 10), block_bytes=32_000, segment_bytes=32_000, batch_tokens=1000, held_blocks=16, shared_blocks=0
)
PAIRS = 500 * 501 / 2
BESIDE_OTHERS_S = 500 * PER_TOKEN_S + PAIRS * PER_PAIR_S
"""Chunks of 200, 200 and 100 beside ten decodes: three steps that are executed anyway."""
ALONE_S = BESIDE_OTHERS_S + 3 * 2e-3
COPIED_BYTES = 16 * 32_000


def costs_of(server: Server, copy_bytes_per_s: float, running: int = 10) -> tuple[float, float]:
    one = replace(VICTIM, running_requests=running, batch_tokens=100 * running)
    oracle = Oracle(times(copy_bytes_per_s), server)
    _, costs = oracle.assess(one, options_for(one), oracle.initial_state())
    return costs[0].engine_s, costs[1].engine_s


def test_a_recompute_costs_what_it_adds_to_the_others_steps() -> None:
    assert costs_of(SERVER, 1e9)[0] == pytest.approx(BESIDE_OTHERS_S)


def test_alone_its_steps_count_in_full() -> None:
    wide = replace(SERVER, token_budget=200)
    assert costs_of(wide, 1e9, running=0)[0] == pytest.approx(ALONE_S)


def test_shared_blocks_are_not_computed_again() -> None:
    one = replace(VICTIM, shared_blocks=10)
    oracle = Oracle(times(1e9), SERVER)
    cost = oracle.assess(one, options_for(one), oracle.initial_state())[1][0]
    pairs = PAIRS - 320 * 321 / 2
    assert cost.engine_s == pytest.approx(180 * PER_TOKEN_S + pairs * PER_PAIR_S)


def test_what_is_expected_to_survive_is_neither_computed_nor_loaded() -> None:
    """10 of 16 blocks; 4 are saved."""
    one = replace(VICTIM, hit_blocks=10.0, save_blocks=4.0)
    oracle = Oracle(times(1e9), replace(SERVER, link=Link(overlapped=False)))
    recompute, swap = oracle.assess(one, options_for(one), oracle.initial_state())[1]
    pairs = PAIRS - 320 * 321 / 2
    assert recompute.engine_s == pytest.approx(180 * PER_TOKEN_S + pairs * PER_PAIR_S)
    assert swap.engine_s == pytest.approx((4 + 6) * 32_000 / 1e9)


def test_a_swap_costs_its_save_and_what_is_felt_of_its_load() -> None:
    copy_s = COPIED_BYTES / 1e9
    assert costs_of(SERVER, 1e9)[1] == pytest.approx(copy_s)
    assert costs_of(replace(SERVER, link=Link(slowdown=0.25, saves_wait=True)), 1e9)[1] == pytest.approx(1.25 * copy_s)
    assert costs_of(replace(SERVER, link=Link(slowdown=0.25, saves_wait=False)), 1e9)[1] == pytest.approx(0.5 * copy_s)
    assert costs_of(replace(SERVER, link=Link(overlapped=False)), 1e9)[1] == pytest.approx(2 * copy_s)
    assert costs_of(SERVER, 1e9, running=0)[1] == pytest.approx(2 * copy_s)


def test_the_oracle_takes_the_cheaper() -> None:
    """The save takes as long as the recompute at that bandwidth."""
    even = COPIED_BYTES / BESIDE_OTHERS_S
    for share, expected in ((0.99, (1.0, 0.0)), (1.01, (0.0, 1.0))):
        oracle = Oracle(times(share * even), SERVER)
        assert oracle.probabilities(VICTIM, options_for(VICTIM), oracle.initial_state()) == expected


# ---- in hindsight ----

TREE: dict[tuple[Kind, ...], float] = {
    ("recompute", "recompute"): 3 + 4,
    ("recompute", "swap"): 3 + 6,
    ("swap",): 5,
}
"""A run of at most two preemptions: a recompute at the first is cheaper by itself, but brings about a second."""


class Toy:
    """Plays the tree: asks the policy as a simulator would until a branch has ended."""

    def __init__(self, branches: dict[tuple[Kind, ...], float]) -> None:
        self.branches = branches
        self.played: list[tuple[Kind, ...]] = []

    def __call__(self, policy: Policy, on_decision: DecisionObserver | None = None) -> Summary:
        done: tuple[Kind, ...] = ()
        state, rng = policy.initial_state(), random.Random(0)
        while done not in self.branches:
            decision = decide(policy, VICTIM, options_for(VICTIM), state, rng)
            state = policy.next_state(state, decision)
            if on_decision is not None:
                on_decision(decision)
            # A preemption without a choice comes between: it takes no part in the schedule.
            state = policy.next_state(state, decide(policy, VICTIM, options_for(VICTIM)[:1], state, rng))
            done = (*done, decision.intended)
        self.played.append(done)
        return Summary(1, 1.0, NEVER, NEVER, NEVER, {}, 0, 0, float(self.branches[done]), 1, 0.0)


def test_the_best_schedule_is_found_where_the_cheaper_first_step_is_not_in_it() -> None:
    toy = Toy(TREE)
    best = best_in_hindsight(toy)
    assert (best.kinds, best.value, best.summary.makespan_s) == (("swap",), 5.0, 5.0)
    assert (best.schedules, best.complete) == (3, True)
    assert set(toy.played) == set(TREE), "each schedule once"
    assert toy(load("always-recompute")).makespan_s == 7.0


def test_every_schedule_is_tried_once() -> None:
    whole: dict[tuple[Kind, ...], float] = {}
    kinds: tuple[Kind, ...] = ("recompute", "swap")
    for number in range(16):
        whole[tuple(kinds[number >> place & 1] for place in range(4))] = float((number * 7 + 3) % 16)
    toy = Toy(whole)
    best = best_in_hindsight(toy)
    assert sorted(toy.played) == sorted(whole)
    assert best.value == 0.0 and whole[best.kinds] == 0.0


def test_what_lies_beyond_is_recomputed_and_said() -> None:
    best = best_in_hindsight(Toy(TREE), value=lambda summary: -summary.makespan_s, choices=1)
    assert (best.kinds, best.value, best.schedules, best.complete) == (("recompute",), -7.0, 2, False)
    assert best_in_hindsight(Toy(TREE), choices=0).schedules == 1
    with pytest.raises(ValueError, match="from 0 to 12"):
        best_in_hindsight(Toy(TREE), choices=MAX_CHOICES + 1)
