"""The host pool: slots, queued bytes and the state of each copy, from its save to its load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvpolicy.simulator import Builtin
from kvpolicy.simulator.builtin.blocks import Contents
from kvpolicy.simulator.builtin.host_copies import HostPool
from kvpolicy.simulator.builtin.live_request import Account, KeyedBlock, LiveRequest
from kvpolicy.workload import Request
from tests.simulator.scarce import refuse_loss, refuse_other_situation
from tests.simulator.worlds import SMALL


@pytest.fixture
def pool() -> HostPool:
    return HostPool(SMALL)


def victim(tokens: int = 10) -> tuple[LiveRequest, Account]:
    live = LiveRequest(0, Request(0.0, tokens, 5), 0.0, outputs=1, computed=tokens)
    account: Any = SimpleNamespace(busy=0, tokens=tokens)
    return live, cast(Account, account)


UNKEYED: Contents = [(None, None)] * 3


def test_a_copy_from_save_to_load(pool: HostPool) -> None:
    live, account = victim()
    copy = pool.keep(live, account, UNKEYED)
    assert (pool.free, pool.queued_bytes("save"), pool.waiting) == (5, 3, True)
    (save,), loads = pool.take()
    assert (save.copy, len(save.blocks), loads, account.busy) == (copy, 3, [], 1)
    assert pool.take_begun() == [] and not pool.waiting
    pool.saved(save, 0.5)
    assert (pool.queued_bytes("save"), account.busy) == (0, 0)
    assert pool.loadable_tokens(live, 4) == 6
    pool.begin_load(live, 4, 6)
    assert (pool.queued_bytes("load"), pool.free) == (2, 6), "the first block is not needed"
    assert pool.loadable_tokens(live, 0) == 0, "it is being loaded"
    saves, (load,) = pool.take()
    assert (saves, len(load.blocks), load.saved_by, account.busy) == ([], 2, save.copy_id, 1)
    pool.loaded(load)
    assert (pool.free, pool.queued_bytes("load"), account.busy, live.copy) == (8, 0, 0, None)


def test_a_cached_block_is_saved_when_it_is_evicted(pool: HostPool) -> None:
    live, account = victim()
    blocks = [KeyedBlock(2), KeyedBlock(4)]
    copy = pool.keep(live, account, [(2, blocks[0]), (4, blocks[1])])
    assert pool.take() == ([], []) and pool.take_begun() == [account]
    assert pool.watches(blocks[1]) and not pool.watches(KeyedBlock(4))
    pool.lost([KeyedBlock(6), blocks[1]])
    (save,), _ = pool.take()
    assert [block.key for block in save.blocks] == [4] and pool.free == 7 and pool.watching
    assert pool.forget(live) is copy and pool.free == 8 and not pool.watching


def test_the_copy_of_the_shortest_request_is_given_up(pool: HostPool) -> None:
    (short, short_account), (long, long_account) = victim(10), victim(20)
    pool.keep(short, short_account, UNKEYED)
    assert (pool.obtainable(5, 8), pool.obtainable(20, 8)) == (5, 8)
    pool.keep(long, long_account, UNKEYED * 2)
    assert short.copy is None and pool.take_given_up() == [short_account] and pool.free == 2
    (save,), _ = pool.take()
    assert save.copy is long.copy and pool.queued_bytes("save") == 6


def test_a_slot_with_a_content_that_the_copy_needs_itself_is_not_obtained(pool: HostPool) -> None:
    live, account = victim(10)
    block = KeyedBlock(2)
    pool.keep(live, account, [(2, block), *UNKEYED])
    pool.lost([block])
    assert (pool.obtainable(20, 8), pool.obtainable(20, 8, [KeyedBlock(2), KeyedBlock(6)])) == (8, 7)


def test_the_last_known_token_is_never_loaded(pool: HostPool) -> None:
    live, account = victim(10)
    live.outputs = 0
    pool.keep(live, account, UNKEYED)
    assert pool.loadable_tokens(live, 0) == 9
    assert pool.loadable_tokens(live, 12) == 0


def test_a_save_that_is_forgotten_before_it_is_sent_is_none(pool: HostPool) -> None:
    live, account = victim()
    copy = pool.keep(live, account, UNKEYED)
    assert pool.forget(live) is copy
    assert pool.take() == ([], [])
    assert (pool.free, pool.queued_bytes("save"), account.busy) == (8, 0, 0)
    assert pool.forget(live) is None


def test_a_save_that_is_forgotten_under_way_still_ends(pool: HostPool) -> None:
    live, account = victim()
    copy = pool.keep(live, account, UNKEYED)
    (save,), _ = pool.take()
    assert pool.forget(live) is copy
    assert (pool.free, pool.queued_bytes("save"), account.busy) == (8, 3, 1), "the link is busy with it"
    pool.saved(save, 0.5)
    assert (pool.queued_bytes("save"), account.busy) == (0, 0)


def test_little_host_memory_is_used_where_it_saves_most() -> None:
    refuse_loss(Builtin(), range(5))


def test_a_victims_price_is_of_the_batch_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_other_situation(Builtin(), monkeypatch)
