"""Fields of configuration: help, flag and rule of a dataclass's field stand in one place, where it is declared.

Python, YAML and the command line go by them alike. A class declares its fields with :func:`option` and calls
:func:`settle` in its ``__post_init__``; :func:`read` makes one of what a file holds, and :mod:`kvpolicy.cli.flags`
makes its flags.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from math import inf
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from kvpolicy.errors import InputError

Config = TypeVar("Config")


class WrongValue(InputError):
    """A field that is not as it should be. The command line names the flag in the field's place."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)
        self.field, self.message = field, message

    def __str__(self) -> str:
        return f"{self.field} {self.message}"


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value has to be besides of its type."""

    should: str
    """In words, after "should be"."""
    holds: Callable[[Any], bool]

    def refuse(self, name: str, value: Any) -> None:
        """Raises :class:`WrongValue` for a value that it does not hold for."""
        if not self.holds(value):
            raise WrongValue(name, f"is {_shown(value)}, should be {self.should}")


MAX_WHOLE = 2**53
"""Whole numbers beyond it are not exact as floats, and no number given here can mean so much."""
COUNT = Rule("1 or more", lambda value: value >= 1)
AMOUNT = Rule("0 or above", lambda value: 0 <= value < inf)
POSITIVE = Rule("a number above 0", lambda value: 0 < value < inf)


def one_of(*names: str) -> Rule:
    return Rule(f"one of {', '.join(names)}" if len(names) > 2 else " or ".join(names), names.__contains__)


def option(
    help: str, default: Any = MISSING, rule: Rule | None = None, flag: str = "", metavar: str | None = None
) -> Any:
    """A field with help, which of one that is True without a flag says what the flag ``--no-...`` does.

    ``flag``: in place of one that is made of the field's name. ``metavar``: what its value is called.
    """
    told = {"help": help, "rule": rule, "flag": flag, "metavar": metavar}
    return dataclasses.field(default=default, metadata=told)


def options_of(config: Any) -> list[dataclasses.Field[Any]]:
    """The fields, of a class or an instance, that :func:`option` declared."""
    return [one for one in dataclasses.fields(config) if "help" in one.metadata]


def is_optional(hint: Any) -> bool:
    """Whether a field may be None."""
    return NoneType in get_args(hint)


def kind_of(hint: Any) -> Any:
    """The type of a field, without the None it may be."""
    return next(one for one in get_args(hint) if one is not NoneType) if is_optional(hint) else hint


def settle(config: Any) -> None:
    """Hold an instance to its fields' types and rules; text is parsed where the type can do so.

    Raises :class:`WrongValue` for the first field that is wrong.
    """
    hints = get_type_hints(type(config))
    for one in options_of(config):
        given, hint = getattr(config, one.name), hints[one.name]
        if given is None and is_optional(hint):
            continue
        value = _typed(one.name, given, kind_of(hint))
        if one.metadata["rule"] is not None:
            one.metadata["rule"].refuse(one.name, value)
        object.__setattr__(config, one.name, value)


def read(cls: type[Config], values: Mapping[str, Any], where: str) -> Config:
    """One of what a file holds; None is as good as absent. Raises InputError naming ``where``, the key, and what would
    be right."""
    known = {one.name: one.default for one in options_of(cls)}
    given = {name: value for name, value in values.items() if value is not None}
    wrong = [f"unknown key {name!r}" for name in sorted(set(values) - set(known))]
    wrong += [f"key {name!r} is missing" for name, default in known.items() if default is MISSING and name not in given]
    if wrong:
        raise InputError(f"{where}: {wrong[0]}; the keys are {', '.join(sorted(known))}")
    try:
        return cls(**given)
    except WrongValue as error:
        raise InputError(f"{where}: {error}") from None


def written(config: Any) -> dict[str, Any]:
    """What a file holds for :func:`read`: what differs from the defaults, so that these have one home. Paths become
    absolute, since they may be read elsewhere."""
    values = {one.name: getattr(config, one.name) for one in options_of(config)}
    given = {one.name: values[one.name] for one in options_of(config) if values[one.name] != one.default}
    return {name: _plain(value) for name, value in given.items()}


def _plain(value: Any) -> Any:
    return str(value.absolute()) if isinstance(value, Path) else getattr(value, "text", value)


WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path"}


def _typed(name: str, value: Any, kind: Any) -> Any:
    """The value as one of that type."""
    if get_origin(kind) is tuple and not isinstance(value, str):
        return tuple(_typed(name, one, get_args(kind)[0]) for one in value or ())
    if hasattr(kind, "parse"):
        value = parsed(name, value, kind)
    if kind is Path and isinstance(value, str) and value:
        value = Path(value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    good = number and (kind is float or isinstance(value, int)) if kind in (int, float) else isinstance(value, kind)
    if not good or value == "":
        raise WrongValue(name, f"is {_shown(value)}, should be {WORDS.get(kind, kind.__name__)}")
    if kind in (int, float) and MAX_WHOLE < abs(value) < inf:
        raise WrongValue(name, f"is {_shown(value)}, should be at most {MAX_WHOLE}")
    return float(value) if kind is float else value


def parsed(name: str, value: Any, kind: Any) -> Any:
    """``value`` itself, or what ``kind`` makes of a text; its error in the name of the field."""
    if not isinstance(value, str):
        return value
    try:
        return kind.parse(value)
    except WrongValue as wrong:
        raise WrongValue(name, wrong.message) from None


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, Path) else repr(value)
