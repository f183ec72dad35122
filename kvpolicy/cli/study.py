"""The commands that simulate and study: options to function calls. Nothing is decided here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

import kvpolicy
from kvpolicy.overflow import FIGURES
from kvpolicy.policy import FORMS
from kvpolicy.study.progress import bar

POLICIES = (
    f"{', '.join(FORMS)}, as for `kvpolicy evaluate`, the cost model analytic being the simulated engine's own; or "
    "oracle: the cheaper option by the simulator's own times"
)
WORKLOAD = (
    "FILE (Azure, Mooncake, BurstGPT, ShareGPT, agentic sessions, length tables, recorded traces; FORMAT:FILE says "
    "which) or the name of one that ships, with ?OPTION=VALUE&..., as azure-conversation-2023?n=500&rate=4"
)
HARDWARE = (
    "A folder of `kvpolicy import-profile`, a cost model (a folder, or the name of one that ships), or "
    "DEVICE[@LINK]:CONFIG, as H100-SXM@pcie5:path/to/config.json."
)
Hardware = Annotated[str, typer.Option(help=HARDWARE)]
SimulatedBy = Annotated[str, typer.Option(help="builtin, or vllm: vLLM's own scheduler on a virtual clock.")]
BlockSize = Annotated[int, typer.Option(help="Tokens per KV block.")]
SimulatedHostGib = Annotated[float | None, typer.Option(help="Host memory for evicted KV of one rank, GiB; 4.")]
TokenBudget = Annotated[
    int | None, typer.Option(help="Most tokens of a step (max_num_batched_tokens); vLLM's own for the device.")
]
MaxNumSeqs = Annotated[int | None, typer.Option(help="Most requests running at a time; vLLM's own for the device.")]
NoPrefixCaching = Annotated[bool, typer.Option("--no-prefix-caching", help="Without vLLM's prefix caching.")]
Scheduling = Annotated[str, typer.Option(help="fcfs or priority")]
Asynchronous = Annotated[
    bool | None, typer.Option("--async/--no-async", help="Schedule one step ahead; as vLLM does, on all but CPUs.")
]
Watermark = Annotated[
    float, typer.Option(help="Share of the blocks that stays free when a request is admitted beside others.")
]
Parts = Annotated[int, typer.Option(help="Cut every workload into so many successive parts, a run each.")]
Jobs = Annotated[int | None, typer.Option(help="Processes; one per core without it, 0 for none but this one.")]
OnRay = Annotated[str | None, typer.Option("--ray", metavar="ADDRESS", help="Run on that Ray cluster, or auto.")]
Cache = Annotated[Path | None, typer.Option(help="Folder of finished runs; the user's cache folder without it.")]

INTERRUPTED = 130
"""What shells make of a program that Ctrl-C ended."""


def simulate(
    policy: Annotated[list[str], typer.Option(help=f"{POLICIES}. May be given several times.")],
    kv_blocks: Annotated[list[int], typer.Option(help="Usable KV blocks of the device. May be given several times.")],
    hardware: Hardware,
    workload: Annotated[list[str] | None, typer.Option(help=f"{WORKLOAD}. May be given several times.")] = None,
    requests: Annotated[
        list[Path] | None,
        typer.Option(metavar="CSV", help="Replay a measured run: input_toks, output_toks, client_arrival_s."),
    ] = None,
    link: Annotated[
        list[str] | None, typer.Option(help="native, or BYTES_PER_S[,LATENCY_S]. May be given several times.")
    ] = None,
    engine: SimulatedBy = "builtin",
    block_size: BlockSize = 16,
    host_gib: SimulatedHostGib = None,
    host_blocks: Annotated[int | None, typer.Option(help="The same as a number of blocks.")] = None,
    token_budget: TokenBudget = None,
    max_num_seqs: MaxNumSeqs = None,
    no_prefix_caching: NoPrefixCaching = False,
    scheduling: Scheduling = "fcfs",
    asynchronous: Asynchronous = None,
    watermark: Watermark = 0.0,
    seeds: Annotated[int, typer.Option(help="Runs of each, drawn by seeds 0, 1, ...")] = 1,
    parts: Parts = 1,
    jobs: Jobs = None,
    ray: OnRay = None,
    out: Annotated[Path | None, typer.Option(help="Folder for traces, a sub-folder for each run.")] = None,
    cache: Cache = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Simulate also what was finished before.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")] = None,
) -> None:
    """Simulate workloads under policies, memories and links; a run that was cut off goes on where it stood."""
    with bar() as progress:
        report = kvpolicy.simulate(
            workloads=workload or [],
            policies=policy,
            kv_blocks=kv_blocks,
            hardware=hardware,
            links=link or ["native"],
            engine=engine,
            block_size=block_size,
            host_gib=host_gib,
            host_blocks=host_blocks,
            token_budget=token_budget,
            max_num_seqs=max_num_seqs,
            prefix_caching=not no_prefix_caching,
            scheduling=scheduling,
            asynchronous=asynchronous,
            watermark=watermark,
            seeds=seeds,
            parts=parts,
            jobs=jobs,
            ray=ray,
            out=out,
            cache=cache,
            fresh=fresh,
            requests=requests or [],
            progress=progress,
        )
    typer.echo(report.text())
    _write(json_file, report)
    if not report.ok:
        raise typer.Exit(1)


def recommend(
    workload: Annotated[str, typer.Option(help=f"{WORKLOAD}.")],
    hardware: Hardware,
    kv_blocks: Annotated[int, typer.Option(help="Usable KV blocks of the device.")],
    policy: Annotated[
        list[str] | None, typer.Option(help="A policy to try beside the usual ones. May be given several times.")
    ] = None,
    link: Annotated[str, typer.Option(help="native, or BYTES_PER_S[,LATENCY_S].")] = "native",
    engine: SimulatedBy = "builtin",
    block_size: BlockSize = 16,
    host_gib: Annotated[float, typer.Option(help="Host memory for evicted KV of one rank, GiB.")] = 4.0,
    token_budget: TokenBudget = None,
    max_num_seqs: MaxNumSeqs = None,
    no_prefix_caching: NoPrefixCaching = False,
    scheduling: Scheduling = "fcfs",
    asynchronous: Asynchronous = None,
    watermark: Watermark = 0.0,
    seeds: Annotated[int, typer.Option(help="Runs of each part, drawn by seeds 0, 1, ...")] = 1,
    parts: Parts = 8,
    judge_by: Annotated[str, typer.Option(help="e2e, ttft, itl (mean seconds) or throughput")] = "e2e",
    least_gain: Annotated[
        float, typer.Option(help="Share by which a policy has to be better, with all of its interval.")
    ] = 0.01,
    jobs: Jobs = None,
    ray: OnRay = None,
    cache: Cache = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")] = None,
) -> None:
    """Simulate your own workload on your own hardware under every policy, and say which to deploy."""
    with bar() as progress:
        advice = kvpolicy.recommend(
            workload=workload,
            hardware=hardware,
            kv_blocks=kv_blocks,
            policies=policy or [],
            link=link,
            engine=engine,
            block_size=block_size,
            host_gib=host_gib,
            token_budget=token_budget,
            max_num_seqs=max_num_seqs,
            prefix_caching=not no_prefix_caching,
            scheduling=scheduling,
            asynchronous=asynchronous,
            watermark=watermark,
            seeds=seeds,
            parts=parts,
            judge_by=judge_by,
            least_gain=least_gain,
            jobs=jobs,
            ray=ray,
            cache=cache,
            progress=progress,
        )
    typer.echo(advice.text())
    _write(json_file, advice)


def characterize(
    out: Annotated[Path, typer.Option(help="Folder of the trace; an unfinished study there is taken up again.")],
    figure: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(FIGURES)} or all. May be given several times.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer levels and repeats: on two cores a quarter of an hour.")
    ] = False,
    llm: Annotated[Path | None, typer.Option(help="Folder of a model; without it a small one is made.")] = None,
    link: Annotated[
        str | None, typer.Option(help="Simulated link, BYTES_PER_S[,LATENCY_S]; native without it.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 0,
) -> None:
    """Measure what the overflow study's figures are drawn from, on a live engine."""
    try:
        found = kvpolicy.characterize(out=out, figures=figure or ["all"], quick=quick, llm=llm, link=link, seed=seed)
    except KeyboardInterrupt as stopped:
        typer.echo(f"\nkvpolicy: {stopped}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    typer.echo(found.text())


def report(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Folders of traces.")],
    out: Annotated[Path, typer.Option(help="The page, one HTML file that needs nothing else.")] = Path("report.html"),
    figures: Annotated[Path | None, typer.Option(metavar="DIR", help="Each figure as SVG and PNG, too.")] = None,
    cost_model: Annotated[
        str | None,
        typer.Option(
            help="Whose boundary, calibration and regret to show: a folder, or the name of one that ships; without it "
            "one is trained on two thirds of the states."
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the findings there.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 0,
) -> None:
    """Test the overflow study's findings on traces, draw its figures, and write one page."""
    found = kvpolicy.report(traces=traces, out=out, figures=figures, cost_model=cost_model, seed=seed)
    typer.echo(found.text())
    _write(json_file, found)


def _write(json_file: Path | None, report: Any) -> None:
    if json_file:
        json_file.write_text(json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n")


def add_to(app: typer.Typer) -> None:
    for command in (simulate, recommend, characterize, report):
        app.command()(command)
