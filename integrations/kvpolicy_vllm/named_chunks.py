"""The chunks that vLLM has named for a request, as the tier of files in its OffloadingConnector needs them.

vLLM names those of a prompt before it looks them up, and what a request generates chunk by chunk, each of which it
stores by itself. All of that is on the scheduler's thread, so what is kept here grows by what is new, and no chunk is
gone over for the ones that follow it.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx

from kvpolicy.caching.base import Part


@dataclass(slots=True)
class Chunks:
    """Those of one KV cache group, in the order of the request's tokens."""

    keys: list[OffloadKey] = field(default_factory=list)
    places: dict[OffloadKey, int] = field(default_factory=dict)
    """Place of each among ``keys``."""
    _ends: list[int] = field(default_factory=list)
    """The token of the request at which each ends."""

    def add(self, key: OffloadKey, end_token: int) -> None:
        """A chunk that is not here yet. vLLM names most after all that are before them, which takes O(log chunks); the
        end of a prompt within a block comes between others."""
        place = bisect(self._ends, end_token)
        self.keys.insert(place, key)
        self._ends.insert(place, end_token)
        for moved in range(place, len(self.keys)):
            self.places[self.keys[moved]] = moved

    def part(self, keys: Sequence[OffloadKey]) -> Part[OffloadKey]:
        """The part of the prompt that has these chunks, which are in its order, and the one before them: a store has
        those of one step alone. The keys themselves where vLLM has not named some. O(part)."""
        if not all(key in self.places for key in keys):
            return Part(keys)
        first = max(0, self.places[keys[0]] - 1)
        return Part(self.keys[first : self.places[keys[-1]] + 1], first)


@dataclass(slots=True)
class Asked:
    """What tiers know of a request, which vLLM keeps for them."""

    tiers: set[int] = field(default_factory=set)
    """Those that were told what it asks for, by their ids."""
    groups: dict[int, Chunks] = field(default_factory=dict)
    """By KV cache group, all chunks that vLLM had named when it was looked last."""
    _named: int = 0
    """Their number."""

    @classmethod
    def of(cls, request: ReqContext) -> Asked:
        """What is known of the request, with all chunks that vLLM has named so far. O(1) where none is new."""
        asked: Asked | None = request.get_state(cls)
        if asked is None:
            request.set_state(asked := cls())
        asked._take_new(getattr(request, "_offload_key_positions", {}))
        return asked

    def _take_new(self, named: dict[OffloadKey, int]) -> None:
        """vLLM removes none and moves none, so the new ones are the last ones."""
        new = [*islice(reversed(named.items()), max(0, len(named) - self._named))]
        self._named = len(named)
        for key, end_token in reversed(new):
            self.groups.setdefault(get_offload_group_idx(key), Chunks()).add(key, end_token)

    def of_group(self, group: int) -> Chunks:
        return self.groups.get(group) or Chunks()

    def place(self, key: OffloadKey) -> int:
        """Place of the chunk among those of its group; 0 where vLLM has not named it."""
        return self.of_group(get_offload_group_idx(key)).places.get(key, 0)


def by_group(keys: Collection[OffloadKey], request: ReqContext) -> dict[int, list[OffloadKey]]:
    """The keys by KV cache group, each in the order of the request's tokens as far as vLLM says it."""
    groups: dict[int, list[OffloadKey]] = {}
    for key in keys:
        groups.setdefault(get_offload_group_idx(key), []).append(key)
    for chain in groups.values():
        chain.sort(key=lambda key: request.get_offload_key_position(key) or 0)
    return groups
