"""Shadow mode in a server: what is counted, and that no memory is taken."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from kvpolicy.events import Cost, Decision, Option
from kvpolicy_vllm.plugin.messages import Job
from kvpolicy_vllm.plugin.metrics import COUNTERS
from kvpolicy_vllm.plugin.observers import Identity, Pending, Tally
from kvpolicy_vllm.plugin.shadow import ShadowCopier, ShadowCounter
from tests.synthetic import situation

BOTH = Option("recompute"), Option("swap", 100, "host")


def cost(seconds: float, extrapolated: bool = False) -> Cost:
    return Cost(seconds, 0.0, 0.0, seconds, 0.0, seconds, seconds, extrapolated=extrapolated)


def counted(*decisions: Decision) -> dict[str, float]:
    tally = Tally()
    for decision in decisions:
        identity = Identity("core-1", "a", 0, 0, {})
        ShadowCounter(tally, lambda: True).executed(Pending(situation(computed_tokens=100), decision, identity))
    return tally.totals


def decided(chosen: int, *costs: Cost, options: tuple[Option, ...] = BOTH, reason: str = "shadow") -> Decision:
    return Decision(options, (0.0, 1.0)[: len(options)], chosen, costs, "made up", "{}", "recompute", reason)


def test_nothing_is_counted_while_the_control_file_says_off() -> None:
    tally, identity = Tally(), Identity("core-1", "a", 0, 0, {})
    decision = decided(1, cost(0.5), cost(0.125))
    ShadowCounter(tally, lambda: False).executed(Pending(situation(computed_tokens=100), decision, identity))
    assert tally.totals == {}


def test_both_costs_are_counted_and_the_difference_is_the_saving() -> None:
    found = counted(
        decided(1, cost(0.5), cost(0.125)),
        decided(0, cost(0.25), cost(1.0), reason=""),
        decided(1, cost(1.0), cost(0.5)),
    )
    assert found == {
        "shadow_preemptions|intended=swap": 2,
        "shadow_preemptions|intended=recompute": 1,
        "shadow_cost_microseconds|option=intended": 875_000,
        "shadow_cost_microseconds|option=executed": 1_750_000,
    }
    assert {name.partition("|")[0] for name in found} <= set(COUNTERS)


@pytest.mark.parametrize(
    ("decision", "reason"),
    [
        (decided(1), "no_prediction"),
        (decided(1, cost(0.5), cost(0.1, extrapolated=True)), "extrapolated"),
        (decided(0, cost(0.5), options=BOTH[:1], reason="reset"), "reset"),
    ],
)
def test_of_what_nothing_can_be_said_is_counted_by_why(decision: Decision, reason: str) -> None:
    found = counted(decision)
    assert found[f"shadow_untold|reason={reason}"] == 1
    assert not [name for name in found if name.startswith("shadow_cost")]
    assert "shadow_untold" in COUNTERS


def test_a_copier_in_shadow_mode_has_no_memory_and_fails_what_it_is_asked_for() -> None:
    copier: Any = ShadowCopier([torch.ones(8, 250)])
    assert copier.host_segments == [] and not copier.pinned
    copier.save(Job(1, "a", (0, 1), (0, 1)))
    copier.load(Job(2, "a", (2, 3), (0, 1)))
    assert [load.ok for load in copier.poll()] == [False]
    assert [(transfer.direction, transfer.ok) for transfer in copier.transfers] == [("save", False), ("load", False)]
    assert "shadow mode" in copier.transfers[0].error
