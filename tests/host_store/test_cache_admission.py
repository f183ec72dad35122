"""What of the lost contents is saved for the cache, and what while too much waits to be saved."""

from __future__ import annotations

from kvpolicy.caching import Hinted, Lru
from kvpolicy.caching.tree import Tree
from kvpolicy.host_store import CacheAdmission, HostStore
from kvpolicy.host_store.contents import HostBlock
from kvpolicy.request_marks import HintLimits
from tests.host_store.test_cache import chain, keys, pin, serve


def test_nothing_is_admitted_that_is_of_no_chain_or_not_worth_it() -> None:
    """Worth goes by the longest chain that a block was seen in, and not by its place there."""
    tree, admission = Tree(), CacheAdmission()
    short, long = tree.nodes(chain("ab")), tree.nodes(chain("uvwx"))
    blocks = [HostBlock(node.key, place, [], node=node) for place, node in enumerate([*short, *long])]
    blocks.append(HostBlock("nobody", 9, []))
    assert [block for _, block in admission.admitted(blocks, Lru(4))] == blocks[:-1]
    admission.worth_saving = lambda blocks: blocks > 2
    assert [node for node, _ in admission.admitted(blocks, Lru(4))] == long
    admission.takes_saves = lambda: False
    assert admission.admitted(blocks, Lru(4)) == []


def test_while_too_much_waits_to_be_saved_only_what_is_not_to_be_missed_is_saved() -> None:
    """What is pinned; and of a prompt whose end is there the rest, without which that is of no use."""
    store = HostStore(8, Hinted(Lru(8), lambda: 0.0, 1, HintLimits(600.0, 0.5, 0.5)))
    places = serve(store, "abcd", 10)
    store.lost(places[3:])
    store.admission.takes_saves = lambda: False
    lost = [*pin(store, "uv", 20), *serve(store, "xyz", 30), *reversed(places)]
    assert {*keys(store.lost(lost))} == {"u", "a", "uv", "ab", "abc"}
    assert (store.counts.refused, store.counts.stored) == (3, 6) and store.lookup(chain("abcd")) == 4
    store.admission.worth_saving = lambda blocks: False
    assert keys(store.lost(pin(store, "st", 40))) == [], "it would not be loaded either"
    plain = HostStore(8, Lru(8))
    plain.admission.takes_saves = lambda: False
    assert plain.lost(serve(plain, "abc", 10)) == [] and plain.counts.refused == 3


def test_where_far_too_much_waits_what_is_pinned_waits_as_well() -> None:
    """But for the beginning of a prompt whose end is there."""
    store = HostStore(10, Hinted(Lru(10), lambda: 0.0, 1, HintLimits(600.0, 0.5, 0.5)))
    store.admission.takes_saves = lambda: False
    begun, other = pin(store, "uvw", 20), pin(store, "xy", 30)
    assert keys(store.lost(begun[2:])) == ["uvw"]
    store.admission.takes_pins = lambda: False
    assert {*keys(store.lost([*other, *begun[:2]]))} == {"u", "uv"} and store.counts.refused == 2
    other = pin(store, "xy", 30)
    store.admission.takes_pins = lambda: True
    assert keys(store.lost(other)) == ["x", "xy"]


def test_a_pin_whose_time_is_over_waits_like_all_others() -> None:
    """Also where the device loses its blocks long after the last request has come."""
    now_s = 0.0
    store = HostStore(8, Hinted(Lru(8), lambda: now_s, 1, HintLimits(600.0, 0.5, 0.5)))
    store.admission.takes_saves = lambda: False
    first, second = pin(store, "uv", 20), pin(store, "xy", 30)
    now_s = 599.0
    assert keys(store.lost(first)) == ["u", "uv"]
    now_s = 600.0
    assert store.lost(second) == [] and store.counts.refused == 2
