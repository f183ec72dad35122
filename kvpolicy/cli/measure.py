"""The commands that measure, train, evaluate, explain and serve. They only pass options to functions of the library."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

import kvpolicy
from kvpolicy import integrations
from kvpolicy.cli.flags import SERVER_FLAGS, Between, command, show
from kvpolicy.errors import InputError
from kvpolicy.evaluation.estimation import Estimation
from kvpolicy.explanation import Question
from kvpolicy.fields import WrongValue
from kvpolicy.hardware.engine_time import EngineTime
from kvpolicy.order import HELP as ORDERS
from kvpolicy.policy import HELP
from kvpolicy.policy.objective import FORM
from kvpolicy.settings import DEMO_ORDER, SEED, Measurement, ServerSettings

ALWAYS_SWAP = ServerSettings("always-swap")

Seed = Annotated[int, typer.Option(help=SEED)]


def profile(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder of the trace. An unfinished profile in it is resumed.")],
    how: Measurement = Measurement(),
) -> Any:
    """Measure recompute and swap in the same states on a live engine. Flags after -- are vLLM's, those of the server
    that the costs are for."""
    return kvpolicy.profile(out, replace(how, vllm_flags=tuple(context.args)))


def train(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Folders of traces.")],
    out: Annotated[Path, typer.Option(help="Folder of the cost model.")],
    family: Annotated[
        str, typer.Option(help="boosted, linear or analytic; one of your own as python:MODULE:FACTORY")
    ] = "boosted",
    force: Annotated[bool, typer.Option("--force", help="Train even on a trace with over 30% noise.")] = False,
    mixed_hardware: Annotated[
        bool, typer.Option("--mixed-hardware", help="Train on traces of different machines together.")
    ] = False,
    pageable: Annotated[
        bool, typer.Option("--pageable", help="Train on copies over host memory that is not page-locked.")
    ] = False,
    seed: Seed = 0,
) -> Any:
    """Train a cost model from traces."""
    return kvpolicy.train(
        traces=traces,
        out=out,
        family=family,
        force=force,
        seed=seed,
        mixed_hardware=mixed_hardware,
        pageable=pageable,
    )


def calibrate(
    cost_model: Annotated[
        str,
        typer.Option(help="Cost model to transfer: a folder, the name of a shipped model, or analytic:DEVICE:CONFIG."),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the transferred cost model.")],
    traces: Annotated[
        list[Path] | None, typer.Argument(metavar="TRACE...", help="Folders of traces measured here.")
    ] = None,
    trace: Annotated[list[Path] | None, typer.Option(help="The same as TRACE, one at a time.")] = None,
    states: Annotated[int | None, typer.Option(help="Number of the trace's states to use. Default: all.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Calibrate even on a trace with over 30% noise.")] = False,
    seed: Seed = 0,
) -> Any:
    """Transfer a cost model to another machine, link or LLM, with a few states measured there."""
    every = _every_trace(traces, trace)
    return kvpolicy.calibrate(cost_model=cost_model, traces=every, out=out, states=states, seed=seed, force=force)


def evaluate(
    policy: Annotated[list[str], typer.Option(help=f"{HELP}. May be given several times.")],
    traces: Annotated[list[Path] | None, typer.Argument(metavar="TRACE...", help="Folders of traces.")] = None,
    trace: Annotated[list[Path] | None, typer.Option(help="The same as TRACE, one at a time.")] = None,
    objective: Annotated[
        str, typer.Option(help=f"Objective that policies are judged by, in seconds: {FORM}.")
    ] = "engine",
    how: Estimation = Estimation(),
    seed: Seed = 0,
    between: Between = None,
) -> Any:
    """Judge policies on a trace.

    On a profile: accuracy and regret against the oracle that knows both options. On a production log: off-policy
    estimates with intervals, or the reasons why the log supports none.
    """
    return kvpolicy.evaluate(_every_trace(traces, trace), policy, seed, objective, how, between)


def _every_trace(traces: Sequence[Path] | None, trace: Sequence[Path] | None) -> list[Path]:
    """Those given by place, then those given by ``--trace``. Raises InputError where there is none."""
    if every := [*(traces or ()), *(trace or ())]:
        return every
    raise InputError("no trace: give TRACE, the folder of one or the name of one that ships")


def shadow(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Folders of traces of `serve --shadow`.")],
    cost_model: Annotated[
        str | None,
        typer.Option(
            help="Cost model for decisions without predicted costs: a folder, or the name of a shipped model."
        ),
    ] = None,
    between: Between = None,
) -> Any:
    """Say what a policy in shadow mode would have chosen and saved per hour, and what cannot be told."""
    return kvpolicy.shadow_savings(traces, cost_model, between)


def explain(
    cost_model: Annotated[str, typer.Option(help="A folder, the name of a shipped model, or analytic:DEVICE:CONFIG.")],
    question: Question,
    objective: Annotated[str, typer.Option(help=f"Objective to minimise, in seconds: {FORM}.")] = "engine",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="File for the report.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for a plot of the decision boundary, .svg or .png.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Also show what this policy chooses; named as for `kvpolicy evaluate`.")
    ] = None,
) -> None:
    """Show both predicted costs of one situation, the reasons for the choice, and where the choice changes."""
    report = kvpolicy.explain(cost_model, question, objective, plot, policy)
    show(report, json_file)
    if report.not_drawn:
        raise WrongValue("plot", report.not_drawn)


def check(
    context: typer.Context,
    llm: Annotated[
        str, typer.Argument(metavar="LLM", help="The model, as for `vllm serve`, followed by vLLM's flags.")
    ],
    settings: ServerSettings = ALWAYS_SWAP,
) -> Any:
    """Say, without reading weights, whether vLLM takes these flags and the plugin serves the model with them, and why
    not. Flags that are not kvpolicy's are vLLM's."""
    _warn(settings.warnings())
    return kvpolicy.check(llm, settings, context.args)


def serve(
    context: typer.Context,
    llm: Annotated[
        str, typer.Argument(metavar="LLM", help="The model, as for `vllm serve`, followed by vLLM's flags.")
    ],
    settings: ServerSettings,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, print the command, and do not run it.")] = False,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Do not find out before whether the plugin serves the model.")
    ] = False,
) -> None:
    """Start vLLM's server with the policy on. Flags that are not kvpolicy's are passed to vLLM unchanged."""
    command = integrations.serve_command(llm, settings, context.args)
    _warn(settings.warnings())
    if not no_check and (doubt := integrations.refuse_unserved(llm, settings, context.args)):
        _warn([doubt])
    if dry_run:
        typer.echo(integrations.launcher().shell_line(command))
        return
    sys.stdout.flush()
    # The server replaces this process, so that it receives signals.
    os.execvpe(command[0], command, os.environ | integrations.launcher().core_variables(context.args, os.environ))


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        typer.echo(f"kvpolicy: warning: {' '.join(warning.split())}", err=True)


def config(
    settings: ServerSettings,
    into: Annotated[
        Path | None,
        typer.Option(
            "--into",
            metavar="FILE",
            help="Merge it into this YAML file of yours, whose comments and order stay, and show the difference.",
        ),
    ] = None,
) -> None:
    """Print the YAML that switches the policy on: vllm serve LLM --config FILE.yaml."""
    launch = integrations.launcher()
    extra = launch.options(settings)
    _warn(settings.warnings())
    if into is None:
        typer.echo(launch.config_yaml(extra), nl=False)
        return
    typer.echo(launch.config_into(into, extra) or f"{into}: has these settings already\n", nl=False)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for traces, models, demo.json and its page.")] = Path("out/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Two short rounds in place of four.")] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Without an engine, in half a minute: a shipped trace, and simulations.")
    ] = False,
    seed: Seed = 0,
    order: Annotated[
        str, typer.Option(help=f"Order of service with which requests of one class are served last. {ORDERS}.")
    ] = DEMO_ORDER,
) -> Any:
    """What preemptions cost here, and where it pays: a small model, served by unmodified vLLM and with the plugin."""
    run = kvpolicy.offline_demo if offline else kvpolicy.demo
    report = run(out=out, quick=quick, seed=seed, order=order)
    page = out / "demo.html"
    if not (out / "demo.json").exists():
        return report
    if find_spec("matplotlib") and find_spec("jinja2"):
        kvpolicy.report([out], page)
    else:
        page.unlink(missing_ok=True)  # it would be that of an earlier demo
        typer.echo(f"{page} is not written, which takes: pip install 'kvpolicy[plots]'", err=True)
    return report


def import_profile(
    tables: Annotated[
        list[Path],
        typer.Argument(
            metavar="TABLE...", help="Tables of operator times, as published by LLMServingSim, Vidur or AIConfigurator."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the hardware model.")],
    geometry: Annotated[Path, typer.Option(metavar="CONFIG", help="The LLM's config.json, or its folder.")],
    ranks: Annotated[
        int, typer.Option(help="Number of tensor-parallel ranks. The tables must be those of one rank.")
    ] = 1,
    device: Annotated[str | None, typer.Option(help="Name of the device, if the tables do not contain it.")] = None,
    link: Annotated[
        str | None, typer.Option(help="Host link, by name (pcie4, pcie5, ...) or BYTES_PER_S[,LATENCY_S].")
    ] = None,
    all_reduce: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Vidur's all-reduce times of the device, for communication between ranks."),
    ] = None,
    engine: EngineTime = EngineTime(),
) -> Any:
    """Make the simulator's hardware model from published tables of operator times."""
    return kvpolicy.import_profile(tables, out, geometry, ranks, device, link, engine, all_reduce)


def add_to(app: typer.Typer) -> None:
    def add(function: Callable[..., Any], json_help: str = "", **settings: Any) -> None:
        app.command(function.__name__.replace("_", "-"), **settings)(command(function, json_help))

    add(profile, **SERVER_FLAGS)
    add(train)
    add(calibrate)
    add(evaluate, "File for the report.")
    add(shadow, "File for the report.")
    add(explain)
    add(check, "File for the report.", **SERVER_FLAGS)
    add(serve, **SERVER_FLAGS)
    add(config)
    add(demo)
    add(import_profile)
