"""Errors that are raised in the code of a user's own policy or cost model, as one line; used wherever a policy is
called."""

from __future__ import annotations

from traceback import walk_tb
from types import CodeType
from typing import NoReturn

from kvpolicy.code_digest import is_from_library
from kvpolicy.errors import KVPolicyError
from kvpolicy.policy.base import Policy, PolicyError


def raise_failure(policy: Policy, method: str, error: Exception) -> NoReturn:
    """Raise what a call of ``policy``'s ``method`` ended in: for an error of the user's code a PolicyError that names
    the policy, the method, the error and the line, whose cause is the error itself.

    ``method``: the one that was called. If a method of the user's that it calls failed, that one is named. An error of
    this package's code passes as it is, and so does one that says by itself what is wrong. A function and no context,
    so that a live decision that fails in nothing does not enter this file.
    """
    if isinstance(error, KVPolicyError):
        raise error
    homes = _homes(policy)
    frames = walk_tb(error.__traceback__)
    own = [(frame.f_code, line) for frame, line in frames if _home(frame.f_globals["__name__"]) in homes]
    if own:
        # Text alone: the error itself may not be picklable, and a worker process hands errors on as pickles.
        raise PolicyError(_sentence(policy, own[0][0].co_name, error) + _place(*own[-1])) from error
    if homes and isinstance(error, TypeError):  # the call does not fit the method's arguments
        raise PolicyError(_sentence(policy, method, error)) from error
    raise error


def _sentence(policy: Policy, method: str, error: Exception) -> str:
    return f"policy {policy.name}: {method} failed with {type(error).__name__}: {error}"


def _place(code: CodeType, line: int) -> str:
    return f" ({code.co_filename}, line {line})"


def _homes(policy: Policy) -> set[str]:
    """Top-level modules of the classes of the policy and of its cost model, other than this package's."""
    kinds = (*type(policy).__mro__, *type(policy.cost_model).__mro__)
    return {_home(kind.__module__) for kind in kinds if not is_from_library(kind)} - {"abc", "builtins", "typing"}


def _home(module: str) -> str:
    return module.partition(".")[0]
