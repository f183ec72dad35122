"""The scheduler's account of files: which contents all ranks have there, and what is on its way from and to them.

Contents go to files as they come to host memory, and come back to host memory before a request that continues there is
admitted. So a request never waits with blocks for a file, and whatever fails, it is admitted with what host memory has.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from math import inf
from operator import attrgetter

from kvpolicy.caching import Node
from kvpolicy.host_store import HostBlock, HostCopy, HostStore
from kvpolicy.request_marks import Client, Hints
from kvpolicy.tiers import MAX_QUEUED_BLOCKS, digest_of_key
from kvpolicy_vllm.plugin.file_jobs import Under
from kvpolicy_vllm.plugin.file_parts import FileParts
from kvpolicy_vllm.plugin.file_reads import MAX_WAIT_S, RENEWED_S, FileReads
from kvpolicy_vllm.plugin.messages import FileEvent, FileJob, FileReport

logger = logging.getLogger(f"vllm.{__name__}")

SHARE = 4
"""Of host slots, stores and loads of files hold at most one in so many."""
WARNING_EVERY_S = 60.0
STEPS_TO_REPORT = 3
"""What workers say of the step in which a load began is read before the second step after that one begins, with
asynchronous scheduling, and they may say it a step later: however long steps take, nothing is late before the third."""
Count = Callable[[str, int], None]


class FileIndex:
    """One per engine core. ``ranks``: how many workers keep files, each its part of every block. ``clock``: the
    controller's. ``count``: counts blocks by what happened to them."""

    def __init__(self, pool: HostStore, ranks: int, block_bytes: int, clock: Callable[[], float], count: Count) -> None:
        self._pool, self._ranks = pool, ranks
        self._parts, self._reads = FileParts(ranks), FileReads(block_bytes, clock)
        self._clock, self._count = clock, count
        self._salt = b""
        self._under: dict[int, Under] = {}
        """By number, those that are not late, in the order in which they began."""
        self._late: dict[int, Under] = {}
        self._warned_s: float | None = None
        self._since_s: float | None = None
        """When ranks could first say what an earlier server left."""
        self._storing: set[bytes] = set()
        """Keys of contents that are being stored, as the workers know them."""
        self._taken = 0
        """Contents that are to be saved to host memory for files, since the step began."""
        self._coming: dict[bytes, Under] = {}
        """Loads by the keys of their contents."""
        self._of_digest: dict[bytes, list[Under]] = {}
        """Stores and loads, late ones too, by the digests of their contents' keys."""
        self._numbers = 0
        self._steps = 0
        self.settled = 0
        """Stores and loads that all ranks have finished: there may be room again."""
        self._held = 0
        self._forgets = False
        """Whether the workers have yet to hear of a reset."""
        self._events: list[FileEvent] = []
        self._stores: list[FileJob] = []
        self._loads: list[FileJob] = []
        self._fail_until_s = -inf
        """After a store that failed and of which nothing was stored, as on a full disk: when another may be worth
        trying. One that was refused has not failed, nor has one that began before a reset."""
        self.worth_storing: Callable[[int], bool] = lambda blocks: True
        """Whether blocks of a chain of so many blocks are stored: where reading and loading all of them would cost more
        than computing them, none is."""
        self.worth_saving = self.worth_storing
        """Whether they are, where they have to be saved to host memory before."""
        self.moved: Count = lambda direction, blocks: None
        """Called with ``write`` or ``read``, and how many blocks a rank has moved so."""
        self.heeded: Callable[[Sequence[int]], None] = lambda blocks: None
        """Called with :attr:`~kvpolicy_vllm.plugin.messages.FileReport.hinted`."""
        self.policy_failed: Callable[[str], None] = lambda method: None
        """Called with the name of its method where the caching policy of a rank's files has failed."""

    @property
    def under_way(self) -> bool:
        """Whether reports of workers are awaited, late ones not."""
        return bool(self._under) or self.starting

    @property
    def ready(self) -> bool:
        """Whether all ranks have said what an earlier server left."""
        return self._parts.ready

    @property
    def starting(self) -> bool:
        """Whether some rank has yet to say what an earlier server left, and it has not taken too long."""
        return not self.ready and (self._since_s is None or self._clock() < self._since_s + MAX_WAIT_S)

    def lookup(self, keys: Iterable[bytes]) -> int:
        """How many of these contents are in files, up to the first one that is not."""
        count = 0
        for key in keys:
            if not self._parts.has(digest_of_key(self._salt + key)):
                break
            count += 1
        return count

    def __contains__(self, key: object) -> bool:
        """Whether all ranks have the content."""
        return isinstance(key, bytes) and bool(self.lookup((key,)))

    @property
    def suspended(self) -> bool:
        """Whether nobody waits for files."""
        return self._reads.suspended

    @property
    def room(self) -> int:
        """How many blocks a load may bring now."""
        return max(0, min(self._room(), self._pool.free))

    def in_time(self, blocks: int) -> int:
        """How many of so many blocks are expected in host memory while somebody waits for them."""
        return self._reads.in_time(blocks, self.backlog_s())

    def read_s(self, blocks: int) -> float:
        """Expected seconds until so many blocks are in host memory, if nothing else is on its way; 0 where none was
        loaded for long."""
        return self._reads.expected_s(blocks)

    def backlog_s(self, last: float = inf) -> float:
        """Expected seconds until what is on its way from files is in host memory, up to the load of that number, late
        blocks not: it is read before what is asked for now. Workers read block by block in the order of the jobs, by
        all of their threads."""
        loads = [under for under in self._under.values() if under.chain and under.number <= last]
        if not loads:
            return 0.0
        left_s = self._reads.left_s(loads[0].began_s, len(loads[0].keys))
        return left_s + self.read_s(sum(len(under.keys) for under in loads[1:]))

    def asked(self, chain: Sequence[bytes]) -> None:
        """A new request has this prompt."""
        if chain:
            self._events.append(FileEvent(self._salted(chain)))

    def hinted(
        self, chain: Sequence[bytes], hints: Hints, client: Client, request: str = "", over: bool = False
    ) -> None:
        """A request with this window came with hints, granted to this client, or is ``over``."""
        if chain or hints.session is not None:
            self._events.append(FileEvent(self._salted(chain), hints, client, request, over))

    def _salted(self, keys: Sequence[bytes]) -> tuple[bytes, ...]:
        """Keys as the workers know them."""
        return tuple(self._salt + key for key in keys)

    def saved(self, blocks: Iterable[HostBlock]) -> None:
        """These contents have come to host memory: store those that may be of use and that files do not have."""
        wanted = {block.node: block for block in blocks if block.node is not None and self._is_wanted(block)}
        first = len(self._stores)
        for run in runs_of(wanted):
            self._store(run)
        # Beginnings come first where there is no room for all, and last to policies that go by when a block came.
        self._stores[first:] = self._stores[first:][::-1]

    def _is_wanted(self, block: HostBlock) -> bool:
        if not isinstance(block.key, bytes) or block.node is None or block.slot is None:
            return False
        return self._lacks(block.key) and self.worth_storing(block.node.reach)

    def takes(self, key: Hashable, blocks: int) -> bool:
        """Whether a content of a chain of so many blocks is worth saving to host memory for files, which are there and
        can store it now, with all that they have taken so since the step began."""
        if not self.ready or self._store_room() <= self._taken or self._clock() < self._fail_until_s:
            return False
        taken = isinstance(key, bytes) and self._lacks(key) and self.worth_saving(blocks)
        self._taken += taken
        return taken

    def _lacks(self, key: bytes) -> bool:
        """Whether files neither have this content nor are about to."""
        key = self._salt + key
        return key not in self._storing and not self._parts.has(digest_of_key(key))

    def _store(self, run: list[HostBlock]) -> None:
        room = max(0, self._store_room()) if self._clock() >= self._fail_until_s else 0
        self._count("refused", len(run[room:]))
        run = run[:room]
        if not run:
            return
        node = run[0].node
        assert node is not None
        copy = HostCopy(0, loading=True)
        held = [block.key for block in run if isinstance(block.key, bytes)]
        self._pool.hold(copy, held)
        keys = self._salted(held)
        parent = None if node.parent is None else node.parent.key
        before = (self._salt + parent,) if isinstance(parent, bytes) else ()
        self._storing.update(keys)
        under = Under(copy, keys, list(run), self._clock())
        self._begin(under, self._stores, (*before, *keys), node.position - len(before))

    def fetch(self, chain: Sequence[bytes], first: int, count: int) -> bool:
        """Bring ``count`` contents of a chain to host memory, from index ``first`` on, or fewer where there is no room
        for more; False where nobody should wait for them. What they continue, and what hints hold back, does not go for
        them.

        While reads are suspended nobody waits. One load at a time is tried all the same: if it comes in time, they are
        suspended no longer."""
        if not self._reads.suspended:
            return self._bring(chain, first, count)
        self._count("suspended", count)
        if self._may_try():
            self._bring(chain, first, count)
        return False

    def _may_try(self) -> bool:
        """Whether no load is under way. One that is not reported may be waited for in vain, but not for ever."""
        loads = [under for under in (*self._under.values(), *self._late.values()) if under.chain]
        return all(self._clock() >= under.began_s + RENEWED_S for under in loads)

    def _bring(self, chain: Sequence[bytes], first: int, count: int) -> bool:
        count = min(count, self.room)
        if not count:
            return False
        copy = HostCopy(0, loading=True)
        blocks = self._pool.bring(copy, count, frozenset(chain[:first]))
        if not blocks:
            self._pool.release(copy)
            return False
        end = first + len(blocks)
        keys = self._salted(chain[first:end])
        under = Under(copy, keys, blocks, self._clock(), tuple(chain[:end]))
        self._coming.update(dict.fromkeys(keys, under))
        self._begin(under, self._loads)
        return True

    @property
    def is_loading(self) -> bool:
        """Whether any load is under way that is not late."""
        return any(under.chain for under in self._under.values())

    def load_of(self, key: bytes) -> int:
        """Number of the load that brings the content to host memory, where it can be waited for. 0 where there is
        none."""
        under = self._coming.get(self._salt + key)
        return under.number if under is not None and self.is_coming(under.number) else 0

    def is_coming(self, number: int) -> bool:
        """Whether what the load of that number brings can be waited for: it has not taken too long, and reads are not
        suspended."""
        under = self._under.get(number)
        return under is not None and not (under.stale or self._reads.suspended or self._is_late(under))

    def _is_late(self, under: Under) -> bool:
        overdue = self._clock() >= under.began_s + MAX_WAIT_S
        return overdue and self._steps >= under.began_step + STEPS_TO_REPORT

    def ahead(self, keys: Sequence[bytes], number: int) -> tuple[int, float]:
        """Of these contents, which the load of that number has begun to bring, how many are on their way or in files,
        up to the first one that is not, and the expected seconds until they are in host memory."""
        coming, behind = self._under[number].ahead(keys, self.lookup)
        return coming + behind, self.backlog_s(inf if behind else number) + self.read_s(behind)

    def note_late(self) -> None:
        """Await no more what workers have not reported for too long: nobody waits for it, and no other request finds
        its contents in files. Called once a step.

        Its slots stay taken until every rank has reported it, for a worker may still be writing to them. They count
        towards what stores and loads may hold, so that lost reports never cost more of host memory than that."""
        now, self._taken = self._clock(), 0
        self._steps += 1
        self._since_s = now if self._since_s is None else self._since_s
        late = []
        for number, under in self._under.items():
            if not self._is_late(under):
                break
            late.append(number)
        for number in late:
            under = self._late[number] = self._under.pop(number)
            self._count("late", len(under.keys))
            if under.chain:
                self._reads.late()
                for key in under.keys:
                    self._parts.lost(digest_of_key(key))
        if late and (self._warned_s is None or now >= self._warned_s + WARNING_EVERY_S):
            self._warned_s = now
            slots = sum(len(under.blocks) for under in self._late.values())
            logger.warning(
                "kvpolicy: workers have not reported blocks that go to files or come from them for %g s; their %d "
                "host slots stay in use until they do (counted as cache_blocks, event 'late')", MAX_WAIT_S, slots
            )  # fmt: skip

    def take_jobs(self) -> tuple[bool, tuple[FileEvent, ...], tuple[FileJob, ...], tuple[FileJob, ...]]:
        """Whether there was a reset, prompts and hints after it in their order, stores and loads, since the last
        call."""
        taken = self._forgets, tuple(self._events), tuple(self._stores), tuple(self._loads)
        self._forgets, self._events, self._stores, self._loads = False, [], [], []
        return taken

    def take_drops(self) -> tuple[bytes, ...]:
        """Digests of what all ranks are to drop, since some of them lack their parts; see
        :meth:`~kvpolicy_vllm.plugin.file_parts.FileParts.take_drops`."""
        return self._parts.take_drops(self._of_digest)

    def acknowledge(self, reports: Iterable[FileReport]) -> None:
        """Register what ranks report."""
        for report in reports:
            if report.policy_failed:
                self.policy_failed(report.policy_failed)
            if report.hinted:
                self.heeded(report.hinted)
            found = self._parts.found(report.found, report.ready)
            if found is not None:
                self._count("found", found)
                logger.info("kvpolicy: found %d KV blocks in files, which an earlier server left there", found)
            of = self._late if report.number in self._late else self._under
            under = of.get(report.number)
            if under is not None:
                self.moved("read" if under.chain else "write", report.moved)
                under.reported(report)
                if under.reports == self._ranks:
                    del of[report.number]
                    self._settle(under)
            for digest in report.gone:
                self._parts.gone(digest)
                for under in self._of_digest.get(digest, ()):
                    under.gone.add(digest)

    def forget(self) -> None:
        """The keys stand for other contents from now on, as after a change of weights: nothing that was stored is
        found, and nothing that will be stored is found by another server. Stores that no worker has heard of end here:
        nobody could ask for these blocks, and files would take them for newcomers."""
        self._salt = uuid.uuid4().bytes
        self._parts.forget()
        self._coming.clear()
        self._forgets, self._events = True, []
        for under in (*self._under.values(), *self._late.values()):
            under.failed.update(map(digest_of_key, under.keys))
            under.stale = True
        stores, self._stores = self._stores, []
        for job in stores:
            self._settle((self._late if job.number in self._late else self._under).pop(job.number))

    def _room(self) -> int:
        return self._pool.total // SHARE - self._held

    def _store_room(self) -> int:
        """As far as the workers' queues are concerned, too, which hold no more than what is being stored."""
        return min(self._room(), MAX_QUEUED_BLOCKS - len(self._storing))

    def _begin(self, under: Under, jobs: list[FileJob], chain: tuple[bytes, ...] = (), first: int = 0) -> None:
        self._numbers += 1
        under.number, under.began_step = self._numbers, self._steps
        self._under[under.number] = under
        self._held += len(under.blocks)
        for key in under.keys:
            self._of_digest.setdefault(digest_of_key(key), []).append(under)
        slots = tuple(block.slot for block in under.blocks if block.slot is not None)
        jobs.append(FileJob(under.number, under.keys, slots, chain, first))

    def _settle(self, under: Under) -> None:
        """All ranks have finished a store or a load."""
        self._held -= len(under.blocks)
        self.settled += 1
        digests = [digest_of_key(key) for key in under.keys]
        lost = under.failed | under.refused
        done = [digest not in lost for digest in digests]
        for digest, ok in zip(digests, done, strict=True):
            self._of_digest[digest].remove(under)
            if not self._of_digest[digest]:
                del self._of_digest[digest]
            if ok and digest not in under.gone:  # a load that was late was taken for not there
                self._parts.stored(digest)
            elif under.chain:
                self._parts.lost(digest)
            if digest in under.gone or not (ok or under.chain or under.stale):  # some rank may have stored its part
                self._parts.drop(digest)
        if under.chain:
            self._loaded(under, done)
        else:
            self._storing.difference_update(under.keys)
            if any(done):
                self._fail_until_s = -inf
            elif under.failed and not under.stale:
                self._fail_until_s = self._clock() + RENEWED_S
            refused = len(under.refused - under.failed)
            self._count("stored", sum(done))
            self._count("refused", refused)
            self._count("store_failed", len(done) - sum(done) - refused)
        self._pool.release(under.copy)

    def _loaded(self, under: Under, done: Sequence[bool]) -> None:
        for key in under.keys:
            if self._coming.get(key) is under:
                del self._coming[key]
        right = [block for block, ok in zip(under.blocks, done, strict=True) if ok]
        places = [len(under.chain) - len(done) + place for place, ok in enumerate(done) if ok]
        self._pool.brought(under.chain, places, right)
        self._count("loaded", len(right))
        self._count("load_failed", len(done) - len(right))
        if not under.stale:
            self._reads.ended(under.began_s, len(right), under.slowest())


def runs_of(blocks: Mapping[Node, HostBlock]) -> Iterator[list[HostBlock]]:
    """Blocks that follow each other, from the first one on, and before what continues them: the device loses prompts
    from their end, and where there is no room for all, their beginnings are of use. O(blocks), runs apart, which are
    sorted."""
    after: dict[Node, Node] = {}
    begins = []
    for node in blocks:
        parent = node.parent
        if parent is None or parent not in blocks or parent in after:
            begins.append(node)
        else:
            after[parent] = node
    begins.sort(key=attrgetter("position"))
    for begin in begins:
        run, next_one = [blocks[begin]], after.get(begin)
        while next_one is not None:
            run.append(blocks[next_one])
            next_one = after.get(next_one)
        yield run
