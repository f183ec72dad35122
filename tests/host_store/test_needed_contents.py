"""What copies and loads need is set aside by the caching policy, and nothing else changes by that."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Sequence

import pytest

from kvpolicy.caching import KINDS, Guarded, Hinted, Lru
from kvpolicy.caching.base import CachingPolicy, Chain, Key
from kvpolicy.caching.by_cost import SAMPLE
from kvpolicy.host_store import HostBlock, HostCopy, HostStore
from kvpolicy.host_store.contents import Protected
from kvpolicy.request_marks import ANYBODY, HintLimits, Hints
from tests.host_store.test_cache import Device, heeding

WITH_HINTS = [f"{kind} with hints" for kind in KINDS]


def made(kind: str) -> Callable[[int], CachingPolicy]:
    name, _, hints = kind.partition(" ")
    return heeding(name) if hints else KINDS[name]


class Recording(HostStore):
    def __init__(self, slots: int, cache: CachingPolicy | None = None) -> None:
        super().__init__(slots, cache)
        self.gone: list[tuple[Hashable, int | None]] = []
        """What was evicted, with its slot, in this order."""

    def _evicted(self, block: HostBlock) -> None:
        self.gone.append((block.key, block.slot))
        super()._evicted(block)


class PassingOver(Recording):
    """Its policy does not hear of what copies need, and passes over it; each block of a copy makes room by itself."""

    def _hold_began(self, block: HostBlock) -> None:
        pass

    def _hold_ended(self, block: HostBlock) -> None:
        pass

    def _make_room(
        self, slots: int, needed: Container[Hashable] | None = None, newcomers: Sequence[Hashable] = ()
    ) -> None:
        if needed != ():
            super()._make_room(slots, needed, newcomers)


class Wide(Device):
    """More prompts than a policy looks at for one eviction. Copies need most slots, and few requests say anything."""

    PLACES, SLOTS, LETTERS = 150, (80, 100), "abcdefghijklmnop"

    def hint(self, blocks: Sequence[str], over: bool = False) -> None:
        if self.random.random() < 0.1:
            super().hint(blocks, over)


def act(device: Device) -> None:
    often = [device.end, device.end, device.end, device.end, device.hit, device.loaded_now]
    device.random.choice([*often, *often, device.load, device.load, device.forget, device.fail])()
    if device.random.random() < 0.002:
        device.reset()


def check_told(cache: CachingPolicy | None, store: HostStore) -> None:
    """The policy sets aside what copies need, and what hints hold, and nothing else."""
    needed = {key for key, block in store._by_key.items() if block.holders}
    if isinstance(cache, Hinted):
        assert cache._needed == needed
        needed, cache = needed.union(cache._holds._of), cache.inner
    if isinstance(cache, Guarded):
        assert cache._held == needed
        cache = cache.policy
    assert vars(cache)["_held"] == needed


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", [*KINDS, *WITH_HINTS])
@pytest.mark.parametrize("size", [Device, Wide])
def test_the_same_goes_in_the_same_order_as_where_all_that_copies_need_is_passed_over(
    size: type[Device], kind: str, seed: int
) -> None:
    devices = [size(seed, made(kind), stored) for stored in (Recording, PassingOver)]
    for _ in range(500):
        for device in devices:
            act(device)
            device.check()
        check_told(devices[0].store.cache, devices[0].store)
        now, before = [device.store for device in devices]
        assert isinstance(now, Recording) and isinstance(before, PassingOver)
        assert (now.gone, [*now._unused], now.counts) == (before.gone, [*before._unused], before.counts)
    assert len(now.gone) > 10 and devices[0].loaded > 5


def test_room_for_all_blocks_of_a_copy_is_made_at_once() -> None:
    """And a copy is given up where the policy has too little."""
    asked: list[int] = []

    class Asked(Lru):
        def evict(self, count: int, protected: Container[Key]) -> list[Key]:
            asked.append(count)
            return super().evict(count, protected)

    store = HostStore(8, Asked(8))
    short = HostCopy(10)
    store.add(short, [(None, place) for place in range(2)])
    served(store, [*"uvwxyz"], range(10, 16))
    store.lost(range(10, 16))
    assert len(store.add(HostCopy(20), [(None, place) for place in range(20, 25)])) == 5 and asked == [5]
    assert len(store.add(HostCopy(30), [(None, place) for place in range(30, 33)])) == 3 and asked == [5, 1]
    assert store.given_up == [short] and store.used == 8


class Careful(Lru):
    """Wants to hear of a hold once, and of its end, and what is held to be protected. Raises in the method ``raises``
    when it is called for the tenth time."""

    def __init__(self, capacity: int, raises: str) -> None:
        super().__init__(capacity)
        self._raises, self._calls = raises, 0

    def _called(self, method: str) -> None:
        self._calls += method == self._raises
        if self._calls == 10:
            raise ValueError("made up")

    def asked(self, chain: Chain, hits: int) -> None:
        self._called("asked")
        super().asked(chain, hits)

    def stored(self, chain: Chain, missing: Sequence[int]) -> None:
        self._called("stored")
        super().stored(chain, missing)

    def evict(self, count: int, protected: Container[Key]) -> list[Key]:
        self._called("evict")
        assert all(key in protected for key in self._held)
        return super().evict(count, protected)

    def lost(self, key: Key) -> None:
        self._called("lost")
        super().lost(key)

    def hold_began(self, key: Key) -> None:
        self._called("hold_began")
        assert key not in self._held
        super().hold_began(key)

    def hold_ended(self, key: Key) -> None:
        self._called("hold_ended")
        assert key in self._held
        super().hold_ended(key)


@pytest.mark.parametrize("raises", ["", "asked", "stored", "evict", "lost", "hold_began", "hold_ended"])
@pytest.mark.parametrize("hints", [False, True])
def test_a_policy_of_ones_own_hears_of_each_hold_once_and_so_does_the_one_in_its_place(
    hints: bool, raises: str
) -> None:
    failed: list[str] = []

    def make(slots: int) -> CachingPolicy:
        own = Guarded(Careful(slots, raises), failed.append)
        return Hinted(own, lambda: 0.0, 1, HintLimits(100.0, 0.6, 0.4)) if hints else own

    for seed in range(4):
        device = Device(seed, make)
        failed.clear()
        for _ in range(400):
            act(device)
            device.check()
            check_told(device.store.cache, device.store)
            assert raises or not failed
        assert len(failed) == bool(raises), "once, and for nothing else"


class Looks:
    """How often it was asked whether something may be evicted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, asked = 0, Protected.__contains__

        def counted(protected: Protected, key: object) -> bool:
            self.count += 1
            return asked(protected, key)

        monkeypatch.setattr(Protected, "__contains__", counted)


def served(store: HostStore, blocks: Chain, places: range, hints: Hints | None = None) -> None:
    """A request with this prompt has come, and gives its blocks back."""
    store.asked(blocks)
    if hints is not None:
        store.hinted(blocks, hints, ANYBODY, over=True)
    store.watch(blocks, dict(enumerate(places)))


def full(kind: str, needed: int, hints: Hints | None) -> HostStore:
    """A pool of so many prompts of a block each, which copies need and which go first, and as many blocks of another
    prompt."""
    store = HostStore(2 * needed, made(kind)(2 * needed))
    for place in range(needed):
        served(store, [f"old {place}"], range(place, place + 1), hints)
        store.add(HostCopy(1000), [(f"old {place}", place)])
    store.lost(range(needed))
    other = range(needed, 2 * needed)
    served(store, [f"other {place}" for place in other], other)
    store.lost(other)
    assert (store.used, store.cached) == (needed, needed)
    return store


def one_more(store: HostStore, place: int) -> None:
    """A prompt is cached, a copy has a block of its own, and another one comes back while two of its blocks are still
    on the device."""
    served(store, [f"new {place}"], range(place, place + 1))
    store.lost([place])
    own, back = HostCopy(10), HostCopy(10)
    store.add(own, [(None, place)])
    store.release(own)
    blocks, places = [f"back {place}", f"back {place} too"], range(place, place + 2)
    served(store, blocks, places)
    store.add(back, [*zip(blocks, places, strict=True)])
    assert len(store.begin_load(back, range(2))) == 2
    store.release(back)


@pytest.mark.parametrize("hints", [None, Hints(once=True)])
@pytest.mark.parametrize("kind", [*KINDS, *WITH_HINTS])
def test_what_copies_need_is_not_passed_over_at_every_eviction(
    kind: str, hints: Hints | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether their prompts are the oldest, or what requests said goes first."""
    looks, counts = Looks(monkeypatch), []
    for needed in (64, 512):
        store = full(kind, needed, hints)
        one_more(store, 10_000)
        looks.count, evicted = 0, store.counts.evicted
        for place in range(20_000, 20_100, 10):
            one_more(store, place)
        assert store.counts.evicted - evicted >= 20
        counts.append(looks.count)
    each = 2 * SAMPLE if kind.startswith("cost") else 3
    assert max(counts) <= 40 * each, "of at most 30 evictions"
