"""A caching policy whose code may fail: what it gets wrong costs hits, and nothing else. Guards policies of
one's own, in host memory and in files."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

from kvpolicy.caching.base import CachingPolicy, Chain, Key
from kvpolicy.caching.by_use import Lru
from kvpolicy.errors import KVPolicyError

SHIPPED = "kvpolicy.caching"
"""The package of the policies that ship."""


class WrongChoice(KVPolicyError):
    """Blocks that a caching policy may not give up."""


class Guarded(CachingPolicy):
    """A policy, until a method of it raises or it evicts what it may not; from then on ``lru``.

    ``failed``: called with the method's name, while an exception is handled.
    """

    def __init__(self, policy: CachingPolicy, failed: Callable[[str], None]) -> None:
        super().__init__(policy.capacity)
        self.name = policy.name
        self.policy = policy
        self._failed = failed
        self._there: dict[Key, None] = {}
        self._held: set[Key] = set()

    def __contains__(self, key: Key) -> bool:
        return key in self._there

    def __len__(self) -> int:
        return len(self._there)

    def asked(self, chain: Chain, hits: int) -> None:
        self._call("asked", chain, hits)

    def extended(self, chain: Chain, asked: int) -> None:
        self._call("extended", chain, asked)

    def stored(self, chain: Chain, missing: Sequence[int]) -> None:
        for position in missing:
            self._there[chain[position]] = None
        self._call("stored", chain, missing)

    def evict(self, count: int, protected: Container[Key]) -> list[Key]:
        return self._gone(self._call("evict", count, protected), count, protected)

    def make_room(self, count: int, protected: Container[Key], newcomers: Sequence[Key]) -> list[Key]:
        return self._gone(self._call("make_room", count, protected, newcomers), count, protected)

    def _gone(self, keys: Any, count: int, protected: Container[Key]) -> list[Key]:
        """What was evicted, by ``lru`` where the policy failed."""
        if keys is None:
            keys = self.policy.evict(count, protected)
        for key in keys:
            del self._there[key]
        return list(keys)

    def hold_began(self, key: Key) -> None:
        self._held.add(key)
        self._call("hold_began", key)

    def hold_ended(self, key: Key) -> None:
        self._held.discard(key)
        self._call("hold_ended", key)

    def lost(self, key: Key) -> None:
        if self._there.pop(key, self) is None:
            self._call("lost", key)

    def _call(self, method: str, *arguments: Any) -> Any:
        """What the policy's method returns; None where it failed."""
        try:
            answer = getattr(self.policy, method)(*arguments)
            if method in ("evict", "make_room"):
                self._check(method, answer, *arguments[:2])
        # The boundary between a policy and a server: another policy can take its place at any time.
        except Exception:  # noqa: BLE001
            self._failed(method)
            self.policy = Lru(self.capacity)
            for key in self._held:
                self.policy.hold_began(key)
            for key in self._there:
                self.policy.stored([key], [0])
            return None
        return answer

    def _check(self, method: str, keys: Any, count: int, protected: Container[Key]) -> None:
        """Raise WrongChoice for blocks that are not there, twice the same, protected, or too many."""
        if len(keys) > count or len(set(keys)) < len(keys):
            raise WrongChoice(f"{method}() of caching policy {self.name} gave {keys!r} for {count} different blocks")
        for key in keys:
            if key not in self._there or key in protected:
                raise WrongChoice(f"{method}() of caching policy {self.name} gave {key!r}, which it may not give up")


def guarded(policy: CachingPolicy, failed: Callable[[str], None]) -> CachingPolicy:
    """The policy, as :class:`Guarded` where it does not ship."""
    home = type(policy).__module__
    ships = home == SHIPPED or home.startswith(f"{SHIPPED}.")
    return policy if ships else Guarded(policy, failed)
