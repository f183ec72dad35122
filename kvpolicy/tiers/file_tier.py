"""A tier of files: KV blocks in a directory, found again by the next server with the same model.

One file holds one block. So the bytes of a block that is given up are free at once, a block is written or replaced by
one rename, and what is there is known from the names alone. Files of several blocks would need to be rewritten, or
would hold the bytes of blocks that are gone. At the block sizes of large models, some 2 MB, a terabyte is half a
million files, in 16 folders.
"""

from __future__ import annotations

import logging
import stat
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from kvpolicy.caching import ByCost, CachingPolicy, Hinted
from kvpolicy.caching import spec as caching
from kvpolicy.caching.fallback import guarded
from kvpolicy.errors import InputError
from kvpolicy.request_marks import Client, HintLimits, Hints
from kvpolicy.tiers.base import MAX_QUEUED_BLOCKS, Chain, Finished, Key, Kind, Pieces, Usage
from kvpolicy.tiers.block_files import BlockFiles, Scratch
from kvpolicy.tiers.block_format import NO_PARENT, BlockLayout, BlockName, Damaged, digest_of_key, require_checksums
from kvpolicy.tiers.identity import namespace_digest
from kvpolicy.tiers.idle_folders import IdleFolders, idle_folders
from kvpolicy.tiers.io_threads import IoThreads
from kvpolicy.tiers.owned_folder import OwnedFolder

logger = logging.getLogger(__name__)

DEFAULT_THREADS = 4
MIN_THREADS = 2
"""One for loads alone, and one for stores."""
MAX_WARNINGS = 5
NS = 1_000_000_000
"""Nanoseconds in a second. Uses less than that apart count as one when blocks are found again."""
Result = tuple[int, Kind, Key, BlockName | None, str]
"""Of one block: number of its job, kind, key, name, and why it failed, empty where it did not. Without a name it was
not there when it was to be loaded."""


class FileTier:
    """KV blocks of ``block_bytes`` bytes each in files below a directory; see :class:`kvpolicy.tiers.LastingTier`.

    Made by :meth:`open`. Blocks of a namespace are shared by the processes that use the directory one after the other.
    Of two at the same time each has files of its own, at most ``capacity_bytes`` of them.
    """

    def __init__(self, files: BlockFiles, folder: OwnedFolder, layout: BlockLayout, policy: CachingPolicy) -> None:
        self._files, self._folder, self._layout, self._policy = files, folder, layout, policy
        self._there: dict[bytes, BlockName] = {}
        """By digest of the key, blocks that can be loaded."""
        self._writing: dict[bytes, BlockName] = {}
        self._loading: Counter[bytes] = Counter()
        self._removing: dict[bytes, BlockName] = {}
        """Blocks that were given up and whose files are not gone for certain."""
        self._replaced: set[bytes] = set()
        """Those of them that a block takes the place of which waits to be written: its file is made when theirs is
        gone, so the two take room once."""
        self._dropped: set[bytes] = set()
        """Blocks that were dropped while they were being written."""
        self._stuck = 0
        """Files that could not be removed. They take room until the tier is opened anew."""
        self._idle = IdleFolders((), 0.0)
        self._clock: Callable[[], float] = time.monotonic
        self._open_jobs: dict[int, int] = {}
        """By number, blocks of a job that have not ended."""
        self._ended: dict[int, tuple[list[Key], dict[Key, str]]] = defaultdict(lambda: ([], {}))
        self._results: deque[Result] = deque()
        self._removed: deque[tuple[bytes, bool]] = deque()
        self._finished: list[Finished] = []
        self._gone: list[bytes] = []
        self._counts: Counter[str] = Counter()
        self._warnings = MAX_WARNINGS
        self._queue_blocks = MAX_QUEUED_BLOCKS
        self._threads: IoThreads[Scratch]

    @classmethod
    def open(
        cls,
        directory: Path,
        namespace: Mapping[str, Any],
        block_bytes: int,
        capacity_bytes: int,
        policy: str = "lru",
        queue_blocks: int = MAX_QUEUED_BLOCKS,
        threads: int = DEFAULT_THREADS,
        hints: HintLimits | None = None,
        block_tokens: int = 1,
        allow_python: bool = False,
        failed: Callable[[str], None] = lambda method: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> FileTier:
        """Open a tier, with the blocks that an earlier process left there.

        ``namespace``: what decides the bytes of a block beside its key, as JSON. ``policy``: which blocks to give
        up, by a name of :data:`kvpolicy.caching.spec.FORMS` other than ``off``; a module path, which runs code, only
        with ``allow_python``. Where the code of one's own policy fails, ``lru`` takes its place, that is logged, and
        ``failed`` is called with the name of the method. ``queue_blocks``: blocks that wait to be stored, at most.
        ``hints``: how many blocks what requests say may hold, and how long; None: nothing that they say is
        heeded. ``block_tokens``: tokens of a block, in which prefixes are pinned. ``clock``: seconds.

        Raises InputError for a directory or an argument that will not do, and OSError where nothing can be written to
        the directory.
        """
        layout = BlockLayout(bytes.fromhex(namespace_digest(namespace)), block_bytes)
        _check(layout, capacity_bytes, queue_blocks, threads)
        giving_up = caching.load_for_files(policy, capacity_bytes // layout.file_bytes, allow_python)
        folder = OwnedFolder.claim(directory, namespace, block_bytes)
        try:
            files = BlockFiles(folder, layout)
            files.probe()
            giving_up = guarded(giving_up, partial(_complain, giving_up.name, folder.path, failed))
            heeding = giving_up if hints is None else Hinted(giving_up, clock, block_tokens, hints)
            tier = cls(files, folder, layout, heeding)
            tier._queue_blocks, tier._clock = queue_blocks, clock
            tier._find_blocks()
            tier._idle = IdleFolders(idle_folders(directory, folder.path), clock())
        except BaseException:
            folder.close()
            raise
        tier._threads = IoThreads(threads, partial(Scratch, layout))
        tier._threads.start()
        tier._settle()
        return tier

    @property
    def directory(self) -> Path:
        """The folder of this process's files."""
        return self._folder.path

    @property
    def direct(self) -> bool:
        """Whether reads and writes pass by the page cache."""
        return bool(self._files.direct)

    @property
    def capacity_blocks(self) -> int:
        return self._policy.capacity

    # ---- the protocol ----

    def digests(self) -> list[bytes]:
        return list(self._there)

    def take_gone(self) -> list[bytes]:
        gone, self._gone = self._gone, []
        return gone

    def reprice(self, price: Callable[[int], float]) -> None:
        """See :meth:`kvpolicy.tiers.LastingTier.reprice`; all blocks save the same before the first call. Only the
        policy ``cost`` goes by it."""
        policy = self._policy.inner if isinstance(self._policy, Hinted) else self._policy
        if isinstance(policy, ByCost):
            policy.reprice(price)

    def hinted(self, chain: Chain, hints: Hints, client: Client) -> None:
        """See :meth:`kvpolicy.tiers.LastingTier.hinted`; without effect where the tier was opened without limits."""
        self._settle()
        if isinstance(self._policy, Hinted):
            self._policy.hinted([digest_of_key(key) for key in chain], hints, client)

    def forget_hints(self) -> None:
        if isinstance(self._policy, Hinted):
            self._policy.forget_hints()

    def lookup(self, chain: Chain) -> int:
        hits = 0
        for key in chain:
            if digest_of_key(key) not in self._there:
                break
            hits += 1
        return hits

    def asked(self, chain: Chain) -> None:
        self._settle()
        digests = [digest_of_key(key) for key in chain]
        self._policy.asked(digests, self._policy.hits(digests))

    def store(self, number: int, chain: Chain, blocks: Mapping[int, Pieces]) -> list[int]:
        self._settle()
        digests = [digest_of_key(key) for key in chain]
        wanted = [index for index in sorted(blocks) if self._is_new(digests[index])]
        wanted = self._first(wanted, self._queue_blocks - len(self._writing), "refused_queue_full")
        evicted = self._evict(len(wanted), digests)
        wanted = self._first(wanted, self._room() + len(evicted), "refused_no_room")
        self._policy.stored(digests, wanted)
        if wanted:
            self._open_jobs[number] = len(wanted)
        for place, index in enumerate(wanted):
            name = BlockName(digests[index], digests[index - 1] if index else NO_PARENT)
            self._writing[name.key] = name
            before = evicted[place :: len(wanted)]
            self._threads.store(partial(self._write, number, chain[index], name, blocks[index], before))
        self._replaced.update(name.key for name in evicted[: len(wanted)])
        if not wanted:
            self._remove_later(evicted)
        return wanted

    def load(self, number: int, blocks: Sequence[tuple[Key, Pieces]]) -> None:
        self._open_jobs[number] = len(blocks)
        if not blocks:
            self._finished.append(Finished(number, "load", (), {}))
        for key, pieces in blocks:
            name = self._there.get(digest_of_key(key))
            if name is None:
                self._results.append((number, "load", key, None, "missing"))
                continue
            self._loading[name.key] += 1
            self._threads.load(partial(self._read, number, key, name, pieces))

    def drop(self, keys: Iterable[Key]) -> None:
        self._settle()
        for key in keys:
            digest = digest_of_key(key)
            if digest in self._writing:
                self._dropped.add(digest)
            elif digest in self._there:
                self._lose(digest)

    def finished(self) -> list[Finished]:
        self._settle()
        finished, self._finished = self._finished, []
        return finished

    def usage(self) -> Usage:
        self._settle()
        files = len(self._there) + len(self._writing) + self._leaving() + self._stuck
        return Usage(
            blocks=len(self._there),
            used_bytes=files * self._layout.file_bytes,
            capacity_bytes=self.capacity_blocks * self._layout.file_bytes,
            queued_blocks=len(self._writing),
            counts=dict(self._counts),
        )

    def wait_idle(self) -> None:
        self._threads.wait_idle()

    def close(self) -> None:
        """End what is being written, forget what waits, and leave the folder to the next process."""
        self._threads.close()
        for name in self._removing.values():
            with suppress(OSError):
                self._files.remove(name)
        self._folder.close()

    # ---- what is there ----

    def _find_blocks(self) -> None:
        """Take up the blocks of an earlier process, those used last before others, as far as there is room."""
        found: dict[bytes, tuple[BlockName, int]] = {}
        for name, status in self._files.blocks():
            whole = stat.S_ISREG(status.st_mode) and status.st_size == self._layout.file_bytes
            if whole and name.key not in found:
                found[name.key] = name, status.st_mtime_ns
            else:
                self._counts["found_damaged"] += 1
                self._files.remove(name)
        newest = sorted(found.values(), key=lambda entry: entry[1], reverse=True)
        for name, _ in newest[self.capacity_blocks :]:
            self._files.remove(name)
        self._there = {name.key: name for name, _ in newest[: self.capacity_blocks]}
        self._counts["found"] = len(self._there)
        asked_ns: dict[bytes, int] = {}
        for name, used_ns in reversed(newest[: self.capacity_blocks]):
            if used_ns >= asked_ns.get(name.key, 0) + NS:
                asked_ns.update(dict.fromkeys(self._take_up(name), used_ns))

    def _take_up(self, name: BlockName) -> list[bytes]:
        """Tell the policy of a use of a block and of those before it; return their digests."""
        chain = {name.key: name}
        while (parent := self._there.get(name.parent)) is not None and parent.key not in chain:
            chain[parent.key] = name = parent
        digests = [*reversed(chain)]
        self._policy.asked(digests, self._policy.hits(digests))
        self._policy.stored(digests, [index for index, digest in enumerate(digests) if digest not in self._policy])
        return digests

    def _is_new(self, digest: bytes) -> bool:
        return digest not in self._there and digest not in self._writing and digest not in self._removing

    def _first(self, wanted: list[int], room: int, reason: str) -> list[int]:
        """As many of the leading ones as there is room for; the others are counted by the reason."""
        taken = wanted[: max(0, room)]
        self._counts[reason] += len(wanted) - len(taken)
        return taken

    def _free(self) -> int:
        """Blocks that there is room for without giving up any; negative where there are too many."""
        idle = -(-self._idle.used_bytes // self._layout.file_bytes)
        return self.capacity_blocks - len(self._policy) - self._stuck - self._leaving() - idle

    def _room(self) -> int:
        """Blocks that a store may bring without giving up any.

        Folders that others may have yet to claim take room, but what they exceed the bound by is not made up for by
        blocks of this tier: ranks that start together would give up what they had for one another's folders. A new
        block takes the place of one of its own until then, and the bytes in the directory do not grow.
        """
        free = self._free()
        if not self._idle.may_be_claimed(self._clock()):
            return free
        return max(free, min(0, self.capacity_blocks - len(self._policy) - self._stuck - self._leaving()))

    def _leaving(self) -> int:
        """Files that are being removed and take room of their own meanwhile."""
        return len(self._removing) - len(self._replaced)

    def _evict(self, wanted: int, digests: Sequence[bytes]) -> list[BlockName]:
        """Give up blocks so that ``wanted`` further ones have room, none of those of the prompt. Where there are
        folders of processes that are gone, and that nobody is about to claim, they are given up instead, and there is
        room later. Where all blocks would make no room, because what cannot be removed takes it, none is."""
        room = self._room()
        excess = wanted - room
        if excess <= 0:
            return []
        if self._idle.any:
            self._clear_idle()
            if not self._idle.may_be_claimed(self._clock()):
                return []
        if room + len(self._policy) <= 0:
            return []
        protected = {*digests, *self._writing, *self._loading}
        evicted = [
            self._there.pop(digest) for digest in self._policy.evict(excess, protected) if isinstance(digest, bytes)
        ]
        self._counts["evicted"] += len(evicted)
        self._gone += [name.key for name in evicted]
        self._removing.update((name.key, name) for name in evicted)
        return evicted

    def _clear_idle(self) -> None:
        """Let the folders of processes that are gone make room, in the background."""
        task = self._idle.next_task(self._clock())
        if task is not None:
            self._threads.store(lambda scratch: task(partial(self._reason, "an unused folder was not cleared")))

    def _lose(self, digest: bytes) -> None:
        """A block is of no use any more; its file is removed."""
        self._policy.lost(digest)
        self._gone.append(digest)
        self._remove_later([self._there.pop(digest)])

    def _remove_later(self, names: Sequence[BlockName]) -> None:
        self._removing.update((name.key, name) for name in names)
        for name in names:
            self._threads.store(partial(self._remove, name))

    def _settle(self) -> None:
        """Take over what the threads have done."""
        self._counts["cleared_folders"] += self._idle.settle()
        if self._idle.any and self._free() < 0:
            self._clear_idle()
        while self._results:
            number, kind, key, name, reason = self._results.popleft()
            if name is None:
                self._counts[f"missed_{reason}"] += 1
            else:
                (self._stored if kind == "store" else self._loaded)(name, reason)
            done, failed = self._ended[number]
            if reason:
                failed[key] = reason
            else:
                done.append(key)
            self._open_jobs[number] -= 1
            if not self._open_jobs[number]:
                del self._open_jobs[number], self._ended[number]
                self._finished.append(Finished(number, kind, tuple(done), failed))
        while self._removed:  # after the results, so that a file which was not removed counts once its write has failed
            digest, gone = self._removed.popleft()
            self._removing.pop(digest, None)
            self._replaced.discard(digest)
            self._stuck += not gone

    def _stored(self, name: BlockName, reason: str) -> None:
        del self._writing[name.key]
        self._counts[f"failed_{reason}" if reason else "stored"] += 1
        if reason:
            self._policy.lost(name.key)
            self._dropped.discard(name.key)
            return
        self._there[name.key] = name
        if name.key in self._dropped:
            self._dropped.discard(name.key)
            self._lose(name.key)

    def _loaded(self, name: BlockName, reason: str) -> None:
        if self._loading[name.key] > 1:
            self._loading[name.key] -= 1
        else:
            del self._loading[name.key]
        self._counts[f"missed_{reason}" if reason else "loaded"] += 1
        if reason and self._there.get(name.key) == name:
            self._lose(name.key)

    # ---- in the threads ----

    def _write(
        self, number: int, key: Key, name: BlockName, pieces: Pieces, evicted: Sequence[BlockName], scratch: Scratch
    ) -> None:
        removed = [self._remove(block, scratch) for block in evicted]
        reason = "not_removed"
        if all(removed):
            reason = self._reason("a block was not stored", lambda: self._files.write(name, pieces, scratch))
        self._results.append((number, "store", key, name, reason))

    def _read(self, number: int, key: Key, name: BlockName, pieces: Pieces, scratch: Scratch) -> None:
        reason = self._reason("a block was not loaded", lambda: self._files.read(name, pieces, scratch))
        if not reason:
            self._reason("", lambda: self._files.mark_used(name))
        self._results.append((number, "load", key, name, reason))

    def _remove(self, name: BlockName, scratch: Scratch) -> bool:
        reason = self._reason("a block was not removed", lambda: self._files.remove(name))
        self._removed.append((name.key, not reason))
        return not reason

    def _reason(self, what: str, action: Callable[[], None]) -> str:
        """Why the action failed; empty where it did not."""
        try:
            action()
        except FileNotFoundError:
            return "missing"
        except Damaged as error:
            return error.reason
        # The boundary between a medium and a server: whatever happens to files, the request is recomputed.
        except Exception as error:  # noqa: BLE001
            if what and self._warnings > 0:
                self._warnings -= 1
                more = "" if self._warnings else "; further ones are only counted"
                logger.warning("kvpolicy: %s in %s: %s%s", what, self._folder.path, error, more)
            return "io_error"
        return ""


def _complain(policy: str, folder: Path, failed: Callable[[str], None], method: str) -> None:
    """A method of the caching policy failed, with the exception that is being handled."""
    logger.exception("kvpolicy: %s() of caching policy %s failed; lru takes its place in %s", method, policy, folder)
    failed(method)


def _check(layout: BlockLayout, capacity_bytes: int, queue_blocks: int, threads: int) -> None:
    if layout.block_bytes < 1:
        raise InputError(f"block_bytes is {layout.block_bytes}, should be at least 1")
    if capacity_bytes < layout.file_bytes:
        raise InputError(
            f"capacity_bytes is {capacity_bytes}, which holds no file of {layout.file_bytes} bytes; give at least that"
        )
    if queue_blocks < 1:
        raise InputError(f"queue_blocks is {queue_blocks}, should be at least 1")
    if threads < MIN_THREADS:
        raise InputError(f"threads is {threads}, should be at least {MIN_THREADS}: one is for loads alone")
    require_checksums()
