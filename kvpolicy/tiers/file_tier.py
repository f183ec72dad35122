"""A tier of files: KV blocks in a directory, found again by the next server with the same model.

One file holds one block. So the bytes of a block that is given up are free at once, a block is written or replaced by
one rename, and what is there is known from the names alone. Files of several blocks would need to be rewritten, or
would hold the bytes of blocks that are gone. At the block sizes of large models, some 2 MB, a terabyte is half a
million files, in 16 folders.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvpolicy.caching import ByCost, CachingPolicy, Hinted, Part
from kvpolicy.caching import spec as caching
from kvpolicy.caching.fallback import guarded
from kvpolicy.errors import InputError
from kvpolicy.request_marks import Client, HintLimits, Hints
from kvpolicy.tiers.base import HINT_COUNTS, MAX_HANG_S, MAX_QUEUED_BLOCKS, Chain, Finished, Key, Kind, Pieces, Usage
from kvpolicy.tiers.block_files import BlockFiles, Scratch
from kvpolicy.tiers.block_format import NO_PARENT, BlockLayout, BlockName, digest_of_key, require_checksums
from kvpolicy.tiers.faults import Faults
from kvpolicy.tiers.found_blocks import FoundBlocks
from kvpolicy.tiers.identity import namespace_digest
from kvpolicy.tiers.idle_folders import IdleFolders, Task, idle_folders
from kvpolicy.tiers.io_threads import IoThreads
from kvpolicy.tiers.load_times import LoadTimes
from kvpolicy.tiers.occupancy import Occupancy
from kvpolicy.tiers.owned_folder import OwnedFolder

logger = logging.getLogger(__name__)

DEFAULT_THREADS = 4
MIN_THREADS = 2
"""One for loads alone, and one for stores."""


class Result(NamedTuple):
    """What became of one block that was to be stored or loaded."""

    job: int
    kind: Kind
    key: Key
    name: BlockName | None
    """None where it was not there when it was to be loaded."""
    reason: str
    """Why it failed; empty where it did not."""
    removed: Sequence[tuple[BlockName, bool]] = ()
    """Blocks that it takes the place of, and whether the file of each is gone."""
    ended_s: float = 0.0
    """When a block had been read, or was not there."""


class FileTier:
    """KV blocks of ``block_bytes`` bytes each in files below a directory; see :class:`kvpolicy.tiers.LastingTier`.

    Made by :meth:`open`. Blocks of a namespace are shared by the processes that use the directory one after the other.
    Of two at the same time each has files of its own, at most ``capacity_bytes`` of them.
    """

    def __init__(self, files: BlockFiles, folder: OwnedFolder, layout: BlockLayout, policy: CachingPolicy) -> None:
        self._files, self._folder, self._layout, self._policy = files, folder, layout, policy
        self._faults = Faults(folder.path)
        self._there: dict[bytes, BlockName] = {}
        """By digest of the key, blocks that can be loaded."""
        self._writing: dict[bytes, BlockName] = {}
        self._loading: Counter[bytes] = Counter()
        self._dropped: set[bytes] = set()
        """Blocks that were dropped while they were being written."""
        self._clock: Callable[[], float] = time.monotonic
        self._load_times = LoadTimes(lambda: self._clock())
        self._open_jobs: dict[int, int] = {}
        """By job, its blocks that have not ended."""
        self._ended: dict[int, tuple[list[Key], dict[Key, str]]] = defaultdict(lambda: ([], {}))
        self._results: deque[Result] = deque()
        self._removed: deque[tuple[BlockName, bool]] = deque()
        """Blocks that none takes the place of, and whether the file of each is gone."""
        self._finished: list[Finished[int]] = []
        self._gone: list[bytes] = []
        """A block that was given up is among these once its file is gone."""
        self._counts: Counter[str] = Counter()
        self._queue_blocks = MAX_QUEUED_BLOCKS
        self._occupancy: Occupancy
        self._threads: IoThreads[Scratch]
        self._closing: threading.Thread | None = None

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
        number: int | None = None,
        processes: int = 1,
    ) -> FileTier:
        """Open a tier, with the blocks that an earlier process left there.

        ``namespace``: what decides the bytes of a block beside its key, as JSON. ``policy``: which blocks to give
        up, by a name of :data:`kvpolicy.caching.spec.FORMS` other than ``off``; a module path, which runs code, only
        with ``allow_python``. Where the code of one's own policy fails, ``lru`` takes its place, that is logged, and
        ``failed`` is called with the name of the method. ``queue_blocks``: blocks that wait to be stored, at most.
        ``hints``: how many blocks what requests say may hold, and how long; None: nothing that they say is
        heeded. ``block_tokens``: tokens of a block, in which prefixes are pinned. ``clock``: seconds. ``number``: of
        the folder to take if no process has it; else, and without one, the first one that none has. ``processes``: how
        many have each a part of one bound, as ranks of a server: what is in folders that nobody uses counts for all of
        them alike.

        Raises InputError for a directory or an argument that will not do, and OSError where nothing can be written to
        the directory. On a disk without room it is opened all the same if its folder is there already, and folders that
        nobody uses make room later.
        """
        layout = BlockLayout(bytes.fromhex(namespace_digest(namespace)), block_bytes)
        _check(layout, capacity_bytes, queue_blocks, threads)
        giving_up = caching.load_for_files(policy, capacity_bytes // layout.file_bytes, allow_python)
        folder = OwnedFolder.claim(directory, namespace, block_bytes, number)
        if folder.number:
            logger.warning(
                "kvpolicy: other processes have files of this model in %s: this one has folder number %d, and one that "
                "starts alone later does not find what is in it", directory, folder.number
            )  # fmt: skip
        with ExitStack() as undo:
            undo.callback(folder.close)
            files = BlockFiles(folder, layout)
            has_room = files.probe()
            giving_up = guarded(giving_up, partial(_complain, giving_up.name, folder.path, failed))
            heeding = giving_up if hints is None else Hinted(giving_up, clock, block_tokens, hints)
            tier = cls(files, folder, layout, heeding)
            tier._queue_blocks, tier._clock = queue_blocks, clock
            tier._faults.disk_is_full = not has_room
            if not has_room:
                logger.warning("kvpolicy: no room on the disk of %s: what is there is loaded", folder.path)
            found = FoundBlocks(files, layout.file_bytes, tier._counts, tier._faults)
            found.take_up(heeding)
            look = partial(idle_folders, directory, folder.path)
            idle = IdleFolders(look(()), clock(), look)
            tier._there = found.there
            tier._occupancy = Occupancy(heeding, idle, layout.file_bytes, clock, processes, found.stuck)
            tier._occupancy.outdate(found.outdated)
            tier._threads = IoThreads(threads, partial(Scratch, layout))
            tier._threads.start()
            undo.callback(tier._threads.close)
            tier._settle()
            undo.pop_all()
        return tier

    @property
    def directory(self) -> Path:
        """The folder of this process's files."""
        return self._folder.path

    @property
    def number(self) -> int:
        """Of that folder: 0 for the first process of the namespace in the directory."""
        return self._folder.number

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

    def hinted(self, chain: Chain, hints: Hints, client: Client, request: Hashable = None, over: bool = False) -> None:
        """See :meth:`kvpolicy.tiers.Tier.hinted`; without effect where the tier was opened without limits."""
        self._settle()
        if isinstance(self._policy, Hinted):
            digests, there = [digest_of_key(key) for key in chain], None if over else self._policy
            self._policy.hinted(digests, hints, client, request, over, there)

    def forget_hints(self) -> None:
        self._files.lasting = False
        self._occupancy.outdate((*self._there, *self._writing))
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

    def store(self, job: int, chain: Chain, blocks: Mapping[int, Pieces]) -> list[int]:
        self._settle()
        digests = [digest_of_key(key) for key in chain]
        new = [index for index in sorted(blocks) if self._is_new(digests[index])]
        wanted = self._first(new, self._queue_blocks - len(self._writing), "refused_queue_full")
        evicted = self._evict(len(wanted), digests)
        wanted = self._first(wanted, self._occupancy.room + len(evicted), "refused_no_room")
        self._policy.stored(Part(digests, chain.first) if isinstance(chain, Part) else digests, wanted)
        if isinstance(self._policy, Hinted):  # which may hold back what does not come
            for index in new[len(wanted) :]:
                self._policy.lost(digests[index])
        if wanted:
            self._open_jobs[job] = len(wanted)
        for place, index in enumerate(wanted):
            name = BlockName(digests[index], digests[index - 1] if index else NO_PARENT)
            self._writing[name.key] = name
            before = evicted[place :: len(wanted)]
            self._threads.store(partial(self._write, job, chain[index], name, blocks[index], before))
        self._occupancy.replace(evicted[: len(wanted)])
        if not wanted:
            self._remove_later(evicted)
        return wanted

    def load(self, job: int, blocks: Sequence[tuple[Key, Pieces]]) -> None:
        if not blocks:
            self._finished.append(Finished(job, "load", (), {}))
            return
        self._open_jobs[job] = len(blocks)
        self._load_times.begins(job)
        for key, pieces in blocks:
            digest = digest_of_key(key)
            name = self._there.get(digest) or self._occupancy.evicted(digest)
            if name is None:
                self._results.append(Result(job, "load", key, None, "missing", ended_s=self._clock()))
                continue
            self._loading[name.key] += 1
            self._threads.load(partial(self._read, job, key, name, pieces))

    def drop(self, keys: Iterable[Key]) -> None:
        self.drop_digests([digest_of_key(key) for key in keys])

    def drop_digests(self, digests: Collection[bytes]) -> None:
        self._settle()
        for digest in digests:
            if digest in self._writing:
                self._dropped.add(digest)
            elif digest in self._there:
                self._lose(digest)
            elif self._occupancy.drop(digest):
                self._gone.append(digest)

    def finished(self) -> list[Finished[int]]:
        self._settle()
        finished, self._finished = self._finished, []
        return finished

    def usage(self) -> Usage:
        self._settle()
        files = len(self._there) + len(self._writing) + self._occupancy.other_files
        counts = dict(self._counts)
        if isinstance(self._policy, Hinted):
            counts.update(zip(HINT_COUNTS, astuple(self._policy.counts), strict=True))
        return Usage(
            blocks=len(self._there),
            used_bytes=files * self._layout.file_bytes,
            capacity_bytes=self.capacity_blocks * self._layout.file_bytes,
            queued_blocks=len(self._writing),
            counts=counts,
        )

    def wait_idle(self, limit_s: float | None = None) -> bool:
        return self._threads.wait_idle(limit_s)

    def close(self, limit_s: float = MAX_HANG_S) -> None:
        """End what is being written, forget what waits, and leave the folder to the next process. On a disk that hangs
        all of that goes on in the background after so many seconds, and the folder stays locked as long. A second call
        waits for what the first one left, and does nothing else."""
        if self._closing is None:
            closing = threading.Thread(target=self._end, name="kvpolicy-files-close", daemon=True)
            closing.start()
            self._closing = closing
        self._closing.join(limit_s)
        if self._closing.is_alive():
            logger.warning("kvpolicy: %s: the disk hangs; it is not waited for any longer", self._folder.path)

    def _end(self) -> None:
        self._occupancy.idle.end()
        self._threads.close()
        for name in self._occupancy.leaving:
            with suppress(OSError):
                self._files.remove(name)
        self._folder.close()

    # ---- what is there ----

    def _is_new(self, digest: bytes) -> bool:
        return not (digest in self._there or digest in self._writing or self._occupancy.is_leaving(digest))

    def _first(self, wanted: list[int], room: int, reason: str) -> list[int]:
        """As many of the leading ones as there is room for; the others are counted by the reason."""
        taken = wanted[: max(0, room)]
        self._counts[reason] += len(wanted) - len(taken)
        return taken

    def _evict(self, wanted: int, digests: Sequence[bytes]) -> list[BlockName]:
        """Give up blocks for ``wanted`` further ones, none of those of the prompt; see :meth:`Occupancy.evict`."""
        if wanted <= self._occupancy.room:
            return []
        self._tend_idle(short=True)
        protected = {*digests, *self._writing, *self._loading}
        evicted = [self._there.pop(digest) for digest in self._occupancy.evict(wanted, protected)]
        self._counts["evicted"] += len(evicted)
        self._occupancy.leave(evicted, evicted=True)
        return evicted

    def _tend_idle(self, short: bool) -> None:
        """In the background, let the folders of processes that are gone make room where it is short, and look now and
        then which have come to it since."""
        idle, now_s = self._occupancy.idle, self._clock()
        if short:
            self._begin(idle.next_task(now_s), "an unused folder was not cleared")
        self._begin(idle.next_look(now_s, self._faults.disk_is_full), "")

    def _begin(self, task: Task | None, what: str) -> None:
        """``what``: what is logged where it fails."""
        if task is not None:
            self._threads.aside(lambda scratch: task(partial(self._faults.reason, what)))

    def _lose(self, digest: bytes) -> None:
        """A block is of no use any more; its file is removed."""
        self._policy.lost(digest)
        self._gone.append(digest)
        self._remove_later([self._there.pop(digest)])

    def _remove_later(self, names: Sequence[BlockName]) -> None:
        self._occupancy.leave(names)
        for name in names:
            self._threads.store(partial(self._remove_alone, name))

    def _settle(self) -> None:
        """Take over what the threads have done."""
        self._counts["cleared_folders"] += self._occupancy.idle.settle(self._clock())
        while self._results:
            job, kind, key, name, reason, removed, ended_s = self._results.popleft()
            if name is None:
                self._counts[f"missed_{reason}"] += 1
            else:
                (self._stored if kind == "store" else self._loaded)(name, reason)
            for block, gone in removed:  # once the write has failed for which one is there again
                self._left(block, gone)
            self._ended_one(job, kind, key, reason, ended_s)
        while self._removed:
            self._left(*self._removed.popleft())
        self._tend_idle(short=self._occupancy.free < 0 or self._faults.disk_is_full)

    def _ended_one(self, job: int, kind: Kind, key: Key, reason: str, ended_s: float) -> None:
        """One block of a job has ended."""
        done, failed = self._ended[job]
        if reason:
            failed[key] = reason
        else:
            done.append(key)
        if kind == "load":
            self._load_times.block_ended(job, ended_s)
        self._open_jobs[job] -= 1
        if not self._open_jobs[job]:
            took = self._load_times.ended(job) if kind == "load" else None
            del self._open_jobs[job], self._ended[job]
            self._finished.append(Finished(job, kind, tuple(done), failed, took))

    def _left(self, name: BlockName, gone: bool) -> None:
        """The file of a block that was to be removed is gone, or cannot be removed."""
        was_evicted = self._occupancy.left(name, gone)
        if was_evicted and gone:
            self._gone.append(name.key)
        elif was_evicted:
            self._there[name.key] = name

    def _stored(self, name: BlockName, reason: str) -> None:
        del self._writing[name.key]
        self._counts[f"failed_{reason}" if reason else "stored"] += 1
        if reason:
            self._policy.lost(name.key)
            self._dropped.discard(name.key)
            self._occupancy.failed()
            return
        self._faults.disk_is_full = False
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
        self, job: int, key: Key, name: BlockName, pieces: Pieces, evicted: Sequence[BlockName], scratch: Scratch
    ) -> None:
        removed = [(block, self._remove(block)) for block in evicted]
        reason = "not_removed"
        if all(gone for _, gone in removed):
            write = partial(self._files.write, name, pieces, scratch)
            reason = self._faults.reason("a block was not stored", write, may_miss=False)
        self._results.append(Result(job, "store", key, name, reason, removed))

    def _read(self, job: int, key: Key, name: BlockName, pieces: Pieces, scratch: Scratch) -> None:
        read = partial(self._files.read, name, pieces, scratch)
        reason = self._faults.reason("a block was not loaded", read)
        if not reason:
            self._faults.reason("", lambda: self._files.mark_used(name))
        self._results.append(Result(job, "load", key, name, reason, ended_s=self._clock()))

    def _remove(self, name: BlockName) -> bool:
        return not self._faults.reason("a block was not removed", lambda: self._files.remove(name))

    def _remove_alone(self, name: BlockName, scratch: Scratch) -> None:
        self._removed.append((name, self._remove(name)))


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
