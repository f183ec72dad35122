"""Who a save is accounted to, which copies are given up first, and whose slots that would free."""

from __future__ import annotations

from kvpolicy.host_store.contents import Copies, HostBlock, HostCopy, by_owner


def test_saves_are_accounted_to_the_oldest_copy_that_needs_them_and_to_the_cache() -> None:
    first, second, cache = HostCopy(10, number=1), HostCopy(20, number=2), HostCopy(0)
    shared, own = HostBlock("a", 1, [first, second], slot=0), HostBlock("b", 2, [second], slot=1)
    cached, dropped = HostBlock("c", 3, [], slot=2), HostBlock(None, 4, [], slot=3)
    blocks = [own, shared, cached, dropped]
    assert by_owner(blocks, cache) == [(cache, [cached]), (first, [shared]), (second, [own])]
    assert by_owner(blocks) == [(first, [shared]), (second, [own])], "less what no copy needs"


def held(copies: Copies, copy: HostCopy, *blocks: HostBlock) -> HostCopy:
    copies.add(copy)
    for block in blocks:
        block.holders.append(copy)
        copy.blocks.append(block)
    return copy


def test_a_slot_counts_where_all_who_need_it_are_of_a_lower_rank() -> None:
    copies = Copies()
    own, shared, watched = HostBlock("a", 1, [], slot=0), HostBlock("b", 2, [], slot=1), HostBlock("c", 3, [])
    short = held(copies, HostCopy(10), own, shared, watched)
    long = held(copies, HostCopy(20), shared)
    ranks = (long.rank, (long.rank[0], 21))
    assert [copies.slots_below(rank, ()) for rank in (short.rank, *ranks)] == [0, 1, 2]
    assert [copies.slots_below(rank, {"a"}) for rank in ranks] == [0, 1]
    long.loading = True
    assert copies.slots_below(ranks[1], ()) == 1


def test_the_lowest_copy_that_has_slots_or_needs_the_block_is_given_up() -> None:
    copies = Copies()
    watched, block = HostBlock("a", 1, []), HostBlock("b", 2, [], slot=0)
    low, high = held(copies, HostCopy(10), watched), held(copies, HostCopy(20), block)
    assert (len(copies), list(copies)) == (2, [low, high])
    assert copies.next_given_up(block) is high and copies.next_given_up(watched) is low
    high.loading = True
    assert copies.next_given_up(block) is None
    assert copies.remove(low) and not copies.remove(low) and list(copies) == [high]
