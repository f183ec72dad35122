"""A user's own policy, cost model or family by name: from a module, or registered by an installed package.

``python:MODULE:FACTORY[,KEY=VALUE...]`` imports MODULE and calls FACTORY, a class or a function in it, with the values
as texts. This runs code, so such names are accepted only from Python and from an operator's command line; code that
loads names from a file, or for a server, accepts them only where that is explicitly allowed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from operator import attrgetter
from typing import Any

from kvpolicy.errors import KVPolicyError

Wanted = type[Any]
"""The abstract class that is wanted. Not ``type[T]``, since mypy does not accept abstract classes for that."""

PREFIX = "python:"
FORM = "python:MODULE:FACTORY"
WHOLE_FORM = f"{FORM}[,KEY=VALUE...]"


class ExtensionError(KVPolicyError):
    """A name that cannot be loaded; the message names the part that is wrong."""


class NotAllowed(ExtensionError):
    """A module path from a source that may not give one."""


MAX_NAME = 200
"""Maximum characters of an extension's name."""


def is_module_path(name: str) -> bool:
    return name.startswith(PREFIX)


def names_module(spec: str) -> bool:
    """Whether the spec contains a module path, as in ``cheapest:python:MODULE:FACTORY``, so that loading runs code."""
    return f":{PREFIX}" in f":{spec}"


def refuse_unnamed(extension: object, what: str) -> None:
    """Raise :class:`ExtensionError` unless the extension's ``name`` can be used in reports, traces and metrics."""
    name = getattr(extension, "name", None)
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable() or "|" in name:
        raise ExtensionError(
            f"{what} {type(extension).__name__}: its name is {name!r}, should be a text of 1 to {MAX_NAME} printable "
            'characters without a bar, as in name = "mine"'
        )
    if names_module(name):
        raise ExtensionError(f"{what} {type(extension).__name__}: its name is {name!r}, should be no module path")


def from_module(name: str, wanted: Wanted, what: str, allowed: bool) -> Any:
    """Load the instance of ``wanted`` that a module path names. ``what``: policy, cost model or family, for errors.

    Raises :class:`NotAllowed` unless ``allowed``, :class:`ExtensionError` naming the part that is wrong.
    """
    target, options = _target(name, wanted, what, allowed)
    return _built(name, target, options, wanted, what)


def function_from_module(name: str, what: str, arguments: Sequence[str], allowed: bool) -> Callable[..., Any]:
    """Load the function, or other callable object, that a module path names. A class, or a function that takes nothing,
    is called to make one.

    ``arguments``: names of what it is called with, for errors. Raises as :func:`from_module`.
    """
    target, options = _target(name, None, what, allowed)
    if options or isinstance(target, type) or (callable(target) and _takes(target, ())):
        target = _called(name, target, options, what)
    if not callable(target) or not _takes(target, arguments):
        raise _wrong(name, what, f"{_name_of(target)} should be called with {' and '.join(arguments)}")
    return target


def _takes(function: Callable[..., object], arguments: Sequence[str]) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # some functions that are not written in Python have no signature
        return bool(arguments)
    return True


def _target(name: str, wanted: Wanted | None, what: str, allowed: bool) -> tuple[object, dict[str, str]]:
    """What a module path names, and the options that follow it. ``wanted``: to list what else the module has."""
    if not allowed:
        raise NotAllowed(
            f"{what} {name!r} names a module to run: modules are run only if named in Python or on the command line, "
            "not in a file, and in a server only where its settings allow it"
        )
    path, options = _split(name, what)
    module_name, _, attribute = path.removeprefix(PREFIX).partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise _wrong(name, what, "should be a module and something in it")
    module = _imported(name, module_name, what)
    try:
        return attrgetter(attribute)(module), options
    except AttributeError as error:
        offered = "" if wanted is None else _offered(module, wanted)
        raise _wrong(name, what, f"module {module_name!r} has no {attribute!r}{offered}") from error


def registered(group: str) -> tuple[str, ...]:
    """Names that installed packages have registered in the entry-point group."""
    return tuple(sorted(entry_points(group=group).names))


def from_entry_point(name: str, group: str, wanted: Wanted, what: str) -> Any:
    """Load the instance of ``wanted`` registered under ``NAME[,KEY=VALUE...]``; None where nothing is registered.

    Raises :class:`ExtensionError` where the registered object is no ``wanted`` and makes none.
    """
    plain = name.partition(",")[0]
    entries = entry_points(group=group, name=plain)
    if not plain or not entries:
        return None
    _, options = _split(name, what)
    return _built(name, next(iter(entries)).load(), options, wanted, what)


def _split(name: str, what: str) -> tuple[str, dict[str, str]]:
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
            error.add_note(_loading_note(name, what))
            raise
        raise _wrong(
            name, what, f"there is no module {error.name!r} on Python's path (PYTHONPATH=FOLDER adds a folder)"
        ) from error
    except Exception as error:
        error.add_note(_loading_note(name, what))  # raised by the module's own code: its author needs the traceback
        raise


def _built(name: str, target: object, options: dict[str, str], wanted: Wanted, what: str) -> Any:
    if isinstance(target, wanted) and not options:
        return target
    if not callable(target):
        raise _wrong(name, what, f"it is {target!r}, which is no {wanted.__name__} and cannot be called to make one")
    if inspect.isabstract(target):
        missing = ", ".join(sorted(getattr(target, "__abstractmethods__", ())))
        raise _wrong(name, what, f"{_name_of(target)} lacks what every {wanted.__name__} has: {missing}")
    instance = _called(name, target, options, what)
    if not isinstance(instance, wanted):
        raise _wrong(
            name, what, f"{_name_of(target)} makes a {type(instance).__name__}, should make a {wanted.__name__}"
        )
    return instance


def _called(name: str, factory: object, options: dict[str, str], what: str) -> Any:
    if not callable(factory):
        raise _wrong(name, what, f"it is {factory!r}, which cannot be called")
    _refuse_arguments(name, factory, options, what)
    try:
        return factory(**options)
    except KVPolicyError:
        raise
    except Exception as error:
        error.add_note(_loading_note(name, what))
        raise


def _refuse_arguments(name: str, factory: Callable[..., object], options: dict[str, str], what: str) -> None:
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some functions that are not written in Python have no signature
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        raise _wrong(name, what, f"{_name_of(factory)} takes {signature}: {error}") from error


def _name_of(factory: object) -> str:
    return str(getattr(factory, "__name__", factory))


def _offered(module: object, wanted: type) -> str:
    names = [name for name, member in vars(module).items() if isinstance(member, wanted) or _makes(member, wanted)]
    return f" (it has {', '.join(sorted(names))})" if names else ""


def _makes(candidate: object, wanted: type) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, wanted) and not inspect.isabstract(candidate)


def _loading_note(name: str, what: str) -> str:
    return f"while {what} {name!r} was loaded"


def _wrong(name: str, what: str, reason: str) -> ExtensionError:
    form = WHOLE_FORM if is_module_path(name) else "NAME[,KEY=VALUE...]"
    return ExtensionError(f"{what} {name!r}: {reason}; the form is {form}")
