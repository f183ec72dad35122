"""A caching policy whose code fails is replaced by lru, which knows what is there."""

from __future__ import annotations

from collections.abc import Container, Sequence

import pytest

from kvpolicy.caching import Lru
from kvpolicy.caching.base import Chain, Key
from kvpolicy.caching.fallback import Guarded, guarded
from tests.caching.test_by_use import serve


class Wrong(Lru):
    """Gives up what ``gives`` says; raises in the method ``raises``."""

    def __init__(self, raises: str = "", gives: Sequence[Key] | None = None) -> None:
        super().__init__(3)
        self.raises, self.gives = raises, gives

    def asked(self, chain: Chain, hits: int) -> None:
        self._fail("asked")
        super().asked(chain, hits)

    def stored(self, chain: Chain, missing: Sequence[int]) -> None:
        self._fail("stored")
        super().stored(chain, missing)

    def evict(self, count: int, protected: Container[Key]) -> list[Key]:
        self._fail("evict")
        return super().evict(count, protected) if self.gives is None else [*self.gives]

    def hold_began(self, key: Key) -> None:
        self._fail("hold_began")
        super().hold_began(key)

    def hold_ended(self, key: Key) -> None:
        self._fail("hold_ended")
        super().hold_ended(key)

    def lost(self, key: Key) -> None:
        self._fail("lost")
        super().lost(key)

    def _fail(self, method: str) -> None:
        if method == self.raises:
            raise ValueError("made up")


@pytest.mark.parametrize("raises", ["", "asked", "stored", "evict", "lost"])
def test_whatever_raises_what_is_there_stays_known(raises: str) -> None:
    failed: list[str] = []
    policy = Guarded(Wrong(raises), failed.append)
    serve(policy, "abc")
    assert len(policy) == 3 and all(key in policy for key in "abc")
    policy.lost("b")
    assert "b" not in policy and serve(policy, "xy", protected="a") == "c"
    assert {*"axy"} == {key for key in "abcxy" if key in policy}
    assert failed == ([raises] if raises else []), "once, as lru has its place then"


@pytest.mark.parametrize("gives", [["nowhere"], ["a"], ["b", "b"], ["b", "c", "a"]])
def test_what_may_not_be_given_up_is_not(gives: list[str]) -> None:
    """Not there, protected, twice the same, or too many."""
    failed: list[str] = []
    policy = Guarded(Wrong(gives=gives), failed.append)
    serve(policy, "abc")
    gone = policy.evict(2, {"a"})
    assert failed == ["evict"] and sorted(gone) == ["b", "c"] and len(policy) == 1 and "a" in policy


@pytest.mark.parametrize("raises", ["", "hold_began", "hold_ended", "evict"])
def test_what_is_held_is_told_to_the_policy_and_to_the_one_in_its_place(raises: str) -> None:
    failed: list[str] = []
    policy = Guarded(Wrong(raises), failed.append)
    serve(policy, "abc")
    for key in "ab":
        policy.hold_began(key)
    policy.hold_ended("a")
    assert {*policy.evict(3, {"b"})} == {*"ac"} and failed == ([raises] if raises else [])
    assert isinstance(policy.policy, Lru) and policy.policy._held == {"b"}
    policy.hold_ended("b")
    assert policy.evict(1, ()) == ["b"]


@pytest.mark.parametrize(
    ("home", "ships"),
    [
        ("kvpolicy.caching", True),
        ("kvpolicy.caching.by_use", True),
        ("kvpolicy.caching_x", False),
        ("kvpolicy.caching_x.by_use", False),
        ("mine.kvpolicy.caching", False),
    ],
)
def test_all_but_modules_of_the_package_itself_are_guarded(home: str, ships: bool) -> None:
    policy = type("Own", (Lru,), {"__module__": home})(3)
    assert isinstance(guarded(policy, lambda method: None), Guarded) != ships
