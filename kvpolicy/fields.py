"""Fields of configuration dataclasses: help, flag and rule are declared once, with the field.

They hold for Python, YAML and the command line alike. A class declares its fields with :func:`option` and calls
:func:`validate` in its ``__post_init__``; :func:`read` makes an instance from a file's content, and
:mod:`kvpolicy.cli.flags` makes the flags.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from math import inf
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from kvpolicy.errors import InputError

Config = TypeVar("Config")


class WrongValue(InputError):
    """A field with a wrong value. The command line names the flag instead of the field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)
        self.field, self.message = field, message

    def __str__(self) -> str:
        return f"{self.field} {self.message}"


def like(name: str, forms: Iterable[str]) -> str:
    """A question for an error: the form whose name was probably meant; empty where none is like it."""
    written = {re.split("[:,/]", form)[0]: form for form in reversed([*forms])}
    found = difflib.get_close_matches(re.split("[:,/]", name)[0], written, 1)
    return f" (did you mean {written[found[0]]}?)" if found else ""


def refuse_single(**sequences: Any) -> None:
    """Raise WrongValue for an argument that should be a list but is a single value. A single text would be read letter
    by letter."""
    for name, value in sequences.items():
        if isinstance(value, str) or not isinstance(value, Sequence):
            single = isinstance(value, str) or not (value is None or isinstance(value, Iterable))
            raise WrongValue(name, f"is {value!r}, should be a list" + (f", as [{value!r}]" if single else ""))


def refuse_class(name: str, value: Any) -> None:
    """Raise WrongValue, with how to give its instance, for an argument that is a class."""
    if isinstance(value, type):
        raise WrongValue(name, f"is {value.__name__}, a class: give {value.__name__}()")


def refuse_other(name: str, value: Any, wanted: type[Any] | tuple[type[Any], ...], should: str) -> None:
    """Raise WrongValue for an argument that is no ``wanted``; a class in place of its instance is shown how to give it.

    ``should``: what it should be, in words.
    """
    refuse_class(name, value)
    if not isinstance(value, wanted):
        raise WrongValue(name, f"is {reprlib.repr(value)} ({type(value).__name__}), should be {should}")


def refuse_no_path(name: str, value: Any) -> None:
    """Raise WrongValue for an argument that is no path."""
    refuse_other(name, value, (str, Path), "a path")


def refuse_no_paths(name: str, values: Any) -> None:
    """Raise WrongValue for an argument that is no list of paths, naming the element."""
    refuse_single(**{name: values})
    for number, value in enumerate(values):
        refuse_no_path(f"{name}[{number}]", value)


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value must satisfy besides having the right type."""

    should: str
    """The condition in words, to follow "should be"."""
    holds: Callable[[Any], bool]

    def refuse(self, name: str, value: Any) -> None:
        """Raise :class:`WrongValue` for a value that breaks the rule."""
        if not self.holds(value):
            shown = ", ".join(map(_shown, value)) if isinstance(value, tuple) and value else _shown(value)
            raise WrongValue(name, f"is {shown}, should be {self.should}")


MAX_WHOLE = 2**53
"""Largest whole number allowed: larger ones are not exact as floats, and no setting needs them."""
COUNT = Rule("1 or more", lambda value: value >= 1)
AMOUNT = Rule("0 or above", lambda value: 0 <= value < inf)
SHARE_OF_BLOCKS = Rule("a share of the blocks, from 0, below 1", lambda value: 0 <= value < 1)
POSITIVE = Rule("a number above 0", lambda value: 0 < value < inf)


def refuse_non_integer(name: str, value: Any, rule: Rule | None = None) -> None:
    """Raise WrongValue for an argument that is no whole number, or breaks ``rule``."""
    _typed(name, value, int)
    if rule is not None:
        rule.refuse(name, value)


def one_of(*names: str) -> Rule:
    return Rule(f"one of {', '.join(names)}" if len(names) > 2 else " or ".join(names), names.__contains__)


def option(
    help: str,
    default: Any = MISSING,
    rule: Rule | None = None,
    flag: str = "",
    metavar: str | None = None,
    aliases: tuple[str, ...] = (),
) -> Any:
    """Declare a field with help.

    The flag of a field that defaults to True is ``--no-...``; its help says what that flag does. ``flag``: overrides
    the flag derived from the field's name. ``aliases``: further spellings of the flag. ``metavar``: placeholder for the
    value in the help.
    """
    metadata = {"help": help, "rule": rule, "flag": flag, "metavar": metavar, "aliases": aliases}
    return dataclasses.field(default=default, metadata=metadata)


def options_of(config: Any) -> list[dataclasses.Field[Any]]:
    """The fields of a class or an instance that :func:`option` declared."""
    return [field for field in dataclasses.fields(config) if "help" in field.metadata]


def is_optional(hint: Any) -> bool:
    """Whether a field may be None."""
    return NoneType in get_args(hint)


def kind_of(hint: Any) -> Any:
    """The type of a field, without None where it is optional; a text where it may be an object in its place."""
    if isinstance(hint, UnionType) and str in get_args(hint):
        return str
    return (
        next(alternative for alternative in get_args(hint) if alternative is not NoneType)
        if is_optional(hint)
        else hint
    )


def validate(config: Any) -> None:
    """Check an instance against its fields' types and rules; parse text where the type has a ``parse``.

    Raises :class:`WrongValue` for the first field that is wrong.
    """
    hints = get_type_hints(type(config))
    for field in options_of(config):
        raw, hint = getattr(config, field.name), hints[field.name]
        if raw is None and is_optional(hint):
            continue
        value = _typed(field.name, raw, kind_of(hint))
        if field.metadata["rule"] is not None:
            field.metadata["rule"].refuse(field.name, value)
        object.__setattr__(config, field.name, value)


def read(cls: type[Config], values: Mapping[str, Any], where: str) -> Config:
    """Make an instance from a file's content; None counts as absent.

    Raises InputError naming ``where``, the key and what would be right.
    """
    known = {field.name: field.default for field in options_of(cls)}
    present = {name: value for name, value in values.items() if value is not None}
    problems = [f"unknown key {name!r}" for name in sorted(set(values) - set(known))]
    problems += [
        f"key {name!r} is missing" for name, default in known.items() if default is MISSING and name not in present
    ]
    if problems:
        raise InputError(f"{where}: {problems[0]}; the keys are {', '.join(sorted(known))}")
    try:
        return cls(**present)
    except WrongValue as error:
        raise InputError(f"{where}: {error}") from None


def changed_values(config: Any) -> dict[str, Any]:
    """The content of a file for :func:`read`: the values that differ from the defaults.

    Defaults are left out so that they are defined in one place. Paths become absolute, since the file may be read
    from another folder.
    """
    values = {field.name: getattr(config, field.name) for field in options_of(config)}
    changed = {field.name: values[field.name] for field in options_of(config) if values[field.name] != field.default}
    return {name: _plain(value) for name, value in changed.items()}


def _plain(value: Any) -> Any:
    return str(value.absolute()) if isinstance(value, Path) else getattr(value, "text", value)


WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path"}


def _typed(name: str, value: Any, kind: Any) -> Any:
    """The value converted to the type. Raises WrongValue where it has another type."""
    if get_origin(kind) is tuple and not isinstance(value, str):
        return tuple(_typed(name, item, get_args(kind)[0]) for item in value or ())
    if hasattr(kind, "parse"):
        value = parsed(name, value, kind)
    if kind is Path and isinstance(value, str) and value:
        value = Path(value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    matches = number and (kind is float or isinstance(value, int)) if kind in (int, float) else isinstance(value, kind)
    if not matches or value == "":
        raise WrongValue(name, f"is {_shown(value)}, should be {WORDS.get(kind, kind.__name__)}")
    if kind in (int, float) and MAX_WHOLE < abs(value) < inf:
        raise WrongValue(name, f"is {_shown(value)}, should be at most {MAX_WHOLE}")
    return float(value) if kind is float else value


def parsed(name: str, value: Any, kind: Any) -> Any:
    """``value``, parsed by ``kind`` if it is a text. Raises WrongValue naming the field."""
    if not isinstance(value, str):
        return value
    try:
        return kind.parse(value)
    except WrongValue as wrong:
        raise WrongValue(name, wrong.message) from None


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, Path) else repr(value)
