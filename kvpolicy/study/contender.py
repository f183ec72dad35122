"""A policy of a study: its label in cells, results and reports, and how a process loads it."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpolicy.code_digest import digest_label
from kvpolicy.errors import InputError
from kvpolicy.extensions import ExtensionError, is_module_path, names_module
from kvpolicy.fields import refuse_other
from kvpolicy.order import Order
from kvpolicy.policy import Policy, load_policy

ELSEWHERE = (
    "define its class in a module that worker processes can import, name it python:MODULE:FACTORY, or run in this "
    "process (jobs 0)"
)


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy by name, by module path, or as an object."""

    label: str
    """The name; for a module path or an object the policy's own name and the beginning of its digest."""
    module: str = ""
    """The module path; empty without one."""
    digest: str = ""
    """Digest of an object's values and code."""
    policy_object: Policy | None = None
    """The policy, where it is an object."""


def contender_of(policy: str | Policy, argument: str = "policy") -> Contender:
    """The contender for a policy. A module path is loaded for its label; its cells report where that fails.

    ``argument``: name of the caller's argument, for errors. Raises WrongValue for anything but a text and a policy.
    """
    refuse_other(argument, policy, (str, Policy), "a name or a Policy")
    if isinstance(policy, Policy):
        load_policy(policy)
        return Contender(digest_label(policy), digest=policy.digest, policy_object=policy)
    if not names_module(policy):
        return Contender(policy)
    try:
        loaded = load_policy(policy)
    except ExtensionError:
        return Contender(policy, module=policy)
    return Contender(digest_label(loaded) if is_module_path(policy) else loaded.label, module=policy)


def contenders(policies: Sequence[str | Policy]) -> list[Contender]:
    """The contenders in their order, each once. Raises WrongValue, naming the place, as :func:`contender_of` does."""
    by_label: dict[str, Contender] = {}
    for number, policy in enumerate(policies):
        contender = contender_of(policy, f"policies[{number}]")
        by_label.setdefault(contender.label, contender)
    return list(by_label.values())


def packed(kind: str, extension: Policy | Order) -> bytes:
    """A policy or an order pickled for another process. ``kind``: which of them, for errors. Raises InputError where
    that is impossible."""
    try:
        return pickle.dumps(extension)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            f"{kind} {extension.name}: cannot be sent to worker processes ({error}); {ELSEWHERE}"
        ) from error


def unpacked(kind: str, packed: bytes, label: str) -> Any:
    """The unpickled object. Raises InputError where this process does not find its class."""
    try:
        return pickle.loads(packed)
    except (pickle.UnpicklingError, AttributeError, ImportError) as error:
        raise InputError(f"{kind} {label}: a worker process cannot rebuild it ({error}); {ELSEWHERE}") from error
