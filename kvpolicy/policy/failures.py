"""Errors that are raised in the code of a user's own policy or cost model, as one line; used wherever a policy is
called."""

from __future__ import annotations

from traceback import walk_tb
from types import CodeType, TracebackType

from kvpolicy.code_digest import is_from_library
from kvpolicy.errors import KVPolicyError
from kvpolicy.policy.base import Policy, PolicyError


class FailureOf:
    """Context in which a policy's method is called. An error of the user's code becomes a PolicyError that names the
    policy, the method, the error and the line; the error itself is its cause.

    An error of this package's code passes as it is, and so does one that says by itself what is wrong.
    """

    __slots__ = "_method", "_policy"

    def __init__(self, policy: Policy, method: str) -> None:
        """``method``: the one that is called. If a method of the user's that it calls fails, that one is named."""
        self._policy, self._method = policy, method

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, KVPolicyError):
            return
        homes = _homes(self._policy)
        own = [(frame.f_code, line) for frame, line in walk_tb(trace) if _home(frame.f_globals["__name__"]) in homes]
        if own:
            # Text alone: the error itself may not be picklable, and a worker process hands errors on as pickles.
            raise PolicyError(self._sentence(own[0][0].co_name, error) + _place(*own[-1])) from error
        if homes and isinstance(error, TypeError):  # the call does not fit the method's arguments
            raise PolicyError(self._sentence(self._method, error)) from error

    def _sentence(self, method: str, error: Exception) -> str:
        return f"policy {self._policy.name}: {method} failed with {type(error).__name__}: {error}"


def _place(code: CodeType, line: int) -> str:
    return f" ({code.co_filename}, line {line})"


def _homes(policy: Policy) -> set[str]:
    """Top-level modules of the classes of the policy and of its cost model, other than this package's."""
    kinds = (*type(policy).__mro__, *type(policy.cost_model).__mro__)
    return {_home(kind.__module__) for kind in kinds if not is_from_library(kind)} - {"abc", "builtins", "typing"}


def _home(module: str) -> str:
    return module.partition(".")[0]
