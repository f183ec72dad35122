"""Victims and admission of the built-in scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from kvpolicy.simulator import Server
from kvpolicy.simulator.builtin.blocks import CountedPool
from kvpolicy.simulator.builtin.host_copies import HostPool
from kvpolicy.simulator.builtin.live_request import Account, LiveRequest, Status, Step
from kvpolicy.simulator.builtin.scheduler import Scheduler, VllmVictims
from kvpolicy.workload import Request
from tests.simulator.worlds import SMALL, run, workload


class Longest:
    """Takes the request that holds most."""

    def choose(self, running: Sequence[LiveRequest]) -> int:
        return max(range(len(running)), key=lambda i: running[i].held)


def test_victims_are_a_policy_too() -> None:
    source = workload(Request(0.0, 9, 8), Request(0.0, 4, 8))
    server = replace(SMALL, device_blocks=4)
    assert run(source, server)[1].rows("decisions")[0]["request"] == "1"
    assert run(source, server, victims=Longest())[1].rows("decisions")[0]["request"] == "0"


@pytest.mark.parametrize(("tokens", "admitted"), [(16, True), (20, False)])
def test_a_load_leaves_prefills_the_blocks_they_still_need(tokens: int, admitted: bool) -> None:
    """Of ten free blocks a prefill on its way will need five, and the loaded request its next one: a load of four fits,
    one of five does not."""
    server = Server(block_size=4, block_bytes=1, device_blocks=11, host_blocks=10, token_budget=4)
    copies = HostPool(server)
    events: list[int] = []
    scheduler = Scheduler(
        server, CountedPool(11), copies, VllmVictims("fcfs"), lambda live: None, lambda *about: events.append(about[1])
    )
    scheduler.arrive(LiveRequest(0, Request(0.0, 24, 1), 0.0))
    scheduler.schedule(Step(0))
    victim = LiveRequest(1, Request(0.0, tokens, 5), 0.0, status=Status.PREEMPTED, outputs=1, preemptions=1)
    copies.keep(victim, cast(Account, SimpleNamespace(busy=0, tokens=tokens)), [(None, None)] * (tokens // 4))
    scheduler.waiting.append(victim)
    scheduler.admit(Step(1), 4)
    assert (victim.status is Status.LOADING) is admitted
    assert events == ([0, tokens] if admitted else [0])
