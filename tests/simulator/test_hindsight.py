"""The best schedule on the built-in engine: a case worked by hand, and never worse than any policy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpolicy.policy import Policy, load
from kvpolicy.simulator import DecisionObserver, Link, Server, Summary
from kvpolicy.simulator.builtin import Builtin
from kvpolicy.simulator.hardware.law_times import ConstantTimes
from kvpolicy.simulator.oracle import Oracle, best_in_hindsight
from kvpolicy.workload import Request, Workload

SERVER = Server(
    block_size=16, block_bytes=16_000, device_blocks=16, host_blocks=100, token_budget=64, prefix_caching=False,
    link=Link(saves_wait=True),
)  # fmt: skip


def times(copy_bytes_per_s: float) -> ConstantTimes:
    """1 ms a step and 0.1 ms a token; nothing else counts."""
    return ConstantTimes(1e-3, (1e-4, 0.0, 0.0, 0.0, 0.0, 0.0), 0.0, copy_bytes_per_s)


def on(workload: Workload, server: Server, hardware: ConstantTimes) -> Callable[..., Summary]:
    def simulate(policy: Policy, on_decision: DecisionObserver | None = None) -> Summary:
        return Builtin().run(workload, policy, server, hardware, on_decision=on_decision).summary

    return simulate


def test_worked_by_hand() -> None:
    """Three requests of 60 + 60 tokens on 16 blocks of 16: two of them end with 8 blocks each, so the third, of 79
    computed tokens in 5 blocks, has to go when the others want a sixth block.

    It comes back beside the very last token of the second. To compute it again takes 79 x 0.1 ms = 7.9 ms more, in
    steps that are taken in any case: 63 tokens beside that last one, and 16 together with its own next. A swap makes
    one step wait for its 80,000 bytes and, as nobody else is left to run, the engine wait for them to come back: 8.0 ms
    at 20 MB/s, 7.6 ms at 21 MB/s. At the preemption, with two others beside it, the load still looks as if it cost
    nothing: the oracle of single decisions swaps in both cases.
    """
    workload = Workload("three", tuple(Request(0.0, 60, 60) for _ in range(3)), 0)
    for copy_bytes_per_s, best in ((20e6, "recompute"), (21e6, "swap")):
        simulate = on(workload, SERVER, times(copy_bytes_per_s))
        fixed = {kind: simulate(load(f"always-{kind}")) for kind in ("recompute", "swap")}
        assert (fixed["recompute"].preemptions["recompute"], fixed["recompute"].recomputed_tokens) == (1, 79)
        longer_s = fixed["swap"].makespan_s - fixed["recompute"].makespan_s
        assert longer_s == pytest.approx(2 * 80_000 / copy_bytes_per_s - 79e-4)
        assert simulate(Oracle(times(copy_bytes_per_s), SERVER)).makespan_s == fixed["swap"].makespan_s
        result = best_in_hindsight(simulate)
        assert (result.kinds, result.value) == ((best,), fixed[best].makespan_s)
        assert (result.schedules, result.complete) == (2, True)


@pytest.mark.parametrize("copy_bytes_per_s", [2e6, 2e7, 4e7])
def test_no_policy_does_better(copy_bytes_per_s: float) -> None:
    lengths = ((60, 70), (20, 110), (90, 40), (40, 60), (30, 80))
    workload = Workload("five", tuple(Request(0.02 * at, *pair) for at, pair in enumerate(lengths)), 0)
    simulate = on(workload, SERVER, times(copy_bytes_per_s))
    best = best_in_hindsight(simulate, value=lambda summary: summary.e2e_s.mean)
    assert best.complete and best.schedules > 4
    names = ("always-recompute", "always-swap", "threshold:64", "threshold:96", "random:0.5")
    for policy in (*map(load, names), Oracle(times(copy_bytes_per_s), SERVER)):
        assert simulate(policy).e2e_s.mean >= best.value
