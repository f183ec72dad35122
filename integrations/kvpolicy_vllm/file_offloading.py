"""kvpolicy's tier of files below the host memory of vLLM's own OffloadingConnector, from vLLM 0.31 on, by an entry of
that connector's setting ``secondary_tiers``:

    {"type": "kvpolicy-files", "directory": "/nvme/kv", "max_gib": 500}

Where vLLM does not load kvpolicy's plugin, as where ``VLLM_PLUGINS`` names others, it is ``"type": "BoundedFileTier"``
with ``"module_path": "kvpolicy_vllm.file_offloading"``.

Unlike vLLM's tier of files it is bounded, checks what it reads, keeps files private, and tells models apart by their
weights. Needs neither kvpolicy's scheduler nor its connector, beside which vLLM's cannot serve.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvpolicy import fields
from kvpolicy.caching import KINDS
from kvpolicy.caching.base import Part
from kvpolicy.errors import InputError
from kvpolicy.fields import POSITIVE, Rule, option, validate
from kvpolicy.settings import GIB
from kvpolicy.tiers import (
    MAX_HANG_S,
    MAX_QUEUED_BLOCKS,
    FileTier,
    Finished,
    LastingTier,
    file_bytes_of,
    refuse_unsafe,
    require_checksums,
)
from kvpolicy_vllm.named_chunks import Asked, by_group
from kvpolicy_vllm.plugin.file_namespace import computed_by, configuration_of_callers
from kvpolicy_vllm.plugin.file_reads import MAX_WAIT_S, RENEWED_S, FileReads

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

logger = logging.getLogger(f"vllm.{__name__}")

NAP_S = 0.02
"""It is looked so often whether vLLM has seeded its hashes."""
SHARE = 4
"""Of the chunks in host memory, stores hold at most one in so many."""


@dataclass(frozen=True, slots=True)
class TierSettings:
    """The entry of ``secondary_tiers``, beside its ``type``, ``module_path`` and ``backpressure``."""

    directory: Path = option("Where the files are.")
    max_gib: float = option("At most so many GiB of them.", rule=POSITIVE)
    eviction_policy: str = option(
        "Which chunks are given up.", "lru", Rule(f"one of {', '.join(KINDS)}", KINDS.__contains__)
    )
    model_files: Path | None = option("Folder of the weights, where the server was started with another name.", None)
    identity: str | None = option(
        "Changes whenever anything else does that decides KV, as the weights of an adapter.", None
    )
    locality: str | None = option("As of vLLM's own tiers.", None)

    def __post_init__(self) -> None:
        validate(self)


class BoundedFileTier(SecondaryTierManager):
    """:class:`kvpolicy.tiers.FileTier` over the rows of vLLM's host memory, each of them a chunk of all ranks.

    Chunks all have the same price, with the policy ``cost``, too: what one costs to compute is not known here.

    ``settings``: those of :class:`TierSettings`. Raises InputError where one will not do, and OSError where the
    directory cannot be written to.
    """

    medium: ClassVar[Medium] = Medium.STORAGE
    clock = staticmethod(time.monotonic)

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        how = fields.read(TierSettings, settings, "secondary_tiers")
        self.locality = Locality(how.locality) if how.locality else None
        self._rows = np.asarray(primary_kv_view).view(np.uint8)
        self._row_bytes = self._rows.shape[1]
        self._groups = len(offloading_spec.config.groups)
        self._max_held = min(MAX_QUEUED_BLOCKS, max(1, len(self._rows) // SHARE))
        """Chunks that stores hold. vLLM gives up none of a job that has not ended, and saves nothing to host memory
        where all are held, as on a slow disk."""
        self._directory, self._max_bytes, self._policy = how.directory, int(how.max_gib * GIB), how.eviction_policy
        self._namespace = namespace_of(offloading_spec, self._row_bytes, how)
        refuse_small(how.max_gib, self._row_bytes)
        require_checksums()
        refuse_unsafe(self._directory)
        self._opened: LastingTier | None = None
        self._forgets = False
        """Whether vLLM has forgotten its host memory, and the files do not know yet."""
        self._seed = b""
        """Of vLLM's hashes, when the files were opened."""
        self._said_reseeded = False
        self._ends = threading.Event()
        self._opening = threading.Thread(target=self._open_once_seeded, name="kvpolicy-files-open", daemon=True)
        self._salt = b""
        """Goes before every key."""
        self._numbers = count()
        self._job_of: dict[int, int] = {}
        """By number of a store or a load, the job of vLLM that it is a part of."""
        self._open: dict[int, int] = {}
        """By job, its parts that have not ended."""
        self._reads = FileReads(self._row_bytes, self.clock, counted="")
        self._began: dict[int, float] = {}
        """By number, loads that have not ended, in the order in which they began."""
        self._late: set[int] = set()
        """Those that have not for too long."""
        self._failed: dict[int, set[OffloadKey]] = {}
        self._jobs: dict[int, TransferJob] = {}
        self._held = 0
        """Chunks of stores that have not ended."""
        self._ended: list[JobResult] = []
        self._opening.start()

    def _open_once_seeded(self) -> None:
        """Open the files, in the background: vLLM makes its tiers before it seeds its hashes, and the scheduler, whose
        first call comes with the first request, may not wait until all files have been found."""
        while not hasattr(kv_cache_utils, "NONE_HASH"):
            if self._ends.wait(NAP_S):
                return
        warn_unless_reproducible()
        self._seed = bytes(kv_cache_utils.NONE_HASH)
        namespace = {**self._namespace, "hash_seed": self._seed.hex()}
        try:
            opened = FileTier.open(
                self._directory, namespace, self._row_bytes, self._max_bytes, self._policy, self._max_held,
                clock=self.clock,
            )  # fmt: skip
            if self._ends.is_set():  # nobody waits for it any more
                opened.close()
            else:
                self._opened = opened
        except (InputError, OSError) as error:
            logger.error("kvpolicy: serving without files: %s", error)

    @property
    def tier(self) -> LastingTier | None:
        """The files. None as long as they are being opened, and where they could not be: the server goes on without
        them; and where a second engine of this process has seeded its hashes otherwise since, which is logged once."""
        self._forget()
        if self._opened is None or self._seed == kv_cache_utils.NONE_HASH:
            return self._opened
        if not self._said_reseeded:
            self._said_reseeded = True
            logger.error(
                "kvpolicy: serving without files: another engine of this process has seeded vLLM's block hashes anew; "
                "set PYTHONHASHSEED to a fixed number, or leave out --prefix-caching-hash-algo"
            )
        return None

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """A miss, too, where host memory could not hold the prompt up to there beside what stores hold: vLLM brings all
        that is found before it loads any, and would give up the beginning for the end, and the other way round, without
        end. So is everything while loads do not come in time, as on a disk that hangs: a request that is told of a
        chunk waits until its load has ended."""
        tier = self.tier
        if tier is None:
            return LookupResult.MISS
        fits = self._ask(req_context).place(key) < max(1, (len(self._rows) - self._held) // self._groups)
        if not fits or not tier.lookup([self._salt + key]):
            return LookupResult.MISS
        if self._reads.suspended:
            self._try(tier, self._salt + key)
            return LookupResult.MISS
        return LookupResult.HIT

    def _try(self, tier: LastingTier, key: bytes) -> None:
        """Load a chunk for nobody, into memory of its own, to see whether loads come in time again. One load at a time,
        but one that does not end is not waited for for ever."""
        now = self.clock()
        if all(now >= began_s + RENEWED_S for began_s in self._began.values()):
            number = next(self._numbers)
            self._began[number] = now
            tier.load(number, [(key, [np.empty(self._row_bytes, np.uint8)])])

    def has_pending_work(self) -> bool:
        """So that vLLM goes on stepping for a trial, of which it does not know, until that has ended or is late: one
        that is looked at long after it has ended would count as late."""
        return any(number not in self._job_of and number not in self._late for number in self._began)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._ask(req_context)

    def _ask(self, request: ReqContext) -> Asked:
        """Tell the files once what the request asks for: vLLM says nothing of uses but that it looks chunks up."""
        asked = Asked.of(request)
        tier = self.tier
        if tier is not None and id(self) not in asked.tiers:
            for chunks in asked.groups.values():
                asked.tiers.add(id(self))
                tier.asked([self._salt + key for key in chunks.keys])
        return asked

    def submit_store(self, job_metadata: TransferJob) -> None:
        if self.tier is None or not self._may_hold(len(job_metadata.keys)):
            self._ended.append(JobResult(job_metadata.job_id, False))
            return
        asked = self._ask(job_metadata.req_context)
        chunk_of = dict(zip(job_metadata.keys, job_metadata.chunk_ids, strict=True))
        failed = self._begin(job_metadata)
        for group, keys in by_group(job_metadata.keys, job_metadata.req_context).items():
            number, chain = next(self._numbers), asked.of_group(group).part(keys)
            salted = Part((self._salt + key for key in chain), chain.first)
            rows = {index: [self._rows[chunk_of[key]]] for index, key in enumerate(chain) if key in chunk_of}
            there = {index for index in rows if self.tier.lookup([salted[index]])}
            taken = self.tier.store(number, salted, rows)
            failed.update(chain[index] for index in {*rows} - {*taken} - there)
            if taken:
                self._part(number, job_metadata)
        self._settle(job_metadata.job_id)

    def submit_load(self, job_metadata: TransferJob) -> None:
        if self.tier is None:
            self._ended.append(JobResult(job_metadata.job_id, False))
            return
        self._begin(job_metadata)
        number = next(self._numbers)
        self._part(number, job_metadata)
        self._began[number] = self.clock()
        pairs = zip(job_metadata.keys, job_metadata.chunk_ids, strict=True)
        self.tier.load(number, [(self._salt + key, [self._rows[chunk]]) for key, chunk in pairs])

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """vLLM asks once a step, before it looks anything up."""
        self._take_finished()
        self._note_late()
        ended, self._ended = self._ended, []
        return ended

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait for all jobs. vLLM calls this where it forgets its host memory, as after a change of weights: what is in
        files is not found from then on, and is given up first; what is stored after it is not found by another
        process."""
        self._salt, self._forgets = uuid.uuid4().bytes, True
        if self._opened is not None:
            self._opened.wait_idle()
            self._forget()

    def _forget(self) -> None:
        """Have the files give up first what nobody can ask for any more, as soon as they are open."""
        if self._forgets and self._opened is not None:
            self._forgets = False
            self._opened.forget_hints()

    def shutdown(self) -> None:
        """Further calls do nothing."""
        if self._ends.is_set():
            return
        self._ends.set()
        self._opening.join(MAX_HANG_S)
        if self._opening.is_alive():
            logger.warning("kvpolicy: files hang while they are opened; the server ends without them")
        elif self._opened is not None:
            self._opened.close(MAX_HANG_S)
        self._rows = self._rows[:0].copy()  # vLLM cannot unmap its host memory while anybody has a view of it

    def _begin(self, job: TransferJob) -> set[OffloadKey]:
        self._jobs[job.job_id], self._open[job.job_id] = job, 0
        self._held += 0 if job.is_promotion else len(job.keys)
        failed = self._failed[job.job_id] = set()
        return failed

    def _may_hold(self, chunks: int) -> bool:
        """Whether a store of so many chunks may begin: it holds all of them until the last one is written. One of more
        than the share begins where no other is open, for else it never would."""
        self._take_finished()
        return not self._held or self._held + chunks <= self._max_held

    def _part(self, number: int, job: TransferJob) -> None:
        self._job_of[number] = job.job_id
        self._open[job.job_id] += 1

    def _take_finished(self) -> None:
        if self._opened is not None:
            for finished in self._opened.finished():
                self._take(finished)
            self._opened.take_gone()  # which nobody else has an account of

    def _note_late(self) -> None:
        """Of loads that have not ended for too long. What they write to stays theirs until they have."""
        now = self.clock()
        for number, began_s in self._began.items():
            if now < began_s + MAX_WAIT_S:
                break
            if number not in self._late:
                self._late.add(number)
                self._reads.late()

    def _take(self, finished: Finished[int]) -> None:
        began_s = self._began.pop(finished.job, None)
        if began_s is not None:
            self._late.discard(finished.job)
            self._reads.ended(began_s, len(finished.done), finished.took)
        job_id = self._job_of.pop(finished.job, None)
        if job_id is None:  # a trial
            return
        self._failed[job_id].update(OffloadKey(key[len(key) - self._key_bytes(job_id) :]) for key in finished.failed)
        self._open[job_id] -= 1
        self._settle(job_id)

    def _key_bytes(self, job_id: int) -> int:
        """Length of the job's keys, which may have been salted."""
        return len(next(iter(self._jobs[job_id].keys)))

    def _settle(self, job_id: int) -> None:
        """Report the job if no part of it is open."""
        if self._open[job_id]:
            return
        job, failed = self._jobs.pop(job_id), self._failed.pop(job_id)
        del self._open[job_id]
        self._held -= 0 if job.is_promotion else len(job.keys)
        done = tuple(key for key in job.keys if key not in failed)
        self._ended.append(JobResult(job_id, not failed, done if failed and job.is_promotion else None))


def refuse_small(max_gib: float, row_bytes: int) -> None:
    """Raise InputError where the files hold no chunk."""
    needed = file_bytes_of(row_bytes)
    if max_gib * GIB < needed:
        raise InputError(
            f"max_gib {max_gib:g} holds no file of a chunk, of {needed} bytes; give at least "
            f"{-(-needed * 1000 // GIB) / 1000:g}, and what is asked for again takes more"
        )


def namespace_of(spec: OffloadingSpec, row_bytes: int, how: TierSettings) -> dict[str, Any]:
    """What decides the bytes of a chunk beside its key. Raises InputError where the weights are not known, of adapters
    as well, or vLLM's settings."""
    config, whole = spec.config, configuration_of_callers()
    if whole.lora_config is not None and how.identity is None:
        raise InputError(
            "identity: with --enable-lora the key of a chunk has the name of an adapter and its path, and not its "
            "weights; give a text that changes whenever the weights of an adapter do, or leave out --enable-lora"
        )
    model = how.model_files or Path(config.model.name)
    if not model.exists():
        raise InputError(
            f"model_files: the server's model is {config.model.name!r}, which is no path here; give the folder of its "
            "weights, so that files are not taken for those of other weights"
        )
    return computed_by(whole, model) | {
        "identity": how.identity,
        "dtype": str(config.model.dtype),
        "groups": [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "row_bytes": row_bytes,
        "worker_bytes_per_block": config.worker_kv_bytes_per_block,
        "ranks": [
            getattr(config.parallel, name) for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
        ],
        "layout": [config.kv_cache_layout, config.replicated_layout, config.canonical_layout],
    }


def warn_unless_reproducible() -> None:
    """Log where another process hashes the same tokens otherwise, so that it finds none of this one's files."""
    seed = getattr(kv_cache_utils, "_NONE_HASH_SEED", None)
    fixed = getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None)
    if os.getenv("PYTHONHASHSEED") is None and (seed is None or seed != fixed):
        logger.warning(
            "kvpolicy: vLLM's block hashes are seeded at random, so no later server finds the files of this one; set "
            "PYTHONHASHSEED to a fixed number, or leave out --prefix-caching-hash-algo"
        )
