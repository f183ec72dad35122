"""kvpolicy's caching policy for vLLM's own OffloadingConnector, from vLLM 0.31 on, by one of that connector's settings,
or by two where vLLM does not load kvpolicy's plugin, as where ``VLLM_PLUGINS`` names others:

    "eviction_policy": "kvpolicy-cost"
    "eviction_policy": "CostCachePolicy", "cache_policy_module_path": "kvpolicy_vllm.offloading"

It takes the place of vLLM's ``lru`` and ``arc``: which chunks of host memory are given up, and nothing else. Needs
neither kvpolicy's scheduler nor its connector, beside which vLLM's cannot serve.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from kvpolicy.caching import ByCost


class CostCachePolicy(CachePolicy):
    """:class:`kvpolicy.caching.ByCost` over vLLM's chunks.

    vLLM says in what order a request's chunks follow each other once the request has finished. Chunks that a request
    stored wait till then, and are given up only where all others are in use, the one stored last first. All chunks have
    the same price: what one costs to compute is not known here.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._begin()

    def _begin(self) -> None:
        self._policy = ByCost(self.cache_capacity)
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._idle: set[OffloadKey] = set()
        """Chunks that no transfer uses."""
        self._new: dict[OffloadKey, None] = {}
        """Chunks whose request has not finished, in the order of their stores."""

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self._chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        self._chunks[key] = chunk
        self._new[key] = None
        if chunk.ref_cnt == 0:
            self._idle.add(key)

    def remove(self, key: OffloadKey) -> None:
        del self._chunks[key]
        self._idle.discard(key)
        if key in self._new:
            del self._new[key]
        else:
            self._policy.lost(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Nothing: a use counts once, when the request has finished."""

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Nothing, as with :meth:`touch`."""

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        for chain in key_groups:
            self._policy.asked(chain, self._policy.hits(chain))
            stored = [position for position, key in enumerate(chain) if key in self._new]
            self._policy.stored(chain, stored)
            for position in stored:
                del self._new[chain[position]]

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        if n > len(self._idle) - sum(key in self._idle for key in protected):
            return None
        unavailable = _Unavailable(protected, self._idle)
        keys = self._policy.evict(n, unavailable)
        gone = set(keys)
        # Chunks before one that a transfer uses, and new ones.
        for others in (reversed(self._new), iter(self._chunks)):
            more = (key for key in others if key not in unavailable and key not in gone)
            for key in [*islice(more, n - len(keys))]:
                if self._new.pop(key, self) is self:
                    self._policy.lost(key)
                keys.append(key)
                gone.add(key)
        self._idle.difference_update(keys)
        return [(key, self._chunks.pop(key)) for key in keys]

    def clear(self) -> None:
        self._begin()

    def mark_evictable(self, key: OffloadKey) -> None:
        self._idle.add(key)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        self._idle.discard(key)


class _Unavailable:
    """Chunks that may not be given up: those that are protected, and those that a transfer uses."""

    def __init__(self, protected: set[OffloadKey], idle: set[OffloadKey]) -> None:
        self._protected, self._idle = protected, idle

    def __contains__(self, key: object) -> bool:
        return key in self._protected or key not in self._idle
