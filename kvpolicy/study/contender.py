"""A policy of a study: what it is called in cells, results and reports, and how a process comes by it."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass

from kvpolicy.code_digest import labelled
from kvpolicy.errors import InputError
from kvpolicy.extensions import ExtensionError, is_module_path, names_module
from kvpolicy.policy import Policy, load_policy

ELSEWHERE = (
    "define its class in a module that worker processes can import, name it python:MODULE:FACTORY, or run in this "
    "process (jobs 0)"
)


@dataclass(frozen=True, slots=True)
class Contender:
    """By name, by module path, or an object."""

    label: str
    """The name; of a module path or an object the policy's own, with the digest's beginning."""
    module: str = ""
    """The module path, where there is one."""
    digest: str = ""
    """Of an object, its values and its code."""
    given: Policy | None = None
    """An object."""


def contender_of(policy: str | Policy) -> Contender:
    """A module path is loaded, to see what it leads to; where it leads nowhere its cells will say so."""
    if isinstance(policy, Policy):
        load_policy(policy)
        return Contender(labelled(policy), digest=policy.digest, given=policy)
    if not names_module(policy):
        return Contender(policy)
    try:
        loaded = load_policy(policy)
    except ExtensionError:
        return Contender(policy, module=policy)
    return Contender(labelled(loaded) if is_module_path(policy) else loaded.label, module=policy)


def contenders(policies: Sequence[str | Policy]) -> list[Contender]:
    """Each once, in their order."""
    found: dict[str, Contender] = {}
    for one in map(contender_of, policies):
        found.setdefault(one.label, one)
    return list(found.values())


def packed(policy: Policy) -> bytes:
    """An object for another process. Raises InputError where it cannot travel."""
    try:
        return pickle.dumps(policy)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(f"policy {policy.name}: cannot be sent to worker processes ({error}); {ELSEWHERE}") from error


def unpacked(packed: bytes, label: str) -> Policy:
    """The object again. Raises InputError where this process does not find its class."""
    try:
        policy: Policy = pickle.loads(packed)
    except (pickle.UnpicklingError, AttributeError, ImportError) as error:
        raise InputError(f"policy {label}: a worker process cannot make it again ({error}); {ELSEWHERE}") from error
    return policy
