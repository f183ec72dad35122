"""Flags out of dataclasses: a command's parameter that is one is spread into a flag per field. Nothing nests.

What a command returns is shown, and what was given wrong is told by its flag.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import MISSING, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from rich.markup import escape
from typer.models import OptionInfo

from kvpolicy.errors import InputError
from kvpolicy.fields import WrongValue, is_optional, kind_of, options_of


def command(function: Callable[..., Any], json_help: str = "") -> Callable[..., None]:
    """``function``, which returns a report or nothing, as typer takes it.

    A report that is not ``ok`` ends with status 1. ``json_help``: of a flag ``--json`` that writes its figures. The
    flags of a parameter that is a dataclass have the defaults of that parameter's own default, if it has one.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    taken: list[Parameter] = []
    for one in signature(function).parameters.values():
        if one.name in groups:
            taken += _spread(groups[one.name], one.default)
        else:
            taken.append(_parameter(one.name, hints[one.name], one.default))
    if json_help:
        json_file = typer.Option("--json", metavar="FILE", help=json_help)
        taken.append(_parameter("json", Annotated[Path | None, json_file], None))
    flags = {one.name: _flag(one) for one in taken}

    @functools.wraps(function)
    def run(**values: Any) -> None:
        file = values.pop("json", None)
        try:
            for name, group in groups.items():
                values[name] = group(**{one.name: _turned(one, values.pop(one.name)) for one in options_of(group)})
            report = function(**values)
        except WrongValue as wrong:
            raise InputError(f"{flags.get(wrong.field, wrong.field)} {wrong.message}") from wrong
        show(report, file)
        if not getattr(report, "ok", True):
            raise typer.Exit(1)

    run.__signature__ = Signature(taken)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in taken}
    return run


def show(report: Any, json_file: Path | None = None) -> None:
    """Its text, and its figures into a file where one is asked for."""
    if report is not None:
        typer.echo(report.text())
    if json_file:
        json_file.write_text(json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n")


def _spread(group: Any, instance: Any) -> Iterator[Parameter]:
    """A parameter per field. ``instance``: whose values are the defaults; the fields' own without one."""
    hints = get_type_hints(group)
    for one in options_of(group):
        default: Any = one.default if instance is Parameter.empty else getattr(instance, one.name)
        flag = one.metadata["flag"] or f"--{'no-' if one.default is True else ''}{one.name.replace('_', '-')}"
        told = typer.Option(flag, help=one.metadata["help"], metavar=one.metadata["metavar"])
        kind = kind_of(hints[one.name])
        if hasattr(kind, "parse"):
            kind = str
        elif get_origin(kind) is tuple:
            kind, default = list[get_args(kind)[0]], list(default)  # type: ignore[misc]
        kind = kind | None if is_optional(hints[one.name]) else kind
        yield _parameter(one.name, Annotated[kind, told], _turned(one, default))


def _turned(one: Any, value: Any) -> Any:
    """The value of a field for its flag, or the other way round: what is on without a flag is switched off by it."""
    return not value if one.default is True else value


def _parameter(name: str, hint: Any, default: Any) -> Parameter:
    """As typer reads it, with help whose brackets are no markup."""
    if get_origin(hint) is Annotated:
        kind, told = get_args(hint)
        told = copy(told)
        told.help = escape(told.help or "")
        hint = Annotated[kind, told]
    default = Parameter.empty if default is MISSING else default
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _flag(one: Parameter) -> str:
    """How the command line calls a parameter."""
    told = next((part for part in get_args(one.annotation) if isinstance(part, OptionInfo)), None)
    named = [] if told is None else [told.default, *(told.param_decls or ())]
    return next((name for name in named if isinstance(name, str)), f"--{one.name.replace('_', '-')}")
