"""Flags out of dataclasses: a command's parameter that is one is spread into a flag per field; and how reports are
shown. Nothing nests."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import MISSING, Field, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

import typer
from rich.markup import escape
from typer.models import OptionInfo, ParameterInfo

from kvpolicy.errors import InputError
from kvpolicy.fields import WrongValue, kind_of, options_of


def command(function: Callable[..., Any], json_help: str = "") -> Callable[..., None]:
    """``function``, which returns a report or nothing, as typer takes it.

    The report is shown; one that is not ``ok`` ends with status 1. ``json_help``: of a flag ``--json`` that writes its
    figures. A wrong value is told by its flag. Defaults are those of the parameter where it has a dataclass's instance.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {}
    taken: list[Parameter] = []
    for one in signature(function).parameters.values():
        if is_dataclass(hints[one.name]):
            groups[one.name] = hints[one.name]
            taken += _spread(hints[one.name], one.default)
        else:
            taken.append(one.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[one.name]))
    if json_help:
        told = typer.Option("--json", metavar="FILE", help=json_help)
        taken.append(_parameter("json_file", Path | None, told, None))
    flags = {one.name: _flag(one) for one in taken}

    @functools.wraps(function)
    def run(json_file: Path | None = None, **given: Any) -> None:
        try:
            for name, group in groups.items():
                given[name] = group(**{one.name: _turned(one, given.pop(one.name)) for one in options_of(group)})
            report = function(**given)
        except WrongValue as wrong:
            raise InputError(f"{flags.get(wrong.field, wrong.field)} {wrong.message}") from wrong
        show(report, json_file)
        if not getattr(report, "ok", True):
            raise typer.Exit(1)

    taken = [_as_written(one) for one in taken]
    run.__signature__ = Signature(taken)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in taken}
    return run


def _spread(group: Any, instance: Any) -> Iterator[Parameter]:
    """A parameter per field. ``instance``: where the defaults are from; the fields' own where there is none."""
    hints = get_type_hints(group)
    for one in options_of(group):
        default = one.default if instance is Parameter.empty else getattr(instance, one.name)
        flag = one.metadata["flag"] or f"--{'no-' if _inverted(one) else ''}{one.name.replace('_', '-')}"
        told = typer.Option(flag, help=one.metadata["help"], metavar=one.metadata["metavar"])
        yield _parameter(one.name, _asked_for(hints[one.name]), told, _turned(one, default))


def _parameter(name: str, kind: Any, told: Any, default: Any) -> Parameter:
    default = Parameter.empty if default is MISSING else default
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, told])


def _as_written(one: Parameter) -> Parameter:
    """With help whose brackets are no markup."""
    kind, told = (*get_args(one.annotation), None)[:2]
    if not isinstance(told, ParameterInfo):
        return one
    told = copy(told)
    told.help = escape(told.help or "")
    return one.replace(annotation=Annotated[kind, told])


def _inverted(one: Field[Any]) -> bool:
    """Whether a flag switches it off: it is on without one."""
    return one.default is True


def _turned(one: Field[Any], value: Any) -> Any:
    return not value if _inverted(one) else value


def _asked_for(hint: Any) -> Any:
    """The type of a field as the command line takes it: text, where that is parsed."""
    if not hasattr(kind_of(hint), "parse"):
        return hint
    return str | None if NoneType in get_args(hint) else str


def _flag(one: Parameter) -> str:
    """How the command line calls a parameter."""
    told = next((part for part in get_args(one.annotation) if isinstance(part, OptionInfo)), None)
    named = [] if told is None else [told.default, *(told.param_decls or ())]
    return next((name for name in named if isinstance(name, str)), f"--{one.name.replace('_', '-')}")


def show(report: Any, json_file: Path | None = None) -> None:
    """Its text, and its figures into a file where one is asked for."""
    if report is not None:
        typer.echo(report.text())
    if json_file:
        json_file.write_text(json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n")
