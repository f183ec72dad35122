"""Flags from dataclasses: a command's parameter that is a dataclass becomes one flag per field. Nothing nests.

Also shows a command's report, and names the flag of a wrong value in the error.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from rich.markup import escape
from typer.core import TyperCommand
from typer.models import ArgumentInfo, OptionInfo

from kvpolicy.errors import InputError
from kvpolicy.fields import WrongValue, is_optional, kind_of, like, options_of
from kvpolicy.trace.window import HELP

Between = Annotated[tuple[str, str] | None, typer.Option(metavar="FROM TO", help=HELP)]
"""A window of what servers recorded."""


class ServerCommand(TyperCommand):
    """A command that passes on flags that it does not know, so that a misspelt one is not refused: where one of its own
    is missing, the one that is like it is named."""

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        given = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
        try:
            return super().parse_args(context, arguments)
        except typer.BadParameter as error:
            misspelt = [] if error.message or error.param is None else [*_unknown(given, self, error.param.opts)]
            if misspelt:
                error.message = f"{misspelt[0]} is no flag of kvpolicy: is it a misspelling?"
            raise


def _unknown(given: Iterable[str], of: Any, wanted: Sequence[str]) -> Iterator[str]:
    """The flags that are none of the command's, and like a wanted one."""
    known = {name for parameter in of.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return (flag for flag in given if flag not in known and like(flag, wanted))


SERVER_FLAGS: Mapping[str, Any] = {
    "cls": ServerCommand,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}
"""Settings of a command that takes the flags of vLLM's server besides its own."""


def command(function: Callable[..., Any], json_help: str = "") -> Callable[..., None]:
    """Wrap ``function``, which returns a report or None, as a typer command.

    A report that is not ``ok`` ends with status 1. ``json_help``: help of a flag ``--json`` that writes the report's
    dictionary; without it there is no such flag. If a dataclass parameter has a default, its values are the flags'
    defaults. A field with the name of a parameter of the function's has no flag of its own and keeps its default.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []
    own = signature(function).parameters
    for parameter in own.values():
        if parameter.name in groups:
            spread = _spread(groups[parameter.name], parameter.default)
            parameters += [one for one in spread if one.name not in own]
        else:
            parameters.append(_parameter(parameter.name, hints[parameter.name], parameter.default))
    if json_help:
        json_file = typer.Option("--json", metavar="FILE", help=json_help)
        parameters.append(_parameter("json", Annotated[Path | None, json_file], None))
    flags = {parameter.name: _flag(parameter) for parameter in parameters}

    @functools.wraps(function)
    def run(**values: Any) -> None:
        file = values.pop("json", None)
        try:
            for name, group in groups.items():
                values[name] = group(
                    **{
                        field.name: _inverted(field, values.pop(field.name))
                        for field in options_of(group)
                        if field.name not in own
                    }
                )
            report = function(**values)
        except WrongValue as wrong:
            raise InputError(f"{flags.get(wrong.field, wrong.field)} {wrong.message}") from wrong
        show(report, file)
        if not getattr(report, "ok", True):
            raise typer.Exit(1)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def show(report: Any, json_file: Path | None = None) -> None:
    """Print the report's text, and write its dictionary to ``json_file`` if given."""
    if report is not None:
        typer.echo(report.text())
    if json_file:
        json_file.write_text(json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n")


def _spread(group: Any, instance: Any) -> Iterator[Parameter]:
    """A parameter per field. ``instance``: gives the defaults; if there is none, the fields' own defaults hold."""
    hints = get_type_hints(group)
    for field in options_of(group):
        default: Any = field.default if instance is Parameter.empty else getattr(instance, field.name)
        flag = field.metadata["flag"] or f"--{'no-' if field.default is True else ''}{field.name.replace('_', '-')}"
        names = (flag, *field.metadata["aliases"])
        typer_option = typer.Option(*names, help=field.metadata["help"], metavar=field.metadata["metavar"])
        kind = kind_of(hints[field.name])
        if hasattr(kind, "parse"):
            kind = str
        elif get_origin(kind) is tuple:
            kind, default = list[get_args(kind)[0]], list(default)  # type: ignore[misc]
        kind = kind | None if is_optional(hints[field.name]) else kind
        yield _parameter(field.name, Annotated[kind, typer_option], _inverted(field, default))


def _inverted(field: Any, value: Any) -> Any:
    """Convert a field's value to its flag's and back: a field that defaults to True has a flag that switches it off."""
    return not value if field.default is True else value


def _parameter(name: str, hint: Any, default: Any) -> Parameter:
    """A parameter for typer, its help escaped so that brackets are not read as markup."""
    if get_origin(hint) is Annotated:
        value_type, typer_option = get_args(hint)
        typer_option = copy(typer_option)
        typer_option.help = escape(typer_option.help or "")
        hint = Annotated[value_type, typer_option]
    default = Parameter.empty if default is MISSING else default
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _flag(parameter: Parameter) -> str:
    """The flag that a parameter has on the command line, or the placeholder of an argument."""
    argument = next((part for part in get_args(parameter.annotation) if isinstance(part, ArgumentInfo)), None)
    if argument is not None:
        return str(argument.metavar or parameter.name.upper())
    typer_option = next((part for part in get_args(parameter.annotation) if isinstance(part, OptionInfo)), None)
    names = [] if typer_option is None else [typer_option.default, *(typer_option.param_decls or ())]
    return next((name for name in names if isinstance(name, str)), f"--{parameter.name.replace('_', '-')}")
