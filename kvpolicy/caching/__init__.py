"""Which blocks of KV a tier of bounded size keeps."""

from collections.abc import Mapping

from kvpolicy.caching.adaptive import Arc, S3Fifo
from kvpolicy.caching.base import CachingPolicy, Part
from kvpolicy.caching.by_cost import ByCost
from kvpolicy.caching.by_hints import Hinted
from kvpolicy.caching.by_use import Lfu, Lru
from kvpolicy.caching.fallback import Guarded
from kvpolicy.caching.foreseen import Foreseen
from kvpolicy.caching.prompt_replay import Replayed, chains_of, hindsight, replay
from kvpolicy.caching.tree import Node, Tree

KINDS: Mapping[str, type[CachingPolicy]] = {kind.name: kind for kind in (Lru, Lfu, Arc, S3Fifo, ByCost)}

__all__ = [
    "KINDS",
    "Arc",
    "ByCost",
    "CachingPolicy",
    "Foreseen",
    "Guarded",
    "Hinted",
    "Lfu",
    "Lru",
    "Node",
    "Part",
    "Replayed",
    "S3Fifo",
    "Tree",
    "chains_of",
    "hindsight",
    "replay",
]
