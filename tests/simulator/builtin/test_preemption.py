"""Preemptions of the built-in engine: the situation at each, what is decided, and who is told."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy import policy
from kvpolicy.events import Decision
from kvpolicy.simulator import Builtin, MemorySink
from kvpolicy.simulator.builtin.blocks import CountedPool
from kvpolicy.simulator.builtin.host_copies import HostPool
from kvpolicy.simulator.builtin.live_request import KeyedBlock, LiveRequest
from kvpolicy.simulator.builtin.preemption import situation_of
from kvpolicy.simulator.builtin.scheduler import Scheduler, VllmVictims
from kvpolicy.survival import Survival
from kvpolicy.workload import Request
from tests.simulator.worlds import SECONDS, SMALL, run, workload

BOTH = workload(Request(0.0, 7, 8, priority=2), Request(0.0, 6, 8))


def test_a_situation_counts_blocks_and_the_others() -> None:
    """Blocks of 4: the victim holds 3 for 10 tokens; of two others one has a block to itself that is about to fill."""
    server = replace(SMALL, device_blocks=8, segment_bytes=None)
    pool, copies = CountedPool(8), HostPool(server)
    scheduler = Scheduler(server, pool, copies, VllmVictims("fcfs"), lambda live: None, lambda *about: None)
    others = [LiveRequest(n, Request(0.0, 8, 9), 0.0, outputs=1, computed=8) for n in (0, 1)]
    victim = LiveRequest(2, Request(0.0, 9, 5, priority=4), 0.0, outputs=2, computed=10, preemptions=3)
    for live, blocks in ((others[0], 2), (others[1], 3), (victim, 3)):
        pool.grow(live, blocks)
    scheduler.running = others
    result = situation_of(victim, scheduler, copies, server, Survival(), 5.0)
    assert (result.computed_tokens, result.held_blocks, result.shared_blocks, result.hashed_blocks) == (10, 3, 0, 0)
    assert (result.running_requests, result.batch_tokens, result.waiting_requests) == (2, 16, 0)
    assert (result.free_blocks, result.short_blocks, result.device_blocks) == (0, 1, 9)
    assert (result.earlier_preemptions, result.priority, result.cause, result.time_s) == (3, 4, "memory", 5.0)
    assert result.segment_bytes == server.block_bytes


def test_a_slot_with_a_content_that_the_victim_needs_makes_no_room_for_it() -> None:
    """The only slot holds the victim's first block for a shorter request."""
    server = replace(SMALL, host_blocks=1)
    pool, copies, block = CountedPool(8), HostPool(server), KeyedBlock(1)
    scheduler = Scheduler(server, pool, copies, VllmVictims("fcfs"), lambda live: None, lambda *about: None)
    shorter = LiveRequest(0, Request(0.0, 8, 9), 0.0, outputs=1, computed=8)
    account: Any = SimpleNamespace(busy=0, tokens=8)
    copies.keep(shorter, account, [(1, block)])
    copies.lost([block])
    victim = LiveRequest(1, Request(0.0, 9, 5), 0.0, outputs=2, computed=10)
    pool.grow(victim, 3)
    free = [situation_of(victim, scheduler, copies, server, Survival(), 5.0).free_host_blocks]
    victim.keyed_blocks, victim.cached = [block], 4
    free.append(situation_of(victim, scheduler, copies, server, Survival(), 5.0).free_host_blocks)
    assert free == [1, 0]


@pytest.mark.parametrize("name", ["always-recompute", "always-swap"])
def test_every_decision_is_reported_and_recorded_once(name: str) -> None:
    decisions: list[Decision] = []
    done = Builtin(wall=lambda: 0.0).run(
        BOTH, policy.load(name), SMALL, SECONDS, seed=1, sink=MemorySink(), on_decision=decisions.append
    )
    assert done.trace is not None
    rows = done.trace.rows("decisions")
    assert [row["executed"] for row in rows] == [decision.executed for decision in decisions]
    assert sum(done.summary.preemptions.values()) == len(rows) == done.trace.table("outcomes").num_rows > 0


@pytest.mark.parametrize(("blocks", "hit", "loaded", "recomputed"), [(5, 4, 0, 4), (6, 8, 3, 0)])
def test_a_policy_may_think_better_of_a_load(blocks: int, hit: int, loaded: int, recomputed: int) -> None:
    """Of the victim one block survives, which is odd, or two."""
    server = replace(SMALL, prefix_caching=True, device_blocks=blocks)
    _, trace = run(BOTH, server, "python:tests.fickle:Fickle", SECONDS)
    (row,) = trace.rows("outcomes")
    assert trace.rows("decisions")[0]["executed"] == "swap"
    assert (row["local_hit_tokens"], row["loaded_tokens"], row["recomputed_tokens"]) == (hit, loaded, recomputed)


@pytest.mark.parametrize(("share", "loaded"), [(1.0, "all"), (0.5, "a part"), (0.0, "nothing")])
def test_a_share_of_what_is_lacking_is_loaded(share: float, loaded: str) -> None:
    _, trace = run(BOTH, SMALL, "always-swap", SECONDS, load_share=share)
    (row,) = [row for row in trace.rows("outcomes") if row["ended"] == "resumed"][:1]
    if loaded == "all":
        assert row["loaded_tokens"] > 0 and row["recomputed_tokens"] <= 1
    elif loaded == "nothing":
        assert row["loaded_tokens"] == 0 and row["recomputed_tokens"] > 0
    else:
        assert row["loaded_tokens"] > 0 and row["recomputed_tokens"] > 1


def test_what_survives_is_expected_from_what_survived_before() -> None:
    """The first victim by the prior, later ones by what was found of earlier ones; without caching, nothing."""
    crowd = workload(*(Request(0.1 * number, 40, 90) for number in range(12)))
    server = replace(SMALL, device_blocks=120, prefix_caching=True)
    _, trace = run(crowd, server, "always-recompute", SECONDS)
    first, *later = sorted(trace.rows("decisions"), key=lambda row: int(row["preemption_id"].rsplit("-", 1)[1]))
    names = ("held_blocks", "shared_blocks", "hashed_blocks", "free_blocks", "block_size", "cause")

    def untaught(row: dict[str, Any]) -> float:
        return Survival().hit_blocks(*(row[name] for name in names))

    assert first["hit_blocks"] == untaught(first) > 0
    assert later and all(0 <= row["hit_blocks"] <= row["hashed_blocks"] for row in later)
    assert any(abs(row["hit_blocks"] - untaught(row)) > 1 for row in later)
    _, trace = run(crowd, replace(server, prefix_caching=False), "always-recompute", SECONDS)
    assert {row["hit_blocks"] for row in trace.rows("decisions")} == {0.0}


def test_ids_of_preemptions_are_numbered_and_name_their_core() -> None:
    _, trace = run(BOTH, SMALL, "always-swap", SECONDS)
    ids = [row["preemption_id"] for row in trace.rows("decisions")]
    (core,) = trace.headers
    assert ids == [f"{core}-{number}" for number in range(1, len(ids) + 1)]
