"""The commands that look into a run: `export` writes a recorded one for a viewer, `watch` shows a live one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvpolicy import trace as traces
from kvpolicy.cli.flags import Between, command
from kvpolicy.cli.screen import watch
from kvpolicy.trace.timeline import write_events


def export(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Folder of a trace.")],
    perfetto: Annotated[
        Path, typer.Option(metavar="OUT", help="Trace events, for ui.perfetto.dev: a file .json or .json.gz.")
    ],
    between: Between = None,
) -> None:
    """Write a recorded run as a timeline: steps, copies, decisions with their prices, and each request."""
    number = write_events(traces.read_between([trace], between)[str(trace)], perfetto)
    typer.echo(f"written: {perfetto}, {number} events; open it in https://ui.perfetto.dev")


def add_to(app: typer.Typer) -> None:
    app.command()(command(export))
    app.command()(watch)
