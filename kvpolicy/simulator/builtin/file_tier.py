"""Files below the cache in host memory, in virtual time: what leaves host memory is written, what is asked for is read.

Host memory lets what they take pass through (:attr:`kvpolicy.host_store.CacheAdmission.worth_handing_on`). Writes wait
in a queue of bounded length, beyond which they are left out. A request that finds something in files waits for its read
before it is admitted; what was read is loaded from a buffer then, and stays in the files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Hashable, Sequence

from kvpolicy.caching import CachingPolicy, Hinted
from kvpolicy.caching.base import Chain, Key
from kvpolicy.caching.tree import reach_of
from kvpolicy.request_marks import Client, Hints
from kvpolicy.simulator.base import LowerTiers


class FileTier:
    """The contents of the files, and the reads and writes of their device, one at a time in each direction.

    ``policy``: chooses what is in the files, for ``cache.file_blocks`` blocks.
    """

    def __init__(self, cache: LowerTiers, block_bytes: int, policy: CachingPolicy) -> None:
        self.now_s = 0.0
        """Set by the owner, before it calls anything else."""
        self.left_out = 0
        """Blocks that were not written because the queue was full."""
        self._cache, self._policy = cache, policy
        self._block_s = block_bytes / cache.file_bytes_per_s
        self._writes: deque[tuple[float, Key]] = deque()
        """When each write ends, and its block; those that have ended are removed when the next one comes."""
        self._writing: set[Key] = set()
        self._written_s = self._read_s = 0.0
        self.worth_writing: Callable[[int, float], bool] = lambda blocks, read_s: True
        """Whether blocks of a chain of so many blocks are written, all of which are read again in so many seconds."""
        self.worth_saving = self.worth_writing
        """Whether they are, where they have to be saved to host memory before."""

    def takes(self, key: Key, blocks: int) -> bool:
        """Whether a block of a chain of so many blocks is worth saving to host memory to be written here, and there is
        a place for it in the queue."""
        self._end_writes()
        if key in self._policy or len(self._writes) >= self._cache.file_queue_blocks:
            return False
        return self.worth_saving(blocks, self._alone_s(blocks))

    def asked(self, chain: Chain) -> None:
        """A new request has this prompt."""
        self._policy.asked(chain, self.lookup(chain))

    def hinted(self, chain: Chain, hints: Hints, client: Client, request: Hashable = None, over: bool = False) -> None:
        """See :meth:`kvpolicy.caching.Hinted.hinted`; without effect where the policy heeds none."""
        if isinstance(self._policy, Hinted):
            self._policy.hinted(chain, hints, client, request, over, None if over else self._policy)

    def lookup(self, keys: Sequence[Key]) -> int:
        """How many of these blocks are in files, up to the first one that is not."""
        self._end_writes()
        count = 0
        for key in keys:
            if key not in self._policy or key in self._writing:
                break
            count += 1
        return count

    def has(self, key: Key) -> bool:
        """Whether a block can be read."""
        return self.lookup((key,)) == 1

    def write(self, chain: Chain, position: int) -> None:
        """A block of the chain leaves host memory: write it, unless it is there, or it would be computed rather than
        read, or the queue is full."""
        key = chain[position]
        self._end_writes()
        if key in self._policy:
            return
        reach = reach_of(chain)
        if not self.worth_writing(reach, self._alone_s(reach)):
            return
        if len(self._writes) >= self._cache.file_queue_blocks:
            self.left_out += 1
            self._refuse(key)
            return
        if len(self._policy) >= self._policy.capacity and not self._policy.evict(1, self._writing):
            self._refuse(key)
            return
        self._policy.stored(chain, (position,))
        self._written_s = max(self.now_s, self._written_s) + self._cache.file_latency_s + self._block_s
        self._writes.append((self._written_s, key))
        self._writing.add(key)

    def _refuse(self, key: Key) -> None:
        """The block does not come: hints hold it no longer."""
        if isinstance(self._policy, Hinted):
            self._policy.lost(key)

    def read_s(self, blocks: int) -> float:
        """Seconds until so many blocks were read, beginning now, with those before them in the queue."""
        return max(0.0, self._read_s - self.now_s) + self._alone_s(blocks)

    def _alone_s(self, blocks: int) -> float:
        """Seconds of a read of so many blocks if nothing else were under way."""
        return self._cache.file_latency_s + blocks * self._block_s

    def read(self, blocks: int) -> float:
        """Queue a read of so many blocks; return when it ends."""
        self._read_s = self.now_s + self.read_s(blocks)
        return self._read_s

    def _end_writes(self) -> None:
        while self._writes and self._writes[0][0] <= self.now_s:
            self._writing.discard(self._writes.popleft()[1])


class Demoting(CachingPolicy):
    """Another policy, of the tier above: what it evicts is written to files."""

    def __init__(self, above: CachingPolicy, files: FileTier) -> None:
        super().__init__(above.capacity)
        self.name = above.name
        self._above, self._files = above, files
        self._place: dict[Key, tuple[Chain, int]] = {}
        """Chain and index of each block there."""

    def __contains__(self, key: Key) -> bool:
        return key in self._above

    def __len__(self) -> int:
        return len(self._above)

    def asked(self, chain: Chain, hits: int) -> None:
        self._above.asked(chain, hits)
        self._files.asked(chain)

    def extended(self, chain: Chain, asked: int) -> None:
        self._above.extended(chain, asked)  # files learn of a block's prompt from the block before it, as a server's

    def stored(self, chain: Chain, missing: Sequence[int]) -> None:
        self._above.stored(chain, missing)
        for position in missing:
            self._place[chain[position]] = chain, position

    def evict(self, count: int, protected: Container[Key]) -> list[Key]:
        return self._demoted(self._above.evict(count, protected))

    def make_room(self, count: int, protected: Container[Key], newcomers: Sequence[Key]) -> list[Key]:
        return self._demoted(self._above.make_room(count, protected, newcomers))

    def _demoted(self, evicted: list[Key]) -> list[Key]:
        places = sorted((self._place.pop(key) for key in evicted), key=lambda place: place[1])
        for chain, position in places:  # a block is of use only with those before it
            self._files.write(chain, position)
        return evicted

    def hold_began(self, key: Key) -> None:
        self._above.hold_began(key)

    def hold_ended(self, key: Key) -> None:
        self._above.hold_ended(key)

    def lost(self, key: Key) -> None:
        self._above.lost(key)
        self._place.pop(key, None)
