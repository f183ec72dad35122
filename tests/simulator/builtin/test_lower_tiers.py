"""Host memory and files that hold prompts, in the built-in simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvpolicy import policy
from kvpolicy.caching import Foreseen
from kvpolicy.fields import WrongValue
from kvpolicy.host_store.copy_queues import MAX_SAVE_BACKLOG_S
from kvpolicy.prefix_hits import PrefixHits
from kvpolicy.simulator import Link, LowerTiers, MemorySink, Run, Server
from kvpolicy.simulator.builtin import Builtin
from kvpolicy.simulator.builtin.blocks import pool_for, shared_keys
from kvpolicy.simulator.builtin.lower_tiers import host_pool
from kvpolicy.simulator.hardware.law_times import ConstantTimes
from kvpolicy.workload import Request, Workload
from tests.priced import Priced

BLOCK, BYTES = 16, 1000
SERVER = Server(BLOCK, BYTES, 10, 40, cache=LowerTiers("lru"))
"""The device holds one and a half of the prompts of :func:`talks`, host memory all."""
TIMES = ConstantTimes(0.001, (1e-4, 0.0, 0.0, 0.0, 0.0, 0.0), 0.0, 1e6)
"""A token takes 0.1 ms, a block's copy 1 ms."""


def talks(*ids: int, tokens: int = 96, gap_s: float = 1.0) -> Workload:
    """Prompts that come one by one; equal ids are equal prompts of six blocks, the last token of which is another's."""
    requests = tuple(
        Request(gap_s * number, tokens, 2, tuple(100 * talk + block for block in range(6)), BLOCK)
        for number, talk in enumerate(ids)
    )
    return Workload("talks", requests, 0)


PLAIN = Builtin()


def run(work: Workload, server: Server = SERVER, spec: str = "always-swap", simulator: Builtin = PLAIN) -> Run:
    return simulator.run(work, policy.load_policy(spec), server, TIMES, sink=MemorySink())


def test_a_prompt_that_the_device_has_lost_is_loaded() -> None:
    """Of six blocks five can be found: the last token is always computed. The second prompt takes five places."""
    result = run(talks(1, 2, 3, 1))
    assert result.summary.prefix_hits == PrefixHits(4 * 96, 0, 80, 0, 80)
    assert result.trace is not None
    rows = list(result.trace.rows("transfers"))
    assert {row["preemption_id"] for row in rows} == {"cache"}
    loads = [row for row in rows if row["direction"] == "load"]
    assert [row["bytes"] for row in loads] == [5 * BYTES]
    (last,) = [row for row in result.trace.rows("requests") if row["request"] == "3"]
    assert last["loaded_tokens"] == 80
    # 16 tokens and two steps, the load, and a step that waits for it.
    assert last["first_token_s"] - 3.0 == pytest.approx(0.001 + 16e-4 + 5e-3, abs=1.5e-3)


@pytest.mark.parametrize(("share", "tokens"), [(0.6, 48), (0.0, 0)])
def test_a_share_of_what_a_prompt_finds_is_loaded(share: float, tokens: int) -> None:
    """Of five blocks three, from the front; all five were found."""
    result = run(talks(1, 2, 3, 1), simulator=Builtin(load_share=share))
    assert result.summary.prefix_hits == PrefixHits(4 * 96, 0, 80, 0, tokens)
    assert result.trace is not None
    loads = [row for row in result.trace.rows("transfers") if row["direction"] == "load"]
    assert [row["bytes"] for row in loads] == [tokens // BLOCK * BYTES] * bool(tokens)


def test_what_is_on_the_device_is_not_loaded() -> None:
    assert run(talks(1, 1)).summary.prefix_hits == PrefixHits(192, 80)


def test_a_policy_that_always_recomputes_stores_nothing_for_others() -> None:
    """As in a server: what would not be loaded is not saved."""
    summary = run(talks(1, 2, 3, 1), spec="always-recompute").summary
    assert summary.prefix_hits == PrefixHits(4 * 96) and summary.moved_bytes == 0


@pytest.mark.parametrize("block_s", [5e-4, 1.0], ids=["cheap", "dear"])
def test_what_costs_more_to_save_and_load_than_to_compute_is_not_stored(block_s: float) -> None:
    hits = PLAIN.run(talks(1, 2, 3, 1), Priced(block_s=block_s), SERVER, TIMES).summary.prefix_hits
    assert hits.host_tokens == (80 if block_s < 1.0 else 0)


def test_a_slow_link_carries_the_saves_that_it_can_and_no_others() -> None:
    """A block's save takes 0.1 s, and a prompt's six blocks are lost every 0.2 s: without a limit the last of them
    would wait for more than ten seconds. Of a prompt whose end was saved the beginning is, too."""
    slow = ConstantTimes(0.001, (1e-4, 0.0, 0.0, 0.0, 0.0, 0.0), 0.0, 1e4)
    work = talks(*range(40), gap_s=0.2)
    result = PLAIN.run(
        work, policy.load_policy("always-swap"), replace(SERVER, host_blocks=400), slow, sink=MemorySink()
    )
    assert result.trace is not None
    saves = [row for row in result.trace.rows("transfers") if row["direction"] == "save"]
    waits_s = [row["start_s"] - row["submit_s"] for row in saves]
    assert MAX_SAVE_BACKLOG_S / 2 < max(waits_s) <= MAX_SAVE_BACKLOG_S + 0.6, "behind a prompt at most beyond that"
    assert 60 <= sum(row["bytes"] for row in saves) // BYTES <= 100, "of some 240 that are lost in 8 s"


def test_without_a_cache_nothing_is_in_host_memory() -> None:
    summary = run(talks(1, 2, 3, 1), replace(SERVER, cache=None)).summary
    assert summary.prefix_hits == PrefixHits(4 * 96) and summary.moved_bytes == 0
    off = run(talks(1, 2, 3, 1), replace(SERVER, cache=LowerTiers("off"))).summary
    assert replace(off, simulator_wall_s=0.0) == replace(summary, simulator_wall_s=0.0)


def test_host_memory_holds_what_its_policy_keeps() -> None:
    """Slots for one prompt and a half: the prompt before the last one's is there no more under least recent use, and is
    where the prompts to come are known."""
    work, server = talks(1, 2, 3, 4, 1), replace(SERVER, host_blocks=6)
    assert run(work, server).summary.prefix_hits.host_tokens < 80
    chains = [shared_keys(request, BLOCK)[:6] for request in work]
    known = Builtin(caching=lambda capacity, price: Foreseen(capacity, chains))
    assert run(work, server, simulator=known).summary.prefix_hits.host_tokens == 80


def test_what_knows_the_prompts_to_come_hears_when_each_is_served_and_of_the_price() -> None:
    """Host memory gets what it would rather have, whatever the positions are."""
    work, made = talks(1, 2, 3, 4, 1, 2), list[Foreseen]()
    chains = [shared_keys(request, BLOCK)[:6] for request in work]

    def make(capacity: int, price: Callable[[int], float]) -> Foreseen:
        made.append(Foreseen(capacity, chains, price))
        return made[-1]

    server = replace(SERVER, host_blocks=8)
    run(work, server, simulator=Builtin(caching=make))
    (policy,) = made
    assert policy._served == 6 and not any(policy._uses.values()) and len(policy) == 8
    copies, _ = host_pool(server, lambda index: 1.0, pool_for(10, BLOCK, True), lambda: 0.0, make)
    assert copies._admission.in_order == made[-1].in_order and copies.on_served == made[-1].served


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("overlapped", [False, True])
def test_leaps_change_nothing_and_no_slot_is_lost(asynchronous: bool, overlapped: bool) -> None:
    requests = tuple(
        Request(
            0.005 * number,
            129 + 7 * (number % 9),
            30 + number % 40,
            tuple(100 * (number % 7) + b for b in range(8)),
            16,
        )
        for number in range(60)
    )
    server = replace(
        SERVER, device_blocks=30, host_blocks=25, asynchronous=asynchronous, link=Link(overlapped=overlapped),
        cache=LowerTiers("cost", file_blocks=20),
    )  # fmt: skip
    work = Workload("mixed", requests, 0)
    fast, slow = (run(work, server, simulator=Builtin(leap=leap)) for leap in (True, False))
    assert fast.summary.preemptions["swap"] and fast.summary.prefix_hits.loaded_tokens
    assert replace(fast.summary, simulator_wall_s=0.0) == replace(slow.summary, simulator_wall_s=0.0)


def test_a_cache_needs_prefix_caching() -> None:
    with pytest.raises(WrongValue, match="cache is given without prefix caching"):
        replace(SERVER, prefix_caching=False)
