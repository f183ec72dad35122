"""Errors that are raised in the code of a user's own policy, cost model or order, as one line; used wherever a policy
is called, and by the simulators, which call orders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from inspect import isfunction
from traceback import walk_tb
from types import FrameType
from typing import Any, NoReturn

from kvpolicy.code_digest import is_from_library
from kvpolicy.errors import KVPolicyError
from kvpolicy.order import Order, OrderError
from kvpolicy.policy.base import Policy, PolicyError

Frames = list[tuple[FrameType, int]]
"""Functions that an error came through, outermost first, each with its line."""


def raise_failure(policy: Policy, method: str, error: Exception) -> NoReturn:
    """Raise what a call of ``policy``'s ``method`` ended in: for an error of the user's code a PolicyError that names
    the policy, the method, the error and the line, whose cause is the error itself.

    ``method``: the one that was called. If a method of the user's that it calls failed, that one is named. An error of
    this package's code passes as it is, and so does one that says by itself what is wrong. A function and no context,
    so that a live decision that fails in nothing does not enter this file.
    """
    homes = _homes((policy, policy.cost_model))
    own = _own_frames(error, homes)
    if own:
        method = own[0][0].f_code.co_name
    elif not (homes and isinstance(error, TypeError)):  # which a call raises that does not fit the method's arguments
        raise error
    # Text alone: the error itself may not be picklable, and a worker process hands errors on as pickles.
    raise PolicyError(f"policy {policy.name}: {_sentence(method, error, own)}") from error


def raise_order_failure(order: Order, error: Exception) -> NoReturn:
    """Raise what a simulation under ``order`` ended in: where the order's code failed, an OrderError as
    :func:`raise_failure` raises of a policy; any other error as it is.

    The order's method is the one that this package called. So that it is found, errors of a whole simulation are passed
    here: no call of an order pays for it.
    """
    parts = tuple(_parts(order))
    own = _own_frames(error, _homes(parts))
    method = _asked(error, own) if own else _unfit(parts, error)
    if not method:
        raise error
    raise OrderError(f"order {order.label}: {_sentence(method, error, own)}") from error


def _sentence(method: str, error: Exception, own: Frames) -> str:
    place = f" ({own[-1][0].f_code.co_filename}, line {own[-1][1]})" if own else ""
    return f"{method} failed with {type(error).__name__}: {error}{place}"


def _own_frames(error: Exception, homes: set[str]) -> Frames:
    """Those of the user's code; none of an error that says by itself what is wrong."""
    if isinstance(error, KVPolicyError):
        return []
    return [(frame, line) for frame, line in walk_tb(error.__traceback__) if _home_of(frame) in homes]


def _homes(parts: Iterable[Any]) -> set[str]:
    """Top-level modules of the classes of these objects, and of functions among them, other than this package's."""
    kinds: list[Any] = [kind for part in parts for kind in ((part,) if isfunction(part) else type(part).__mro__)]
    return {_home(kind.__module__) for kind in kinds if not is_from_library(kind)} - {"abc", "builtins", "typing"}


def _home(module: str) -> str:
    return module.partition(".")[0]


def _home_of(frame: FrameType) -> str:
    return _home(frame.f_globals.get("__name__", ""))


# ---- orders ----


def _parts(order: Order) -> Iterator[Any]:
    """The order, those that it is made of, and functions that they call, as a predictor of lengths."""
    yield order
    for value in getattr(order, "__dict__", {}).values():
        if isinstance(value, Order):
            yield from _parts(value)
        elif callable(value):
            yield value


def _asked(error: Exception, own: Frames) -> str:
    """The last public method of an order that was called before the user's code, or is its first function; empty where
    none was: the code is then no order's, as a workload's in the same file."""
    method = ""
    for frame, _ in walk_tb(error.__traceback__):
        code = frame.f_code
        is_public = code.co_argcount > 0 and code.co_name[0] not in "_<"
        if is_public and isinstance(frame.f_locals.get(code.co_varnames[0]), Order):
            method = code.co_name
        if frame is own[0][0]:
            break
    return method


def _unfit(parts: Iterable[Any], error: Exception) -> str:
    """The method of the user's whose arguments a call does not fit; empty where the error is another one."""
    if not isinstance(error, TypeError):
        return ""
    kinds = (kind for part in parts for kind in type(part).__mro__ if not is_from_library(kind))
    methods = (one for kind in kinds for one in vars(kind).values() if isfunction(one))
    return next((one.__name__ for one in methods if str(error).startswith(f"{one.__qualname__}()")), "")
