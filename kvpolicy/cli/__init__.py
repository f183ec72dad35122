"""The command line: puts the commands together and turns errors into one line. No logic beyond that."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import kvpolicy
from kvpolicy.cli import bench, catalog, inspection, measure, study
from kvpolicy.cost import ModelWarning, shipped
from kvpolicy.errors import EngineFailed, KVPolicyError
from kvpolicy.integrations import NotServed
from kvpolicy.trace import TraceWarning

KINDS_OF_NUMBERS: Mapping[str, str] = {"integer": "a whole number", "number": "a number"}


class Commands(TyperGroup):
    """All commands. What typer refuses is said in the words of this package, and where a cost model is missing, those
    that ship are named."""

    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except typer.BadParameter as error:
            if error.message.startswith("Input should be a valid "):  # of a typer that reads values by pydantic
                kind = error.message.removeprefix("Input should be a valid ").partition(",")[0]
                error.message = f"should be {KINDS_OF_NUMBERS.get(kind, f'a valid {kind}')}"
            elif not error.message and error.param is not None and "--cost-model" in error.param.opts:
                error.message = f"Models that ship: {', '.join(shipped())}."
            raise


app = typer.Typer(
    cls=Commands,
    help="Recompute or swap, decided by measured cost, for LLM servers that run out of KV memory.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", "-v", help="Show the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"kvpolicy {kvpolicy.__version__}")
        raise typer.Exit


measure.add_to(app)
study.add_to(app)
bench.add_to(app)
catalog.add_to(app)
inspection.add_to(app)


def main(arguments: list[str] | None = None) -> None:
    """Run a command.

    Wrong values, unreadable files and a missing engine end in one line on stderr and status 2. So do, in lines of their
    own, an engine that failed, with its last lines of output, and a model that would not be served. Warnings of a cost
    model and of a trace take one line. Any other exception is a bug of this package and ends in a traceback.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", ModelWarning)
            warnings.simplefilter("default", TraceWarning)
            warnings.showwarning = _warning_printer(warnings.showwarning)
            app(args=arguments, prog_name="kvpolicy")
    except (EngineFailed, NotServed) as error:
        _end(str(error).strip())
    except (KVPolicyError, OSError) as error:
        _end(" ".join(str(error).split()))


def _warning_printer(default: Callable[..., None]) -> Callable[..., None]:
    """A function for ``warnings.showwarning``: warnings of a cost model and of a trace take one line, all others are
    shown as usual."""

    def show(message: Warning | str, category: type[Warning], *location: Any, **options: Any) -> None:
        if issubclass(category, ModelWarning | TraceWarning):
            print(f"kvpolicy: warning: {' '.join(str(message).split())}", file=sys.stderr)
        else:
            default(message, category, *location, **options)

    return show


def _end(message: str) -> NoReturn:
    print(f"kvpolicy: error: {message}", file=sys.stderr)
    sys.exit(2)
