"""Somebody's own policy, cost model or family by name: of a module, or registered by an installed package.

``python:MODULE:FACTORY[,KEY=VALUE...]`` imports MODULE and calls FACTORY, a class or a function of it, with the values
as texts. It runs code, so it is taken from Python and from an operator's command line alone: whoever loads names out of
a file, or for a server, has to be told to allow it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from operator import attrgetter
from typing import Any

from kvpolicy.errors import KVPolicyError

Wanted = type[Any]
"""An abstract class, which mypy would not let pass as a ``type[T]``."""

PREFIX = "python:"
FORM = "python:MODULE:FACTORY"
WHOLE_FORM = f"{FORM}[,KEY=VALUE...]"


class ExtensionError(KVPolicyError):
    """A name that leads to nothing usable; the message names the part that is wrong."""


class NotAllowed(ExtensionError):
    """A module path from where none is taken."""


MAX_NAME = 200
"""Characters of the name that something calls itself by."""


def is_module_path(name: str) -> bool:
    return name.startswith(PREFIX)


def names_module(spec: str) -> bool:
    """Whether there is a module path in it, as in ``cheapest:python:MODULE:FACTORY``: to load it runs code."""
    return f":{PREFIX}" in f":{spec}"


def refuse_unnamed(one: object, what: str) -> None:
    """Raises :class:`ExtensionError` where a ``what`` has no ``name`` that can stand in reports, traces and metrics."""
    name = getattr(one, "name", None)
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable() or "|" in name:
        raise ExtensionError(
            f"{what} {type(one).__name__}: its name is {name!r}, should be a text of 1 to {MAX_NAME} printable "
            'characters without a bar, as in name = "mine"'
        )
    if names_module(name):
        raise ExtensionError(f"{what} {type(one).__name__}: its name is {name!r}, should be no module path")


def from_module(name: str, wanted: Wanted, what: str, allowed: bool) -> Any:
    """The ``wanted`` that a module path names. ``what``: policy, cost model or family, for errors.

    Raises :class:`NotAllowed` unless ``allowed``, :class:`ExtensionError` naming the part that is wrong.
    """
    if not allowed:
        raise NotAllowed(
            f"{what} {name!r} names a module to run: it is taken from Python and an operator's command line only, not "
            "from a file, and in a server where its settings allow it"
        )
    path, options = _parted(name, what)
    module_name, _, attribute = path.removeprefix(PREFIX).partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise _wrong(name, what, "should be a module and something in it")
    module = _imported(name, module_name, what)
    try:
        found = attrgetter(attribute)(module)
    except AttributeError as error:
        raise _wrong(name, what, f"module {module_name!r} has no {attribute!r}{_offered(module, wanted)}") from error
    return _made(name, found, options, wanted, what)


def registered(group: str) -> tuple[str, ...]:
    """Names that installed packages have registered."""
    return tuple(sorted(entry_points(group=group).names))


def from_entry_point(name: str, group: str, wanted: Wanted, what: str) -> Any:
    """The ``wanted`` that a package has registered under ``NAME[,KEY=VALUE...]``; None where none has.

    Raises :class:`ExtensionError` where what is registered is none.
    """
    plain = name.partition(",")[0]
    found = entry_points(group=group, name=plain)
    if not plain or not found:
        return None
    _, options = _parted(name, what)
    return _made(name, next(iter(found)).load(), options, wanted, what)


def _parted(name: str, what: str) -> tuple[str, dict[str, str]]:
    path, *parts = name.split(",")
    options: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not key.isidentifier() or key in options:
            raise _wrong(name, what, f"{part!r} should be KEY=VALUE, each key once")
        options[key] = value
    return path, options


def _imported(name: str, module: str, what: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            error.add_note(_while(name, what))
            raise
        raise _wrong(
            name, what, f"there is no module {error.name!r} on Python's path (PYTHONPATH=FOLDER adds a folder)"
        ) from error
    except Exception as error:
        error.add_note(_while(name, what))  # of the module's own code, which is the author's to see whole
        raise


def _made(name: str, found: object, options: dict[str, str], wanted: Wanted, what: str) -> Any:
    if isinstance(found, wanted) and not options:
        return found
    if not callable(found):
        raise _wrong(name, what, f"it is {found!r}, which is no {wanted.__name__} and cannot be called to make one")
    if inspect.isabstract(found):
        lacking = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise _wrong(name, what, f"{_called(found)} lacks what every {wanted.__name__} has: {lacking}")
    _refuse_arguments(name, found, options, what)
    try:
        made = found(**options)
    except KVPolicyError:
        raise
    except Exception as error:
        error.add_note(_while(name, what))
        raise
    if not isinstance(made, wanted):
        raise _wrong(name, what, f"{_called(found)} makes a {type(made).__name__}, should make a {wanted.__name__}")
    return made


def _refuse_arguments(name: str, factory: Callable[..., object], options: dict[str, str], what: str) -> None:
    try:
        signature = inspect.signature(factory)
    except ValueError:  # of some functions that are not written in Python
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        raise _wrong(name, what, f"{_called(factory)} takes {signature}: {error}") from error


def _called(factory: object) -> str:
    return str(getattr(factory, "__name__", factory))


def _offered(module: object, wanted: type) -> str:
    some = [name for name, one in vars(module).items() if isinstance(one, wanted) or _makes(one, wanted)]
    return f" (it has {', '.join(sorted(some))})" if some else ""


def _makes(found: object, wanted: type) -> bool:
    return isinstance(found, type) and issubclass(found, wanted) and not inspect.isabstract(found)


def _while(name: str, what: str) -> str:
    return f"while {what} {name!r} was loaded"


def _wrong(name: str, what: str, why: str) -> ExtensionError:
    form = WHOLE_FORM if is_module_path(name) else "NAME[,KEY=VALUE...]"
    return ExtensionError(f"{what} {name!r}: {why}; the form is {form}")
