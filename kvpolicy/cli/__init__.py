"""The command line: its commands by part, and errors to one line. Nothing is decided here."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

import kvpolicy
from kvpolicy.cli import measure, study
from kvpolicy.cost import ModelWarning
from kvpolicy.errors import EngineFailed, KVPolicyError

app = typer.Typer(
    help="Recompute or swap, decided by measured cost, for LLM servers that run out of KV memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"kvpolicy {kvpolicy.__version__}")
        raise typer.Exit


measure.add_to(app)
study.add_to(app)


def main(arguments: list[str] | None = None) -> None:
    """Run a command. Wrong values, unreadable files and a missing engine end in one line on stderr and status 2.

    So does an engine that ended badly, whose last words may take more lines. Warnings of a cost model are one line. Any
    other exception is a fault of this package and ends in its traceback.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", ModelWarning)
            warnings.showwarning = _plainly(warnings.showwarning)
            app(args=arguments, prog_name="kvpolicy")
    except EngineFailed as error:
        _end(str(error).strip())
    except (KVPolicyError, OSError) as error:
        _end(" ".join(str(error).split()))


def _plainly(otherwise: Callable[..., None]) -> Callable[..., None]:
    """How warnings are shown: a cost model's for whoever reads the command line, all others with their source."""

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, ModelWarning):
            print(f"kvpolicy: warning: {' '.join(str(message).split())}", file=sys.stderr)
        else:
            otherwise(message, category, *where, **more)

    return show


def _end(message: str) -> NoReturn:
    print(f"kvpolicy: error: {message}", file=sys.stderr)
    sys.exit(2)
