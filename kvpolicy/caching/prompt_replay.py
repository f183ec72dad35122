"""Replays prompts through one tier: what a caching policy saves of computing them, and what hindsight would."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heappop, heappush
from math import inf

from kvpolicy.caching.base import CachingPolicy, Chain, Key
from kvpolicy.workload import Request

Price = Callable[[int], float]
"""Seconds saved by a block that need not be computed, by its position in the prompt, from 0 on."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Sums over all prompts."""

    prompts: int
    blocks: int
    hit_blocks: int
    saved_s: float
    whole_s: float
    """What all blocks would take to compute."""

    @property
    def saved_share(self) -> float:
        """NaN without a prompt that fills a block."""
        return self.saved_s / self.whole_s if self.whole_s else float("nan")


def chains_of(requests: Iterable[Request], join: int = 1) -> Iterator[Chain]:
    """The full blocks of every prompt that has prefix ids, ``join`` of its blocks as one, in the order of arrival.

    A key stands for the tokens of its block and of all before it. Prompts without a full block are left out.
    """
    for request in requests:
        size = join * request.prefix_block_tokens
        full = min(request.prompt_tokens, len(request.prefix) * request.prefix_block_tokens) // size if size else 0
        chain, key = [], b""
        for block in range(full):
            ids = request.prefix[block * join : (block + 1) * join]
            key = blake2b(key + repr(ids).encode(), digest_size=16).digest()
            chain.append(key)
        if chain:
            yield chain


def replay(chains: Iterable[Chain], policy: CachingPolicy, price: Price) -> Replayed:
    """Ask for every prompt and store what it lacks, its beginning first where there is no room for all of it."""
    count = _Count(price)
    for chain in chains:
        hits = policy.hits(chain)
        count.add(chain, hits)
        policy.asked(chain, hits)
        missing = [position for position, key in enumerate(chain) if key not in policy][: policy.capacity]
        excess = len(policy) + len(missing) - policy.capacity
        if excess > 0:
            policy.make_room(excess, frozenset(chain), [chain[position] for position in missing])
        policy.stored(chain, missing[: policy.capacity - len(policy)])
    return count.replayed()


class _Count:
    def __init__(self, price: Price) -> None:
        self._price, self._sums = price, [0.0]
        self._prompts = self._blocks = self._hits = 0
        self._saved_s = self._whole_s = 0.0

    def add(self, chain: Chain, hits: int) -> None:
        while len(self._sums) <= len(chain):
            self._sums.append(self._sums[-1] + self._price(len(self._sums) - 1))
        self._prompts += 1
        self._blocks += len(chain)
        self._hits += hits
        self._saved_s += self._sums[hits]
        self._whole_s += self._sums[len(chain)]

    def replayed(self) -> Replayed:
        return Replayed(self._prompts, self._blocks, self._hits, self._saved_s, self._whole_s)


def hindsight(chains: Sequence[Chain], capacity: int, price: Price, by_price: bool = False) -> Replayed:
    """What a cache saves that knows all prompts to come, as Belady's does: of the blocks that no other one there
    continues it gives up the one that is asked for last, and stores none that is asked for after those, or never.

    ``by_price``: by the prompts until then over the price. Neither is the best there is: blocks are asked for together.
    """
    later = _later(chains)
    cache, count = _Foreseen(price if by_price else None), _Count(price)
    for number, chain in enumerate(chains):
        hits = next((position for position, key in enumerate(chain) if key not in cache.next_of), len(chain))
        count.add(chain, hits)
        cache.asked(chain[:hits], later[number], number)
        protected = frozenset(chain)
        for position in range(hits, len(chain)):
            if later[number][position] == inf:
                break
            newcomer = cache.rank(position, later[number][position], number)
            if len(cache.next_of) >= capacity and not cache.evict(protected, number, newcomer):
                break
            cache.store(chain, position, later[number][position], number)
    return count.replayed()


def _later(chains: Sequence[Chain]) -> list[list[float]]:
    """The number of the next prompt that asks for each block of each prompt; infinite without one."""
    next_of: dict[Key, float] = {}
    found = []
    for number in range(len(chains) - 1, -1, -1):
        found.append([next_of.get(key, inf) for key in chains[number]])
        for key in chains[number]:
            next_of[key] = number
    found.reverse()
    return found


class _Foreseen:
    """The blocks of a cache that knows when each is asked for next."""

    def __init__(self, price: Price | None) -> None:
        self._price = price
        self.next_of: dict[Key, float] = {}
        self._place: dict[Key, tuple[int, Key | None]] = {}
        self._children: dict[Key, int] = {}
        self._heap: list[tuple[float, int, int, Key, float]] = []
        self._pushed = 0

    def asked(self, chain: Chain, later: Sequence[float], number: int) -> None:
        for position, key in enumerate(chain):
            self.next_of[key] = later[position]
            self._offer(key, number)

    def store(self, chain: Chain, position: int, later: float, number: int) -> None:
        key, parent = chain[position], chain[position - 1] if position else None
        self.next_of[key] = later
        self._place[key] = position, parent
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        self._offer(key, number)

    def _offer(self, key: Key, number: int) -> None:
        if self._children.get(key):
            return
        position, later = self._place[key][0], self.next_of[key]
        self._pushed += 1
        heappush(self._heap, (self.rank(position, later, number), -position, self._pushed, key, later))

    def rank(self, position: int, later: float, number: int) -> float:
        """The block with the lowest goes first. By price it holds for this number of a prompt, and rises."""
        if self._price is None:
            return -later
        price = self._price(position)
        return -(later - number) / price if price else -inf

    def evict(self, protected: Collection[Key], number: int, newcomer: float) -> bool:
        """Give up a block; False where the newcomer, of that rank, would go before all others."""
        passed_over = []
        found = False
        while self._heap and not found:
            entry = heappop(self._heap)
            key, later = entry[3], entry[4]
            if self._children.get(key) or self.next_of.get(key) != later:
                continue
            if self._price is not None:  # the time left has become shorter since: ranks only rise
                rank = self.rank(-entry[1], later, number)
                if rank > entry[0]:
                    heappush(self._heap, (rank, *entry[1:]))
                    continue
            if key in protected or entry[0] > newcomer:
                passed_over.append(entry)
                if entry[0] > newcomer:
                    break
                continue
            found = True
            del self.next_of[key]
            _, parent = self._place.pop(key)
            if parent is not None:
                self._children[parent] -= 1
                self._offer(parent, number)
        for entry in passed_over:
            heappush(self._heap, entry)
        return found
