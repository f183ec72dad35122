"""What a swapped preemption executes becomes final once: by its first save, by its step, or by being given up."""

from __future__ import annotations

import pytest

from kvpolicy.attribution.ledger import Ledger, OpenPreemption
from kvpolicy.events import Decision
from kvpolicy.policy import feasible_options
from kvpolicy_vllm.plugin.host_copies import CopyBook
from kvpolicy_vllm.plugin.observers import Identity, Observer, Observers, Pending
from kvpolicy_vllm.plugin.swaps import Swaps
from tests.synthetic import situation


class Executed(Observer):
    def __init__(self) -> None:
        self.decisions: list[tuple[str, str, str]] = []

    def executed(self, pending: Pending) -> None:
        decision = pending.decision
        self.decisions.append((pending.identity.preemption_id, str(decision.executed), decision.reason))


@pytest.fixture
def executed() -> Executed:
    return Executed()


@pytest.fixture
def swaps(executed: Executed) -> Swaps:
    """Over a host pool of one slot."""
    ledger: Ledger[OpenPreemption] = Ledger()
    observers = Observers(pytest.fail)
    observers.add(executed)
    return Swaps(CopyBook(1, 1, 100), ledger, observers)


def pending(name: str, tokens: int) -> Pending:
    one = situation(tokens)
    decision = Decision(feasible_options(one), (0.0, 1.0), 1, (), "always-swap", "{}", "swap")
    return Pending(one, decision, Identity(f"preemption of {name}", name, 0, 0, {}))


def test_a_swap_without_a_save_is_final_with_its_step(swaps: Swaps, executed: Executed) -> None:
    swaps.begin(pending("r", 64), [("hash", 1)])
    assert executed.decisions == []
    for _ in range(2):
        swaps.step_taken()
    assert executed.decisions == [("preemption of r", "swap", "")] and not swaps.undecided


def test_what_is_given_up_in_the_step_that_made_it_was_a_recompute(swaps: Swaps, executed: Executed) -> None:
    swaps.begin(pending("short", 64), [(None, 1)])
    swaps.begin(pending("long", 128), [(None, 2)])
    swaps.step_taken()
    assert executed.decisions[0] == ("preemption of short", "recompute", "host_full")
    assert [name for name, *_ in executed.decisions].count("preemption of short") == 1
