"""The host pool: what is kept of preempted requests and, with a caching policy, of prompts; and the copies that a step
brings to the worker."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from kvpolicy.caching import CachingPolicy
from kvpolicy.events import Direction
from kvpolicy.host_store import CopyQueues, HostBlock, HostCopy, HostStore, by_owner
from kvpolicy.simulator.base import Server
from kvpolicy.simulator.builtin.blocks import Contents
from kvpolicy.simulator.builtin.live_request import Account, Copy, CopyJob, KeyedBlock, LiveRequest


class HostPool:
    """Host slots and the copies in them, at most one copy per request; and, with a caching policy, other contents.

    ``keys_of``: keys of a request's first blocks, of which there are so many and all are full.
    """

    def __init__(
        self,
        server: Server,
        cache: CachingPolicy | None = None,
        keys_of: Callable[[LiveRequest, int], list[int]] = lambda live, count: [],
    ) -> None:
        self._store = HostStore(server.host_blocks, cache)
        self._caching = cache is not None
        self._keys_of = keys_of
        self._for_cache = HostCopy(0)
        """Stands for the cache, to which saves of what no copy needs are accounted."""
        self._block_size = server.block_size
        self._saves: list[HostBlock] = []
        self._loads: list[Copy] = []
        self._queues = queues = CopyQueues(server.block_bytes)
        self._admission = self._store.admission
        self._admission.takes_saves = lambda: queues.takes_saves
        self._admission.takes_pins = lambda: queues.takes_pins
        self._count = 0
        self._begun: list[tuple[Copy, Account]] = []
        """Copies made since jobs were taken last, and their preemptions."""
        self._given_up: list[Account] = []
        self.loads: Callable[[LiveRequest, int, int], bool] = lambda live, total_tokens, local: True
        """Whether a request loads what it lacks of its tokens beyond the local hit."""
        self.load_share = 1.0
        """Share of what is lacking, or of what a prompt finds, that is loaded, in blocks from the front; the rest is
        computed."""
        self.on_served: Callable[[Sequence[int]], None] = lambda prompt: None
        """Called with the keys of a prompt that has what it found, where a caching policy wants to know."""
        self.in_files: Callable[[int], bool] = lambda key: False
        """Whether files have the block with this key."""
        self.loads_hit: Callable[[LiveRequest, int, int], bool] = lambda live, total_tokens, local: True
        """Whether a request loads what host memory has of its tokens beyond the local hit, without a copy of its own.
        """

    @property
    def total(self) -> int:
        return self._store.total

    @property
    def free(self) -> int:
        return self._store.free

    @property
    def watching(self) -> bool:
        """Whether any block has to be saved before the device gives it away."""
        return bool(self._store.watched)

    def watches(self, block: KeyedBlock) -> bool:
        """Whether the block has to be saved before the device gives it away."""
        return self._store.key_at(block) is not None

    def obtainable(
        self,
        tokens: int,
        wanted: float,
        blocks: Iterable[KeyedBlock] = (),
        gain_per_block: Callable[[], float | None] = lambda: None,
    ) -> int:
        """See :meth:`kvpolicy.host_store.HostStore.obtainable`. ``blocks``: those of the copy that have keys."""
        return self._store.obtainable(tokens, wanted, (block.key for block in blocks), gain_per_block)

    def stored(self, blocks: Iterable[KeyedBlock]) -> int:
        """How many of these blocks' contents are in host memory."""
        return self._store.stored(block.key for block in blocks)

    def queued_bytes(self, direction: Direction) -> int:
        """Bytes of copies that are under way or not yet sent to the worker."""
        return self._queues.bytes(direction)

    def keep(
        self, live: LiveRequest, account: Account, contents: Contents, gain_per_block: float | None = None
    ) -> Copy:
        """Keep what the request is about to lose. The caller has checked that enough slots can be had."""
        self.forget(live)
        copy = live.copy = Copy(
            account.tokens, self._number(), gain_per_block=gain_per_block, live=live, account=account
        )
        self._begun.append((copy, account))
        self._queue_saves(self._store.add(copy, contents))
        return copy

    def lost(self, blocks: Iterable[KeyedBlock]) -> bool:
        """The device gives these blocks away: save what copies need of them, and what is cached. Return whether what
        is cached may have changed."""
        self._queue_saves(self._store.lost(blocks))
        return self._caching

    # ---- what no copy needs ----

    def store_only_where(self, worth_saving: Callable[[int], bool], worth_keeping: Callable[[int], bool]) -> None:
        """See :attr:`kvpolicy.host_store.CacheAdmission.worth_saving`, and the other one."""
        self._admission.worth_saving, self._admission.worth_keeping = worth_saving, worth_keeping

    def hand_on_where(self, worth_handing_on: Callable[[Hashable, int], bool]) -> None:
        """See :attr:`kvpolicy.host_store.CacheAdmission.worth_handing_on`."""
        self._admission.worth_handing_on = worth_handing_on

    def asked(self, live: LiveRequest) -> None:
        """A request has arrived. Without effect where nothing is cached, as all of these."""
        if self._caching:
            self._store.asked(self._keys_of(live, live.request.prompt_tokens // self._block_size))

    def served(self, live: LiveRequest) -> None:
        """A request is admitted for the first time. It goes on holding what it has found."""
        if self._caching:
            self.on_served(self._keys_of(live, live.request.prompt_tokens // self._block_size))

    def store_in_order(self, in_order: Callable[[Sequence[Hashable]], Sequence[Hashable]]) -> None:
        """See :attr:`kvpolicy.host_store.CacheAdmission.in_order`."""
        self._admission.in_order = in_order

    def given_back(self, live: LiveRequest) -> None:
        """A request is about to give its blocks back to the device, which may lose them from now on."""
        self._watch(live, self._keys_of(live, live.cached))

    def _watch(self, live: LiveRequest, chain: Sequence[int]) -> None:
        """``chain``: keys of those of its blocks that may be stored."""
        self._store.extended(chain, live.request.prompt_tokens // self._block_size)
        self._store.watch(chain, dict(enumerate(live.keyed_blocks[: len(chain)])))

    def hit_tokens(self, live: LiveRequest, local: int) -> int:
        """Tokens that host memory has beyond the local hit, of a request without a copy of its own, whatever share of
        them is loaded."""
        return self._store.lookup(self._missing(live, local)) * self._block_size if self._caching else 0

    def file_tokens(self, live: LiveRequest, local: int) -> int:
        """Tokens beyond those that were read from files for it, or are there now."""
        if not self._caching:
            return 0
        read, count = frozenset(live.staged), 0
        for key in self.beyond_host(live, local):
            if key not in read and not self.in_files(key):
                break
            count += 1
        return count * self._block_size

    def beyond_host(self, live: LiveRequest, local: int) -> list[int]:
        """Keys of the blocks that the device and host memory lack of what it has to compute. The last token is always
        computed."""
        missing = self._missing(live, local)
        return missing[self._store.lookup(missing) :]

    def _hit(self, live: LiveRequest, local: int) -> tuple[list[int], int]:
        """Keys of the blocks that host memory has beyond the local hit, and the number of those behind that were read
        from files."""
        missing = self._missing(live, local)
        host = self._store.lookup(missing)
        staged = 0
        if live.staged:
            known = set(live.staged)
            while host + staged < len(missing) and missing[host + staged] in known:
                staged += 1
        if self.load_share < 1.0:  # what was read from files lies behind what is left out
            host, staged = round(host * self.load_share), 0
        return missing[:host], staged

    def _missing(self, live: LiveRequest, local: int) -> list[int]:
        count = (live.tokens - 1) // self._block_size
        keys = self._keys_of(live, count if live.preemptions else min(count, len(live.keys)))
        return keys[local // self._block_size :]

    # ---- loads ----

    def loadable_tokens(self, live: LiveRequest, local: int) -> int:
        """Tokens a load would bring beyond the local hit; 0 where it is better to compute them again."""
        copy = live.copy
        if copy is None:
            if not self._caching:
                return 0
            host, staged = self._hit(live, local)
            hit = (len(host) + staged) * self._block_size
            return hit if hit and self.loads_hit(live, local + hit, local) else 0
        if copy.loading:
            return 0
        total_tokens = min(copy.tokens, live.tokens - 1)
        if total_tokens <= local:  # an earlier answer, with less on the device, is not what happens
            copy.asked_at_resume, copy.loads = None, True
            return 0
        if not self.loads(live, total_tokens, local):
            return 0
        if self.load_share < 1.0:
            blocks = round((self._blocks(total_tokens) - self._blocks(local)) * self.load_share)
            total_tokens = min(total_tokens, local + blocks * self._block_size)
        return total_tokens - local

    def begin_load(self, live: LiveRequest, local: int, tokens: int) -> None:
        """Queue a load of ``tokens`` tokens beyond the local hit."""
        copy, first = live.copy, self._blocks(local)
        count = self._blocks(local + tokens) - first
        if copy is None:
            host, staged = self._hit(live, local)
            copy = live.copy = Copy(local + tokens, self._number(), live=live, account=None, staged_blocks=staged)
            self._store.hold(copy, host)
            live.staged = ()
            first, count = 0, len(host)
        copy.load_tokens = tokens
        self._queue_saves(self._store.begin_load(copy, range(first, first + count)))
        self._queues.add("load", len(copy.blocks) + copy.staged_blocks)
        self._loads.append(copy)

    def forget(self, live: LiveRequest) -> Copy | None:
        """Drop and return the request's copy. Its slots are free at once, since any later save follows in order."""
        copy = live.copy
        if copy is None:
            return None
        assert not copy.loading, "a request that is being loaded can neither run nor end"
        live.copy = None
        self._store.release(copy)
        return copy

    @property
    def waiting(self) -> bool:
        """Whether there is anything to :meth:`take`."""
        return bool(self._saves or self._loads or self._begun or self._given_up)

    def take(self) -> tuple[list[CopyJob], list[CopyJob]]:
        """Remove and return the saves and loads that the step being scheduled brings to the worker."""
        saves = self._save_jobs()
        loads = [self._job(copy, copy.blocks) for copy in self._loads]
        self._loads = []
        return saves, loads

    def take_begun(self) -> list[Account]:
        """Preemptions whose copies were made since the last call and needed no save yet. Call after :meth:`take`."""
        begun, self._begun = self._begun, []
        return [account for copy, account in begun if not copy.saved]

    def take_given_up(self) -> list[Account]:
        """Preemptions whose copies were given up since the last call, because slots were short."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def saved(self, job: CopyJob, took_s: float) -> None:
        """Note that the worker has completed a save, which had the link for so many seconds."""
        if job.account is not None:
            job.account.busy -= 1
        self._queues.ended("save", len(job.blocks), took_s)

    def loaded(self, job: CopyJob) -> None:
        """Note that the worker has completed a load, and free the slots."""
        copy = job.copy
        assert copy is not None
        if copy.account is not None:
            copy.account.busy -= 1
        copy.live.copy = None
        self._queues.ended("load", job.count)
        self._store.release(copy)

    def _queue_saves(self, blocks: list[HostBlock]) -> None:
        self._saves += blocks
        self._queues.add("save", len(blocks))
        for copy in self._store.given_up:
            if copy.live.copy is copy:
                copy.live.copy = None
                self._given_up.append(copy.account)
        self._store.given_up = []

    def _save_jobs(self) -> list[CopyJob]:
        """One save for each copy that blocks are saved for."""
        saves = by_owner(self._saves, self._for_cache)
        self._queues.add("save", sum(len(blocks) for _, blocks in saves) - len(self._saves))  # less forgotten ones
        self._saves = []
        jobs = []
        for copy, blocks in saves:
            if copy is self._for_cache:
                jobs.append(self._job(None, blocks))
            else:
                copy.saved = True
                jobs.append(self._job(copy, blocks))
            for block in blocks:
                block.saved_by = jobs[-1].copy_id
        return jobs

    def _job(self, copy: Copy | None, blocks: list[HostBlock]) -> CopyJob:
        job = CopyJob(self._number(), copy, blocks, max((block.saved_by for block in blocks), default=0))
        if job.account is not None:
            job.account.busy += 1
        return job

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _number(self) -> int:
        self._count += 1
        return self._count
