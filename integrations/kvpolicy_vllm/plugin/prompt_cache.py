"""The cache of prompts in host memory: what requests give back to it, what they find in it, and whether they load that.

Imports no vLLM: everything is read from the scheduler object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter, sub
from typing import Any

from kvpolicy.caching import CachingPolicy, Hinted
from kvpolicy.caching import spec as caching
from kvpolicy.caching.fallback import guarded
from kvpolicy.caching.holds import EVENTS
from kvpolicy.cost.block_price import RENEWED_STEPS, Beside, block_price, read_first, sampled
from kvpolicy.policy import Decider
from kvpolicy.policy.decision import HOST_TIER
from kvpolicy.tiers import Tier
from kvpolicy_vllm.plugin.device_blocks import is_found
from kvpolicy_vllm.plugin.file_index import FileIndex
from kvpolicy_vllm.plugin.file_waits import FileWaits
from kvpolicy_vllm.plugin.host_copies import CopyBook, Settled
from kvpolicy_vllm.plugin.host_tier import HostTier
from kvpolicy_vllm.plugin.marks import MarkReader, client_of
from kvpolicy_vllm.plugin.messages import StepJobs
from kvpolicy_vllm.plugin.observers import Observers, Tally
from kvpolicy_vllm.plugin.situation import prompt_situation, why_not_loadable
from kvpolicy_vllm.plugin.stale_requests import StaleRequests

FILE_TIER = "files"
KEY, PLACE = attrgetter("block_hash"), attrgetter("block_id")
"""Of vLLM's blocks of the device. A prompt has many: they are read in one call."""
HINT_COUNTS = attrgetter(*EVENTS)


@dataclass(slots=True)
class Found:
    """What a waiting request was last found to have in host memory."""

    asked: tuple[int, int, int]
    """Local hit in tokens, blocks found beyond it, and bytes of loads under way."""
    loads: bool
    """Whether they are better loaded than computed."""


class PromptCache:
    """One per engine core. ``key_of``: the key of a block in vLLM's prefix cache, from one of a request's hashes.
    ``stale``: requests that hold blocks which are not what their keys stand for.

    Nothing here may stop a request: after an error in deciding, the prompt is computed, as vLLM alone would have done.
    """

    def __init__(
        self,
        copies: CopyBook,
        decider: Decider,
        key_of: Callable[[Any], bytes],
        observers: Observers,
        tally: Tally,
        complain: Callable[[str], None],
        marks: MarkReader,
        stale: StaleRequests,
    ) -> None:
        self._copies, self._decider, self._key_of, self._marks, self._stale = copies, decider, key_of, marks, stale
        host = HostTier(copies, lambda: self._size)
        self._host: Tier[str, int] = host
        self._settled = host.settled
        self._observers, self._tally, self._complain = observers, tally, complain
        self._scheduler: Any = None
        self._asked_blocks: dict[str, int] = {}
        """Full blocks of the prompt of each unfinished request."""
        self._found: dict[str, Found] = {}
        """By request that waits."""
        self.prices: BlockPrices | None = None
        """Those of the caching policy, kept up to date with the policy of the server."""
        self._worth: dict[tuple[int, bool, bool], bool] = {}
        self._worth_until, self._decides = 0, (decider.policy, decider.shadow)
        self._now: Callable[[], float] = lambda: 0.0
        self._hinted: tuple[int, ...] = (0,) * len(EVENTS)
        self._counted = {"stored": 0, "refused": 0, "evicted": 0, "spoiled": 0}
        copies.pool.admission.worth_saving = partial(self._is_worth_storing, saved=True)
        copies.pool.admission.worth_keeping = self._is_worth_storing
        self.files: FileIndex | None = None
        """None where prompts are not in files; see :meth:`keep_files`."""
        self._files_by_price = self._unpriced = False
        """Whether the policy of files goes by prices, and whether these have changed since workers were told."""
        self._waits: FileWaits | None = None
        """None as long as there are no files."""

    def keep_files(self, ranks: int, by_price: bool = False) -> None:
        """Store prompts in files, too. ``ranks``: how many workers keep files. ``by_price``: whether what files give up
        goes by prices."""

        def count(event: str, blocks: int) -> None:
            if blocks:
                self._tally.add("cache_blocks", blocks, tier=FILE_TIER, event=event)

        def moved(direction: str, blocks: int) -> None:
            if blocks:
                self._tally.add("cache_file_bytes", blocks * self._copies.block_bytes, direction=direction)

        self.files = FileIndex(self._copies.pool, ranks, self._copies.block_bytes, lambda: self._now(), count)
        self._waits = FileWaits(self.files, self._keys, self._is_worth_reading)
        self.files.moved = moved
        self.files.heeded = partial(self._add_hinted, FILE_TIER)
        self.files.policy_failed = lambda method: self._tally.add("cache_failed", method=method)
        self.files.worth_storing = partial(self._is_worth_storing, from_files=True)
        self.files.worth_saving = partial(self._is_worth_storing, saved=True, from_files=True)
        self._copies.pool.admission.worth_handing_on = self.files.takes
        self._copies.pool.below = self.files
        self._copies.saved = self.files.saved
        self._files_by_price = self._unpriced = by_price

    def __len__(self) -> int:
        """Number of requests of which anything is remembered."""
        waiting = self._found.keys() | (self._waits.names if self._waits is not None else set())
        return len(self._asked_blocks.keys() | waiting | self._stale.names)

    def step_begins(self, scheduler: Any, step: int, clock: Callable[[], float]) -> None:
        self._scheduler, self._now = scheduler, clock
        self.count()
        if self.files is not None:
            self.files.note_late()
        (policy, shadow), decider = self._decides, self._decider
        if step >= self._worth_until or decider.policy is not policy or decider.shadow != shadow:
            self._worth_until, self._decides = step + RENEWED_STEPS, (decider.policy, decider.shadow)
            self._price_anew()
        if self.prices is not None:
            self.prices.beside.add(len(scheduler.running))

    def _price_anew(self) -> None:
        """Predicted costs may be others by now: of another policy or batch, or by what was learned;
        and in shadow mode nothing is loaded."""
        self._worth, self._found = {}, {}
        if self.prices is not None:
            self.prices.renew()
        self._unpriced = self._files_by_price

    # ---- what requests have ----

    def arrived(self, request: Any) -> None:
        """A new request: the policy learns what is asked for."""
        prompt = self._keys(request, 0, len(request.block_hashes))
        self._asked_blocks[request.request_id] = len(prompt)
        self._host.asked(prompt)
        if self.files is not None:
            self.files.asked(prompt)
        self._heed_hints(request, over=False)

    def _heed_hints(self, request: Any, over: bool, goes_on: bool = False) -> None:
        """Let the policy know what the request says of its window. ``goes_on``: it has lost its blocks and will come
        back."""
        if not isinstance(self._copies.pool.cache, Hinted):
            return
        try:
            marks = self._marks.of(request)
            if not marks.hints:
                return
            chain = self._keys(request, 0, len(request.block_hashes))
            if over and request.num_computed_tokens < request.num_prompt_tokens:  # as one that was cancelled
                chain = chain[: self._there(request, chain)]
            hints, client = marks.hints.of_prompt(request.num_prompt_tokens), client_of(request, marks)
            if goes_on:
                self._copies.pool.goes_on(chain, hints, client, request.request_id)
                return
            self._host.hinted(chain, hints, client, request.request_id, over)
            if self.files is not None:
                self.files.hinted(chain, hints, client, request.request_id, over)
        # The boundary between clients and a server: a hint that cannot be heeded is none.
        except Exception:  # noqa: BLE001
            self._tally.add("hints_failed")
            self._complain("heeding a request's hints about its KV failed (counted as hints_failed)")

    def _there(self, request: Any, chain: Sequence[bytes]) -> int:
        """How many leading blocks of its window it has computed, or are on the device, in host memory or in files."""
        pool, files, scheduler = self._copies.pool, self.files, self._scheduler
        there = request.num_computed_tokens // self._size if request.num_computed_tokens else 0
        for key, block_hash in zip(chain[there:], request.block_hashes[there:], strict=True):
            on_device = scheduler is not None and is_found(block_hash, scheduler)
            if not (on_device or key in pool or (files is not None and files.lookup([key]))):
                break
            there += 1
        return there

    def preempted(self, request: Any) -> None:
        """The request is about to lose its blocks, and will come back."""
        if self._waits is not None:
            self._waits.forget(request.request_id)
        self.given_back(request)
        self._heed_hints(request, over=False, goes_on=True)

    def given_back(self, request: Any) -> None:
        """The request is about to lose its blocks: what the device may lose of them from now on is watched."""
        if self._scheduler is None or request in self._stale:
            return
        blocks = self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[0]
        blocks = blocks[: request.num_computed_tokens // self._size]
        chain, places = list(map(KEY, blocks)), list(map(PLACE, blocks))
        if not all(chain):
            chain = chain[: chain.index(None)]
        asked = self._asked_blocks.get(request.request_id, 0)
        hints = self._marks.of(request).hints.of_prompt(request.num_prompt_tokens)
        chain = chain[: self._copies.pool.wanted(chain, hints)]
        self._copies.pool.extended(chain, asked)
        self._host.store(request.request_id, chain, dict(enumerate(places[: len(chain)])))

    def ended(self, request: Any) -> None:
        self._heed_hints(request, over=True)
        self._count_hints()  # the next step may be long in coming
        self.given_back(request)
        self._asked_blocks.pop(request.request_id, None)
        self._found.pop(request.request_id, None)
        if self._waits is not None:
            self._waits.forget(request.request_id)

    def forget(self) -> None:
        """Nothing that was found may be used again, as after a change of weights."""
        self._found.clear()
        if self.files is not None:
            self.files.forget()

    # ---- what requests find ----

    def loadable_tokens(self, request: Any, local_tokens: int) -> int:
        """Tokens to load beyond the local hit; 0 where none is in host memory, or it is better to compute them. At
        least one token is left to compute. Changes nothing that is recorded."""
        first = local_tokens // self._size
        keys = self._keys(request, first, (int(request.num_tokens) - 1) // self._size)
        blocks = self._host.lookup(keys)
        if not blocks or why_not_loadable(request, self._scheduler, self._copies, self._now()):
            self._found.pop(request.request_id, None)
            return 0
        asked = local_tokens, blocks, self._copies.queued_bytes("load")
        found = self._found.get(request.request_id)
        if found is None or found.asked != asked:
            found = self._found[request.request_id] = Found(asked, self._is_worth_loading(request, asked))
        return blocks * self._size if found.loads else 0

    def admitted(self, request: Any, block_ids: Sequence[int], load_tokens: int) -> list[int]:
        """The request has device blocks, of which ``load_tokens`` tokens are to be loaded; returns those to load
        into."""
        found = self._found.pop(request.request_id, None)
        if self._waits is not None:
            self._waits.admitted(request.request_id)
        blocks = load_tokens // self._size
        if found is not None:
            outcome = "loaded" if load_tokens else "cheaper" if not found.loads else "passed_over"
            self._tally.add("cache_hits", tier=HOST_TIER, outcome=outcome)
            self._tally.add("cache_hit_tokens", found.asked[1] * self._size, tier=HOST_TIER, outcome=outcome)
        if not blocks:
            return []
        first = len(block_ids) - blocks
        keys, into = self._keys(request, first, len(block_ids)), list(block_ids[first:])
        self._host.load(request.request_id, [*zip(keys, into, strict=True)])
        return into

    def settled(self, settled: Settled, ledger: Any) -> None:
        """A job of the cache is finished on all ranks."""
        self._settled(settled)
        for finished in self._host.finished():
            if finished.failed:
                self._observers.tell("fell_back", "cache_load_failed")
                continue
            tokens = len(finished.done) * self._size
            self._observers.tell("prompt_loaded", finished.job, tokens)
            opened = ledger.open_preemption(finished.job)
            if opened is not None:  # its cost is that of neither option
                opened.loaded_tokens, opened.mixed = tokens, True

    def count(self) -> None:
        """Count what became of contents since the last call."""
        counts = self._copies.pool.counts
        self._count_hints()
        now = {
            "stored": counts.stored, "refused": counts.refused, "evicted": counts.evicted, "spoiled": counts.spoiled,
        }  # fmt: skip
        if now == self._counted:  # true in nearly every step
            return
        for event, blocks in now.items():
            if blocks > self._counted[event]:
                self._tally.add("cache_blocks", blocks - self._counted[event], tier=HOST_TIER, event=event)
        self._counted = now

    # ---- files ----

    @property
    def files_under_way(self) -> bool:
        """Whether an otherwise idle engine should go on stepping, for what workers report of files."""
        return self.files is not None and self.files.under_way

    def with_files(self, jobs: StepJobs) -> StepJobs:
        """A step's jobs, with those that concern files."""
        forgets, events, stores, loads = (False, (), (), ()) if self.files is None else self.files.take_jobs()
        drops = () if self.files is None else self.files.take_drops()
        prices = self._file_prices() if self._unpriced else ()
        if not (forgets or events or drops or stores or loads or prices):
            return jobs
        return replace(
            jobs, forget_hints=forgets, file_events=events, file_prices=prices, file_drops=drops, file_stores=stores,
            file_loads=loads,
        )  # fmt: skip

    def _file_prices(self) -> tuple[float, ...]:
        """What a block in files saves, by its place: as one in host memory, less the time that it takes there."""
        prices, files = self.prices, self.files
        if prices is None or files is None:
            return ()
        self._unpriced = False
        return sampled(read_first(prices, files.read_s(1)))

    def waits_for_files(self, request: Any, local_tokens: int) -> bool:
        """Whether the request goes on in files, and is better admitted when that has come to host memory; see
        :meth:`~kvpolicy_vllm.plugin.file_waits.FileWaits.waits`."""
        waits = self._waits
        if waits is None or self._copies.of(request.request_id) is not None:
            return False
        if why_not_loadable(request, self._scheduler, self._copies, self._now()):
            return False
        local_blocks = local_tokens // self._size
        known = waits.known(request.request_id, local_blocks)
        if known is not None:  # before keys are made, which takes the longer the more blocks there are
            return known
        keys = self._keys(request, local_blocks, (int(request.num_tokens) - 1) // self._size)
        there = self._host.lookup(keys)
        return there < len(keys) and waits.waits(request, local_blocks, local_blocks + there, keys[there:])

    def _is_worth_reading(self, request: Any, first: int, blocks: int, read_s: float) -> bool:
        """Whether a request that has the ``first`` blocks better loads so many after them, which come from files in so
        many seconds, than computes them."""
        return self._is_worth_loading(request, (first * self._size, blocks, 0), read_s)

    def _count_hints(self) -> None:
        cache = self._copies.pool.cache
        if not isinstance(cache, Hinted):
            return
        now = HINT_COUNTS(cache.counts)
        if now != self._hinted:  # false in nearly every step
            self._add_hinted(HOST_TIER, map(sub, now, self._hinted))
            self._hinted = now

    def _add_hinted(self, tier: str, more: Iterable[int]) -> None:
        """Count so many blocks more of a tier, by what became of hints about them."""
        for event, blocks in zip(EVENTS, more, strict=True):
            if blocks:
                self._tally.add("hinted_blocks", blocks, tier=tier, event=event)

    # ---- prices ----

    def _is_worth_loading(
        self, request: Any, asked: tuple[int, int, int], read_s: float = 0.0, save_blocks: int = 0
    ) -> bool:
        """``read_s``: seconds that the request waits first, for files. ``save_blocks``: blocks that have to be saved
        before."""
        local_tokens, blocks, _ = asked
        try:
            situation = prompt_situation(
                self._scheduler, self._copies, local_tokens + blocks * self._size, local_tokens, self._now(), request,
                save_blocks,
            )  # fmt: skip
            return self._decider.loads_hit(situation, read_s)
        # The boundary between a policy and a server: a prompt can always be computed.
        except Exception:  # noqa: BLE001
            self._tally.add("cache_undecided")
            self._complain("deciding whether to load a prompt failed; it is computed (counted as cache_undecided)")
            return False

    def _is_worth_storing(self, blocks: int, saved: bool = False, from_files: bool = False) -> bool:
        """Whether a request would load that many leading blocks, if nothing else were under way. ``saved``: whether
        they have to be saved to host memory before. ``from_files``: whether they have to be read from files."""
        asked = blocks, saved, from_files
        known = self._worth.get(asked)
        if known is None:
            read_s = self.files.read_s(blocks) if from_files and self.files is not None else 0.0
            known = self._worth[asked] = self._is_worth_loading(
                None, (0, blocks, 0), read_s, save_blocks=blocks if saved else 0
            )
        return known and not self._copies.health.suspended(self._now())

    @property
    def _size(self) -> int:
        return int(self._scheduler.block_size)

    def _keys(self, request: Any, first: int, end: int) -> list[bytes]:
        return list(map(self._key_of, request.block_hashes[first:end]))


class BlockPrices:
    """:func:`kvpolicy.cost.block_price.block_price` by the costs that the server's policy predicts now, for the caching
    policy by cost.

    ``failed``: called where predicting them raised, while the exception is handled; all blocks are worth nothing then,
    until prices are renewed.
    """

    def __init__(self, decider: Decider, block_size: int, block_bytes: int, failed: Callable[[], None]) -> None:
        self._decider, self._block_size, self._block_bytes, self._failed = decider, block_size, block_bytes, failed
        self.segment_bytes: Callable[[], int] = lambda: block_bytes
        """Contiguous bytes of a block, as far as is known."""
        self.beside = Beside()
        self._price: Callable[[int], float] | None = None

    def renew(self) -> None:
        """Predict anew when the next block is priced."""
        self._price = None
        self.beside.renew()

    def __call__(self, position: int) -> float:
        if self._price is None:
            try:
                self._price = block_price(
                    self._decider.predict, self._block_size, self._block_bytes, self.segment_bytes(), self.beside.most
                )
            # The boundary between a policy and a server: what is given up is computed when it is asked for again.
            except Exception:  # noqa: BLE001
                self._failed()
                self._price = lambda position: 0.0
        return self._price(position)


def caching_policy(
    spec: str, slots: int, price: caching.Price, allow_python: bool, failed: Callable[[str], None]
) -> CachingPolicy | None:
    """The policy of that name; None where nothing is to be cached. ``failed``: called with the name of a method of it
    that raised, while the exception is handled."""
    policy = caching.load(spec, slots, price, allow_python)
    return None if policy is None else guarded(policy, failed)
