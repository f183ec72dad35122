"""Who a save is accounted to."""

from __future__ import annotations

from kvpolicy.host_store.contents import HostBlock, HostCopy, by_owner


def test_saves_are_accounted_to_the_oldest_copy_that_needs_them_and_to_the_cache() -> None:
    first, second, cache = HostCopy(10, number=1), HostCopy(20, number=2), HostCopy(0)
    shared, own = HostBlock("a", 1, [first, second], slot=0), HostBlock("b", 2, [second], slot=1)
    cached, dropped = HostBlock("c", 3, [], slot=2), HostBlock(None, 4, [], slot=3)
    blocks = [own, shared, cached, dropped]
    assert by_owner(blocks, cache) == [(cache, [cached]), (first, [shared]), (second, [own])]
    assert by_owner(blocks) == [(first, [shared]), (second, [own])], "less what no copy needs"
