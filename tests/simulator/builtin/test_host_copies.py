"""The host pool: slots, queued bytes and the state of each copy, from its save to its load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvpolicy.simulator.builtin.host_copies import HostPool
from kvpolicy.simulator.builtin.live_request import Account, LiveRequest
from kvpolicy.workload import Request
from tests.simulator.worlds import SMALL


@pytest.fixture
def pool() -> HostPool:
    return HostPool(SMALL)


def victim(tokens: int = 10) -> tuple[LiveRequest, Account]:
    live = LiveRequest(0, Request(0.0, tokens, 5), 0.0, outputs=1, computed=tokens)
    account: Any = SimpleNamespace(busy=0, tokens=tokens)
    return live, cast(Account, account)


def test_a_copy_from_save_to_load(pool: HostPool) -> None:
    live, account = victim()
    copy = pool.save(live, account, 3)
    assert (pool.free, pool.queued_bytes("save"), pool.waiting, account.busy) == (5, 3, True, 1)
    assert pool.take() == ([copy], []) and copy.sent and not pool.waiting
    pool.saved(copy)
    assert (pool.queued_bytes("save"), account.busy, copy.saved) == (0, 0, True)
    assert pool.loadable_tokens(live, 4) == 6
    pool.begin_load(live, 6, 4)
    assert (copy.load_blocks, pool.queued_bytes("load"), account.busy) == (2, 2, 1)
    assert pool.loadable_tokens(live, 0) == 0, "it is being loaded"
    assert pool.take() == ([], [copy])
    pool.loaded(copy)
    assert (pool.free, pool.queued_bytes("load"), account.busy, live.copy) == (8, 0, 0, None)


def test_the_last_known_token_is_never_loaded(pool: HostPool) -> None:
    live, account = victim(10)
    live.outputs = 0
    pool.save(live, account, 3)
    assert pool.loadable_tokens(live, 0) == 9
    assert pool.loadable_tokens(live, 12) == 0


def test_a_save_that_is_forgotten_before_it_is_sent_is_none(pool: HostPool) -> None:
    live, account = victim()
    copy = pool.save(live, account, 3)
    assert pool.forget(live) is copy
    assert (pool.free, pool.queued_bytes("save"), account.busy) == (8, 0, 0)
    assert pool.take() == ([], [])
    assert pool.forget(live) is None


def test_a_save_that_is_forgotten_under_way_still_ends(pool: HostPool) -> None:
    live, account = victim()
    copy = pool.save(live, account, 3)
    pool.take()
    assert pool.forget(live) is copy
    assert (pool.free, pool.queued_bytes("save"), account.busy) == (8, 0, 1)
    pool.saved(copy)
    assert (pool.queued_bytes("save"), account.busy) == (0, 0)


def test_a_saved_copy_is_forgotten_without_a_word(pool: HostPool) -> None:
    live, account = victim()
    copy = pool.save(live, account, 3)
    pool.take()
    pool.saved(copy)
    assert pool.forget(live) is None and copy.forgotten and pool.free == 8
