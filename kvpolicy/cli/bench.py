"""The commands that put loads on live servers over HTTP. They only pass options to functions of the library."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

import kvpolicy
from kvpolicy import integrations, prefix_store
from kvpolicy.bench_settings import ARMS, ROUNDS_PER_START, AnalyticsLoad, BenchTarget, ChatLoad, Load, RateLoad
from kvpolicy.cli.flags import SERVER_FLAGS, command
from kvpolicy.settings import ServerSettings

Target = Annotated[
    str,
    typer.Argument(
        metavar="URL|LLM",
        help="A server that runs, as http://localhost:8000, or a model as for `vllm serve`, for which servers are "
        "started.",
    ),
]
Out = Annotated[Path, typer.Option(help="Folder of the results. An unfinished bench in it is resumed.")]
Arms = Annotated[list[str] | None, typer.Option("--arm", metavar="NAME[=JSON]", help=ARMS)]
RoundsPerStart = Annotated[int | None, typer.Option(metavar="N", help=ROUNDS_PER_START)]
SETTINGS = ServerSettings("always-swap")


def chat(
    context: typer.Context,
    target: Target,
    out: Out,
    arm: Arms = None,
    rounds_per_start: RoundsPerStart = None,
    load: ChatLoad = ChatLoad(),
    settings: ServerSettings = SETTINGS,
) -> Any:
    """Measure a chat: conversations whose whole window is sent back every turn. Flags that are not kvpolicy's are
    vLLM's, of the servers that are started."""
    return _bench(out, load, BenchTarget(target, tuple(arm or ()), settings, tuple(context.args), rounds_per_start))


def analytics(
    context: typer.Context,
    target: Target,
    out: Out,
    arm: Arms = None,
    rounds_per_start: RoundsPerStart = None,
    load: AnalyticsLoad = AnalyticsLoad(),
    settings: ServerSettings = SETTINGS,
) -> Any:
    """Measure an analysis: short texts behind one long prefix, with outputs of two tokens. Flags that are not
    kvpolicy's are vLLM's, of the servers that are started."""
    return _bench(out, load, BenchTarget(target, tuple(arm or ()), settings, tuple(context.args), rounds_per_start))


def rate(
    context: typer.Context,
    target: Target,
    out: Out,
    arm: Arms = None,
    rounds_per_start: RoundsPerStart = None,
    load: RateLoad = RateLoad(),
    settings: ServerSettings = SETTINGS,
) -> Any:
    """Measure latency and goodput by the rate at which requests arrive, until latency explodes. Flags that are not
    kvpolicy's are vLLM's, of the servers that are started."""
    return _bench(out, load, BenchTarget(target, tuple(arm or ()), settings, tuple(context.args), rounds_per_start))


def warm(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server that runs, as http://localhost:8000.")],
    prompt: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text of the prefix, or, in a .json file, its token ids.")
    ] = None,
    messages: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON list of the messages that begin a chat.")
    ] = None,
    keep_s: Annotated[
        float | None, typer.Option(help="Seconds for which it stays pinned. Default: as long as the server grants.")
    ] = None,
    class_name: Annotated[str | None, typer.Option("--class", help="Class that the request claims.")] = None,
    cache_salt: Annotated[
        str | None, typer.Option(help="Salt of those who are to find it. Default: those without one.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="One that the server names, as a LoRA adapter. Default: the first.")
    ] = None,
) -> Any:
    """Store a prefix on a server before anybody asks for it, and say what was stored and what it cost."""
    return prefix_store.warm(
        url,
        None if prompt is None else prefix_store.read_prompt(prompt),
        None if messages is None else prefix_store.read_messages(messages),
        keep_s,
        class_name,
        cache_salt,
        model,
    )


def _bench(out: Path, load: Load, at: BenchTarget) -> Any:
    with _interrupted_by_signals():
        report = integrations.bench(out, load, at)
    if find_spec("matplotlib") and find_spec("jinja2"):
        kvpolicy.report([out], out / "bench.html")
    return report


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """End by SIGTERM, and by SIGHUP where a terminal goes away, as by Control-C: control files are put back, and
    servers that were started are ended. One that is ignored stays so, as SIGHUP under nohup."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        by_key = signal.getsignal(signal.SIGINT)  # asyncio's own inside a run, which cancels it
        if not callable(by_key):  # ignored, as in the background of a shell
            raise KeyboardInterrupt
        by_key(signal.SIGINT, frame)

    heeded = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]
    before = [signal.signal(one, interrupt) for one in heeded]
    try:
        yield
    finally:
        for one, handler in zip(heeded, before, strict=True):
            signal.signal(one, handler)


def add_to(app: typer.Typer) -> None:
    group = typer.Typer(help="Measure live servers over HTTP.", no_args_is_help=True)
    for function in (chat, analytics, rate):
        group.command(**SERVER_FLAGS)(command(function, "File for the figures."))
    app.add_typer(group, name="bench")
    app.command()(command(warm, "File for the figures."))
