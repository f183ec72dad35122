"""What a simulated run says there is to win: worked by hand, and compared with what free swaps then win."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given

from kvpolicy.attribution.ledger import OpenPreemption, Repeated
from kvpolicy.headroom import Headroom
from kvpolicy.policy import load
from kvpolicy.policy.decision import Decider
from kvpolicy.simulator import ConstantTimes, Link, Run, Server
from kvpolicy.simulator.base import StepLoad
from kvpolicy.simulator.work_count import WorkCount
from kvpolicy.workload import Request
from tests.simulator.random_runs import World, few_worlds
from tests.simulator.worlds import SECONDS, SMALL, run, workload, worlds
from tests.synthetic import situation

TWO = workload(Request(0.0, 8, 8), Request(0.0, 8, 8))
FREE = ConstantTimes(fixed_s=4e-3, per_part_s=(2e-5, 1e-5, 1e-7, 3e-8, 0.0, 0.0), copy_latency_s=0.0)


def found(outcome: Run) -> Headroom:
    assert outcome.summary.headroom is not None
    return outcome.summary.headroom


@pytest.mark.parametrize("leap", [True, False])
def test_two_requests_on_five_blocks(leap: bool) -> None:
    """One step of 16 prompt tokens, 7 decodes alone, 8 recomputed tokens beside what would have been a decode, and 6
    more decodes. A token takes 0.01 s and a step 1 s."""
    won = found(run(TWO, SMALL, times=SECONDS, leap=leap)[0])
    assert (won.decoded_tokens, won.recomputed_tokens) == (14, 8)
    assert won.recompute_token_s == pytest.approx(0.01) and won.decode_token_s == pytest.approx(1.01)
    assert won.tax == pytest.approx(8 / 14)
    assert won.bound == pytest.approx(0.08 / 14.14)
    # A copy beside the steps costs nothing here: all of 0.08 s of 15.38 s could be saved.
    assert won.forecast == pytest.approx(0.08 / 15.30)


def test_a_swap_that_costs_more_than_the_recompute_wins_nothing() -> None:
    """Each copy makes a step wait for half a second."""
    won = found(run(TWO, replace(SMALL, link=Link(overlapped=False)), times=SECONDS)[0])
    assert won.bound == pytest.approx(0.08 / 14.14) and won.forecast == 0.0


def test_under_always_swap_the_recompute_is_the_other_option() -> None:
    """A save and a load of half a second, which a recompute of 0.08 s would have saved. 14 steps decode."""
    won = found(run(TWO, replace(SMALL, link=Link(overlapped=False)), "always-swap", SECONDS)[0])
    assert (won.tax, won.price_ratio) == (0.0, None)
    assert won.bound == pytest.approx(1.0 / (won.decoded_tokens * 1.01))
    busy_s = 1.16 + won.decoded_tokens * 1.01 + 0.5  # the load is waited for in a step that computes nothing
    assert won.forecast == pytest.approx(0.92 / (busy_s - 0.92))


def test_where_host_memory_is_full_nothing_can_be_chosen() -> None:
    won = found(run(TWO, replace(SMALL, host_blocks=0), times=SECONDS)[0])
    assert won.bound == pytest.approx(0.08 / 14.14) and won.forecast == 0.0


def test_victims_of_one_step_share_its_price_by_their_tokens() -> None:
    """30 of 40 recomputed tokens cost 3 s and 10 of them 1 s. A swap would have cost 1 s: 2 s could be saved. Two
    requests decode."""
    times = ConstantTimes(fixed_s=0.0, per_part_s=(0.1, 0.0, 0.0, 0.0, 0.0, 0.0), copy_latency_s=0.5)
    count = WorkCount(replace(SMALL, link=Link(overlapped=False)), times)
    repeated = []
    for name, tokens in (("a", 30), ("b", 10)):
        one = situation(tokens, 4)
        count.preempted(name, one, Decider(load("always-recompute"), random.Random(0)).decide(one))
        repeated.append(Repeated(OpenPreemption(name, name, "recompute", tokens, 0.0, 0), tokens, 0, 0, 0, 1, 0))
    count.step(StepLoad(42, 2, 20, 0, 2, 0), StepLoad(2, 2, 20, 0, 0, 0), 4.2, 4.2, repeated)
    won = count.headroom()
    assert (won.decoded_tokens, won.recomputed_tokens, won.recompute_token_s) == (2, 40, pytest.approx(0.1))
    assert won.bound == pytest.approx(4.0 / 0.2) and won.forecast == pytest.approx(2.0 / 2.2, rel=1e-3)


@few_worlds
@given(worlds())
def test_what_there_is_to_win_is_a_share_between_nothing_and_the_bound(world: World) -> None:
    source, server, name = world
    won = found(run(source, server, name)[0])
    if won.bound is None:
        assert not won.decoded_tokens
        return
    assert won.forecast is not None and 0.0 <= won.forecast <= won.bound * (1 + 1e-9)
    outcome, trace = run(source, server, name)
    assert won.recomputed_tokens == outcome.summary.recomputed_tokens
    assert won.decoded_tokens <= sum(row["output_tokens"] for row in trace.rows("requests"))


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("name", ["always-recompute", "always-swap"])
def test_steps_taken_at_once_count_as_one_by_one(asynchronous: bool, name: str) -> None:
    """Also the step that is in flight when such a run of steps begins, and the one that it leaves in flight."""
    source = workload(*(Request(0.05 * number, 40 + 7 * number, 90 + 11 * number) for number in range(12)))
    server = Server(
        block_size=16, block_bytes=1, device_blocks=60, host_blocks=10_000, asynchronous=asynchronous,
        link=Link(slowdown=0.1),
    )  # fmt: skip
    leaps, steps = (found(run(source, server, name, leap=leap)[0]) for leap in (True, False))
    for figure in ("decoded_tokens", "recomputed_tokens", "decode_token_s", "bound", "forecast"):
        assert getattr(leaps, figure) == pytest.approx(getattr(steps, figure), rel=1e-9), figure


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_free_swaps_win_about_the_forecast(prefix_caching: bool) -> None:
    """60 requests on memory for a fifth of them: the makespan then is as much shorter as was said beforehand."""
    source = workload(*(Request(0.0, 40 + 7 * (number % 13), 90 + 11 * (number % 9)) for number in range(60)))
    server = Server(
        block_size=16, block_bytes=1, device_blocks=150, host_blocks=10_000, prefix_caching=prefix_caching,
        asynchronous=True,
    )  # fmt: skip
    recomputed, swapped = (run(source, server, name, FREE)[0].summary for name in ("always-recompute", "always-swap"))
    assert recomputed.preemptions["recompute"] > 20 and recomputed.headroom is not None
    bound, forecast = recomputed.headroom.bound, recomputed.headroom.forecast
    assert bound is not None and forecast is not None and bound > 0.01
    reached = recomputed.makespan_s / swapped.makespan_s - 1
    assert reached <= bound
    assert reached == pytest.approx(forecast, abs=0.01)
