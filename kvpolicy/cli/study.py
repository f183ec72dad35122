"""The commands that simulate, recommend, characterize and report. They pass options to functions of the library."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

import kvpolicy
from kvpolicy.cli.flags import SERVER_FLAGS, Between, command
from kvpolicy.errors import InputError
from kvpolicy.fields import option
from kvpolicy.order import HELP as ORDERS
from kvpolicy.overflow import FIGURES
from kvpolicy.policy import FORMS
from kvpolicy.settings import SEED, Measurement
from kvpolicy.study.config import HARDWARE_FORMS, Criterion, Run, Serving
from kvpolicy.study.progress import bar
from kvpolicy.trace import upkeep

POLICIES = (
    f"{', '.join(FORMS)}, as for `kvpolicy evaluate`, where the cost model analytic is that of the simulated engine; "
    "or oracle: the cheaper option by the simulator's own times"
)
WORKLOAD = (
    "FILE (Azure, Mooncake, BurstGPT, ShareGPT, agentic sessions, length tables, recorded traces; FORMAT:FILE "
    "names the format) or the name of a shipped workload, with ?OPTION=VALUE&..., as "
    "azure-conversation-2023?n=500&rate=4; A + B joins several"
)
Hardware = Annotated[str, typer.Option(help=HARDWARE_FORMS)]
INTERRUPTED = 130
"""Exit status that shells give a program ended by Ctrl-C."""


@dataclass(frozen=True)
class Served:
    """What is served: workloads by name, or replays of measured runs."""

    workload: list[str] | None = option(f"{WORKLOAD}. May be given several times.", None)
    requests: list[Path] | None = option(
        "Replay a measured run; columns: input_toks, output_toks, client_arrival_s.", None, metavar="CSV"
    )

    def names(self) -> list[str]:
        return [*(self.workload or ()), *(f"requests:{file}" for file in self.requests or ())]


def simulate(
    policy: Annotated[list[str], typer.Option(help=f"{POLICIES}. May be given several times.")],
    kv_blocks: Annotated[list[int], typer.Option(help="Usable KV blocks of the device. May be given several times.")],
    hardware: Hardware,
    served: Served,
    link: Annotated[
        list[str] | None, typer.Option(help="native, or BYTES_PER_S[,LATENCY_S]. May be given several times.")
    ] = None,
    order: Annotated[
        list[str] | None,
        typer.Option(help=f"Order of service. {ORDERS}. May be given several times. Default: fcfs."),
    ] = None,
    serving: Serving = Serving(),
    run: Run = Run(),
) -> Any:
    """Simulate workloads under policies, orders, memories and links; an interrupted run is resumed."""
    if not (workloads := served.names()):
        raise InputError("no workload: give --workload or --requests")
    with bar() as progress:
        run = replace(run, progress=progress)
        return kvpolicy.simulate(workloads, policy, kv_blocks, hardware, link or ["native"], serving, run, order or ())


def recommend(
    workload: Annotated[str, typer.Option(help=f"{WORKLOAD}.")],
    hardware: Hardware,
    kv_blocks: Annotated[int, typer.Option(help="Usable KV blocks of the device.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(help="A policy to try besides the standard ones. May be given several times."),
    ] = None,
    link: Annotated[str, typer.Option(help="native, or BYTES_PER_S[,LATENCY_S].")] = "native",
    serving: Serving = Serving(),
    run: Run = Run(parts=8),
    criterion: Criterion = Criterion(),
) -> Any:
    """Simulate your own workload on your own hardware under every policy, and recommend which to deploy."""
    with bar() as progress:
        run = replace(run, progress=progress)
        return kvpolicy.recommend(workload, hardware, kv_blocks, policy or [], link, serving, run, criterion)


def characterize(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder of the trace. An unfinished study in it is resumed.")],
    figure: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(FIGURES)} or all. May be given several times.")
    ] = None,
    how: Measurement = Measurement(),
) -> Any:
    """Measure the data for the overflow study's figures on a live engine. Flags after -- are vLLM's, those of the
    server that is studied."""
    try:
        return kvpolicy.characterize(out, figure or ["all"], replace(how, vllm_flags=tuple(context.args)))
    except KeyboardInterrupt as interrupt:
        typer.echo(f"\nkvpolicy: {interrupt}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def report(
    traces: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="Folders of traces; or one folder of `bench` or `demo`."),
    ],
    out: Annotated[Path, typer.Option(help="The report: one self-contained HTML file.")] = Path("report.html"),
    figures: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for each figure as SVG and PNG.")] = None,
    cost_model: Annotated[
        str | None,
        typer.Option(
            help="Cost model whose boundary, calibration and regret to show: a folder, or the name of a shipped model. "
            "Default: one trained on two thirds of the states."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help=SEED)] = 0,
    between: Between = None,
) -> Any:
    """Test the overflow study's findings on traces, draw its figures, and write one HTML page; or write the page of a
    bench or a demo."""
    return kvpolicy.report(traces=traces, out=out, figures=figures, cost_model=cost_model, seed=seed, between=between)


def compact(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Folders of traces.")],
) -> None:
    """Merge the part files of traces into few, also of a trace that a server is writing."""
    for folder in traces:
        before, after = upkeep.compact(folder)
        typer.echo(
            f"{folder}: {before.files:,} files, {before.bytes / 1e6:,.1f} MB -> {after.files:,} files, "
            f"{after.bytes / 1e6:,.1f} MB"
        )


def add_to(app: typer.Typer) -> None:
    for function in (simulate, recommend):
        app.command()(command(function, "File for the figures."))
    app.command(**SERVER_FLAGS)(command(characterize))
    app.command()(command(report, "File for the findings."))
    app.command()(compact)
