"""What every tier of KV memory does, and what it says of itself.

A tier holds KV blocks by content. A key names a content: the engine's hash of the block's tokens and of all tokens
before them, with what else decides the content, such as an adapter or a cache salt. A block is of use only where all
blocks before it are there.

Two tiers keep the protocol: files (:class:`kvpolicy.tiers.FileTier`), in each worker's process, which store what host
memory has, and host memory (``kvpolicy_vllm.plugin.host_tier``), in the scheduler's, which stores what the device has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvpolicy.caching.holds import EVENTS
from kvpolicy.request_marks import Client, Hints

Key = bytes
Chain = Sequence[Key]
"""The blocks of a prompt, its first one first, none of them twice."""
Pieces = Sequence[NDArray[np.uint8]]
"""Host memory of one block: contiguous arrays of one dimension, one after the other."""
Job = TypeVar("Job", bound=Hashable)
"""What a caller knows a store or a load by."""
Memory = TypeVar("Memory", contravariant=True)
"""Where a block of the tier above is: :data:`Pieces` of host memory, or a block of the device by its number."""
Kind = Literal["store", "load"]
MAX_QUEUED_BLOCKS = 1024
"""Blocks whose store is under way or waits, at most, where nothing else is said: a step of 8,192 tokens may give away
512 blocks of 16 tokens. As many in simulations."""
MAX_HANG_S = 5.0
"""A medium that hangs is waited for so long, at most, where what is under way has to be waited for: at the end, and
before memory is replaced."""
HINT_COUNTS = tuple(f"hinted_{event}" for event in EVENTS)
"""Names in :attr:`Usage.counts` of what became of hints about blocks, which changes with :meth:`LastingTier.hinted`
alone, in the order of :data:`kvpolicy.caching.holds.EVENTS`."""


class Took(NamedTuple):
    """Seconds of one load by the clock of its tier: neither until the tier was told of it, nor until it was asked."""

    seconds: float
    """From its beginning to the end of its last block."""
    alone_s: float
    """The same, less the time in which it was behind an earlier load."""


@dataclass(frozen=True, slots=True)
class Finished(Generic[Job]):
    """A store or a load that has ended. Its memory is the caller's again."""

    job: Job
    """As the caller gave it."""
    kind: Kind
    done: tuple[Key, ...]
    """Blocks that were stored, or loaded whole and unchanged."""
    failed: Mapping[Key, str]
    """The others, each with the reason. A block that was to be loaded and is here counts as not there: what its memory
    holds is undefined."""
    took: Took | None = None
    """Of a load; None where the tier does not say it."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tier holds now, and what has happened to it since it was opened."""

    blocks: int
    """Blocks that can be loaded."""
    used_bytes: int
    """Bytes of these and of all that is being stored or removed, as they take place on the medium."""
    capacity_bytes: int
    queued_blocks: int
    """Blocks whose store has not ended."""
    counts: Mapping[str, int]
    """Blocks by what happened to them, for instance "stored", "loaded", "refused_queue_full", "missed_corrupt"."""


class Tier(Protocol[Job, Memory]):
    """Stores and loads in the background: no method waits for the medium.

    Faults of the medium are no exceptions: a block that cannot be stored is not there, and one that cannot be loaded
    whole and unchanged is reported as such by :meth:`finished`. All methods are called from one thread.
    """

    def lookup(self, chain: Chain) -> int:
        """Number of leading blocks that can be loaded. Changes nothing."""

    def asked(self, chain: Chain) -> None:
        """A request has this prompt."""

    def hinted(self, chain: Chain, hints: Hints, client: Client, request: Hashable = None, over: bool = False) -> None:
        """A request with this window came with hints, granted to this client, as
        :meth:`kvpolicy.caching.Hinted.hinted` has it: after :meth:`asked` for a new one, and once more when it is
        ``over``."""

    def store(self, job: Job, chain: Chain, blocks: Mapping[int, Memory]) -> list[int]:
        """Store those blocks of a prompt that ``blocks`` has, by their indices in the chain.

        Return the indices that are being stored: the others are there already, or there is no room for them in the tier
        or in its queue. Their memory must stay unchanged until :meth:`finished` reports the job, which no other store
        or load has; where nothing is being stored, it never does. A tier that sees what becomes of the memory may
        watch these blocks instead, store what is about to be lost, as far as it has room then, and report no end.
        """

    def load(self, job: Job, blocks: Sequence[tuple[Key, Memory]]) -> None:
        """Begin to load these blocks into memory, which is the tier's until :meth:`finished` reports the job."""

    def finished(self) -> list[Finished[Job]]:
        """Stores and loads that ended since the last call, each once."""

    def drop(self, keys: Iterable[Key]) -> None:
        """Give up these blocks."""

    def usage(self) -> Usage: ...


class LastingTier(Tier[int, Pieces], Protocol):
    """A tier that still has its blocks when the next process opens it, and says which. A server's rank keeps its part
    of every block in one (``kvpolicy_vllm.plugin.rank_files``). The chain of a store may be a
    :class:`kvpolicy.caching.Part` of the prompt."""

    def wait_idle(self, limit_s: float | None = None) -> bool:
        """Wait until all stores and loads have ended, so that :meth:`finished` reports them, for so many seconds at
        most. Whether they have."""

    def close(self, limit_s: float = MAX_HANG_S) -> None:
        """Use the medium no more. What has not ended is not reported; its memory is the caller's again. Only where the
        medium hangs for so many seconds, what is under way goes on: the tier refers to its memory until it has ended.
        """

    def digests(self) -> list[bytes]:
        """Digests of the keys of all blocks that can be loaded; see :func:`kvpolicy.tiers.digest_of_key`."""

    def drop_digests(self, digests: Collection[bytes]) -> None:
        """Give up the blocks whose keys have these digests: another rank has its part no more, so that nobody can load
        them. Where a tier does not have this method, they stay until it gives them up by itself."""

    def take_gone(self) -> list[bytes]:
        """Digests of the keys of blocks that could be loaded and cannot any more, since the last call."""

    def reprice(self, price: Callable[[int], float]) -> None:
        """What a block saves, by its position in the prompt, from now on."""

    def forget_hints(self) -> None:
        """Nobody will ask for the blocks again that are here or that hints have named: hold none back any more, and
        give these up before others. Keys that come from now on mean nothing to another process."""
