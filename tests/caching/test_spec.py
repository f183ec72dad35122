"""Caching policies by name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.caching import KINDS, ByCost
from kvpolicy.caching.spec import FORMS, OFF, load, load_for_files
from kvpolicy.extensions import ExtensionError, NotAllowed
from kvpolicy.fields import WrongValue
from kvpolicy.settings import NO_FILES, ServerSettings
from tests.caching import own_policy


def test_every_name_loads_its_policy() -> None:
    assert load(OFF, 4) is None
    assert {*KINDS, OFF, "python:MODULE:FACTORY"} == {*FORMS}
    for name, kind in KINDS.items():
        policy = load(name, 4)
        assert type(policy) is kind and policy.capacity == 4


def test_the_policy_by_cost_goes_by_the_price_that_is_given() -> None:
    policy = load("cost", 4, price=lambda position: 1.0 + position)
    assert isinstance(policy, ByCost) and policy._price(3) == 4.0


def test_ones_own_policy_has_its_capacity_set() -> None:
    policy = load("python:tests.careless:Careless", 7, allow_python=True)
    assert policy is not None and (policy.name, policy.capacity) == ("careless", 7)
    with pytest.raises(NotAllowed):
        load("python:tests.careless:Careless", 7)
    with pytest.raises(ExtensionError, match="Device takes"):
        load("python:tests.host_store.test_slots:Device", 7, allow_python=True)


def test_a_policy_of_ones_own_is_the_documented_one() -> None:
    code = Path(own_policy.__file__).read_text()
    guide = Path(__file__).parents[2] / "docs" / "caching.md"
    assert code in re.findall(r"```python\n(.*?)```", guide.read_text(), flags=re.DOTALL)
    policy = load("python:tests.caching.own_policy:FirstStored", 2, allow_python=True)
    assert policy is not None
    for key in "ab":
        policy.asked([key], 0)
        policy.stored([key], [0])
    policy.asked(["a"], 1)
    assert policy.evict(1, ()) == ["a"], "lru would give up b, which was used before"


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(WrongValue, match="'mru' is no caching policy; they are off, lru, lfu"):
        load("mru", 4)
    with pytest.raises(WrongValue, match="cache"):
        ServerSettings("always-swap", cache="mru")
    with pytest.raises(WrongValue, match="allow-python-policies"):
        ServerSettings("always-swap", cache="python:tests.careless:Careless")


def test_files_are_never_without_a_policy_and_name_the_flag_that_is_wrong() -> None:
    for name, kind in KINDS.items():
        policy = load_for_files(name, 4)
        assert type(policy) is kind and policy.capacity == 4
    own = "python:tests.caching.own_policy:FirstStored"
    for wrong, message in {
        "off": "cache_files_policy is 'off', should be one of lru, lfu, arc, s3fifo, cost, python:MODULE:FACTORY",
        "mru": "cache_files_policy is 'mru', should be one of lru",
        own: r"cache_files_policy is 'python:.*FirstStored', .* only with --allow-python-policies",
    }.items():
        with pytest.raises(WrongValue, match=message):
            ServerSettings("always-swap", cache_files_policy=wrong)
    for wrong in ("python:no.such:Policy", "python:tests.host_store.test_slots:Device"):
        with pytest.raises(WrongValue, match=f"cache_files_policy cannot be used: caching policy '{wrong}'"):
            ServerSettings("always-swap", cache_files_policy=wrong, allow_python_policies=True)
    files: dict[str, Any] = {"cache": "lru", "cache_files": Path("kv"), "cache_files_policy": own}
    assert ServerSettings("always-swap", allow_python_policies=True, **files).cache_files_policy == own


@pytest.mark.parametrize("given", [{"cache_files_gib": 500.0}, {"cache_files_policy": "cost"}])
def test_what_files_take_and_give_up_is_refused_where_there_are_none(given: dict[str, Any]) -> None:
    """Whoever gives it thinks that prompts are in files."""
    with pytest.raises(WrongValue, match=f"{next(iter(given))} is given without --cache-files: give that, too"):
        ServerSettings("always-swap", cache="cost", **given)
    files = ServerSettings("always-swap", cache="cost", cache_files=Path("kv"), **given)
    assert replace(files, **NO_FILES) == ServerSettings("always-swap", cache="cost")
