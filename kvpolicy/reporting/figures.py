"""The study's five figures, drawn from a trace's material. A module of its own because matplotlib is optional."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from statistics import fmean
from textwrap import wrap
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

from kvpolicy.events import KINDS
from kvpolicy.overflow import BLOCK_SIZE, EVICTED_TOKENS, MEMORY, SEQUENCE_LENGTH, TIMELINE
from kvpolicy.reporting.findings import MOMENTS, arms_of, by_arm, lengths
from kvpolicy.reporting.measurements import Material, Overflow, ServedRun
from kvpolicy.stats import student_interval

INK, MUTED, GRID, PAPER = "#1b1d22", "#656b76", "#d8dce3", "#fefefd"
COLOURS = {"recompute": "#c2500e", "swap": "#0f69b4"}
LEARNED = "#0c8558"
MARKERS = {"recompute": "o", "swap": "s"}
WIDTH_IN = 5.6
"""Two figures fit side by side on a wide page, one on a phone, with legible text on both."""
SCALING_LETTERS = 84
"""Characters of a line of small print under a figure."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 11.5,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "savefig.facecolor": PAPER,
}


def draw(material: Material, figure: str) -> Figure:
    """Draw one of :data:`kvpolicy.overflow.FIGURES`. The material must fill it: see :func:`findings.missing`."""
    drawers: Mapping[str, Callable[[Material], Figure]] = {
        BLOCK_SIZE: _block_size,
        EVICTED_TOKENS: _evicted_tokens,
        SEQUENCE_LENGTH: _sequence_length,
        MEMORY: _memory,
        TIMELINE: _timeline,
    }
    with matplotlib.rc_context(STYLE):
        return drawers[figure](material)


def svg(figure: Figure, name: str, transparent: bool = False) -> str:
    """The figure as SVG text, deterministic. ``name`` makes its ids distinct from other figures' in the same page."""
    return _saved(figure, "svg", name, transparent).decode()


def write(figure: Figure, folder: Path, name: str) -> tuple[Path, Path]:
    """Write the figure as SVG and PNG; return both paths."""
    paths = folder / f"{name}.svg", folder / f"{name}.png"
    for path in paths:
        path.write_bytes(_saved(figure, path.suffix[1:], name, transparent=False))
    return paths


def _saved(figure: Figure, file_format: str, name: str, transparent: bool) -> bytes:
    buffer = BytesIO()
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": name}):
        metadata = {"Date": None} if file_format == "svg" else None
        figure.savefig(buffer, format=file_format, dpi=160, metadata=metadata, transparent=transparent)
    return buffer.getvalue()


def new_figure(height_in: float, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of the report's width with ``rows`` axes below each other."""
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    return figure, list(np.atleast_1d(figure.subplots(rows, 1)))


def colour(arm: str) -> str:
    """Colour of an option or of the policy that always takes it; any other policy has the learned policy's colour."""
    return COLOURS.get(arm.removeprefix("always-"), LEARNED)


def marker(arm: str) -> str:
    return MARKERS.get(arm.removeprefix("always-"), "^")


def mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95% t interval; the half is 0 for a single value."""
    if len(values) < 2:
        return fmean(values), 0.0
    mean, _, high = student_interval(values)
    return mean, high - mean


def legend(axes: Axes) -> None:
    """Name the series above the axes, where any has a name that Matplotlib shows: none that begins with "_"."""
    if not axes.get_legend_handles_labels()[0]:
        return
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=3,
        borderaxespad=0.1,
        handletextpad=0.4,
        columnspacing=1.2,
        handlelength=1.2,
    )


def plain_log(axes: Axes, levels: Sequence[float] | None = None) -> None:
    """Make the x axis logarithmic with plain numbers, with ticks at the levels where there are at most eight."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    if levels is not None and len(levels) <= 8:
        axes.xaxis.set_major_locator(matplotlib.ticker.FixedLocator(list(levels)))
        axes.xaxis.set_minor_locator(NullLocator())


def _sequence_length(material: Material) -> Figure:
    overflows = lengths(material)
    figure, (axes,) = new_figure(3.7)
    _costs(axes, overflows, lambda overflow: overflow.victim_tokens)
    running = sorted({overflow.running_requests + 1 for overflow in overflows})
    load_text = f"{running[0]} requests" if len(running) == 1 else f"{running[0]} to {running[-1]} requests running"
    axes.set_xlabel(f"tokens of the evicted request ({load_text})")
    return figure


def _evicted_tokens(material: Material) -> Figure:
    figure, (axes,) = new_figure(3.7)
    _costs(axes, material.overflows_of(EVICTED_TOKENS), lambda overflow: float(overflow.evicted_tokens))
    axes.set_xlabel("tokens evicted in one overflow")
    return figure


def _block_size(material: Material) -> Figure:
    overflows = material.overflows_of(BLOCK_SIZE)
    figure, (axes,) = new_figure(3.7)
    kinds = by_arm(overflows)
    _levels(axes, kinds["recompute"], lambda overflow: float(overflow.block_size), "recompute", "recompute")
    for pinned, name, line in ((True, "swap, pinned", "-"), (False, "swap, pageable", "--"), (None, "swap", "-")):
        windows = [overflow for overflow in kinds["swap"] if overflow.pinned is pinned]
        _levels(axes, windows, lambda overflow: float(overflow.block_size), "swap", name, line)
    plain_log(axes, sorted({overflow.block_size for overflow in overflows}))
    axes.set(xlabel="tokens per KV block (2 requests)", ylabel="overhead per overflow, ms")
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    legend(axes)
    return figure


def _costs(axes: Axes, overflows: Sequence[Overflow], x: Callable[[Overflow], float]) -> None:
    """Plot single windows as points, and means with intervals where there are few states with repeats."""
    few_states = len({overflow.state_id for overflow in overflows}) <= 12
    for kind, windows in by_arm(overflows).items():
        if few_states:
            _levels(axes, windows, x, kind, kind)
        points = [x(overflow) for overflow in windows], [1e3 * overflow.engine_s for overflow in windows]
        label = None if few_states else kind
        axes.plot(
            *points, linestyle="", marker=marker(kind), color=colour(kind), alpha=0.35 if few_states else 0.7,
            label=label, markersize=3.5 if few_states else 4.5, markeredgewidth=0,
        )  # fmt: skip
    plain_log(axes)
    axes.axhline(0.0, color=MUTED, linewidth=0.8)
    axes.set_ylabel("overhead per overflow, ms")
    legend(axes)


def _levels(
    axes: Axes, windows: Sequence[Overflow], x: Callable[[Overflow], float], arm: str, label: str, line: str = "-"
) -> None:
    groups: dict[str, list[Overflow]] = defaultdict(list)
    for overflow in windows:
        groups[overflow.state_id].append(overflow)
    if not groups:
        return
    ordered = sorted(
        (fmean(map(x, group)), *mean_and_half([1e3 * overflow.engine_s for overflow in group]))
        for group in groups.values()
    )
    x_means, mean, half = zip(*ordered, strict=True)
    axes.errorbar(
        x_means,
        mean,
        yerr=half,
        marker=marker(arm),
        color=colour(arm),
        linestyle=line,
        label=label,
        capsize=3,
        markersize=6,
    )


def _memory(material: Material) -> Figure:
    runs = material.served(MEMORY)
    figure, panels = new_figure(8.2, 3)
    quantities: Sequence[tuple[str, Callable[[ServedRun], float]]] = (
        ("overhead, s", lambda run: run.overhead_s),
        ("preemptions", lambda run: float(sum(run.preemptions.values()))),
        ("makespan, s", lambda run: run.makespan_s),
    )
    for axes, (name, quantity) in zip(panels, quantities, strict=True):
        for arm in arms_of(runs):
            levels = sorted({run.level for run in runs if run.arm == arm})
            values_by_level = [
                [quantity(run) for run in runs if run.arm == arm and run.level == level] for level in levels
            ]
            intervals = [mean_and_half(values) for values in values_by_level]
            axes.errorbar(
                levels, [mean for mean, _ in intervals], yerr=[half for _, half in intervals], marker=marker(arm),
                color=colour(arm), label=arm, capsize=3, markersize=6,
            )  # fmt: skip
        axes.set_ylabel(name)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        axes.set_xticks(sorted({run.level for run in runs}))
    legend(panels[0])
    panels[-1].set_xlabel(f"KV memory, % of what holds all {runs[0].requests} requests at full length")
    _scaling(figure, runs)
    return figure


def _timeline(material: Material) -> Figure:
    """The first run of each arm, with three axes each."""
    runs = material.served(TIMELINE)
    first = [min((run for run in runs if run.arm == arm), key=lambda run: run.repeat) for arm in arms_of(runs)]
    figure, panels = new_figure(5.4 * len(first), 3 * len(first))
    end_s = max(run.end_s[-1] for run in first)
    for number, run in enumerate(first):
        _panel(panels[3 * number : 3 * number + 3], run)
        for axes in panels[3 * number : 3 * number + 3]:
            axes.set_xlim(0.0, end_s)
    panels[-1].set_xlabel("seconds since the first step")
    _scaling(figure, first)
    return figure


def _scaling(figure: Figure, runs: Sequence[ServedRun]) -> None:
    """Write below the figure how its workload differs from the paper's."""
    notes = sorted({run.scaling for run in runs if run.scaling})
    if notes:
        lines = [line for note in notes for line in wrap(note, SCALING_LETTERS)]
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=9.5, color=MUTED)


def _panel(panels: Sequence[Axes], run: ServedRun) -> None:
    throughput, memory, requests = panels
    edges = np.linspace(0.0, run.end_s[-1], MOMENTS + 1)
    tokens, _ = np.histogram(run.end_s, edges, weights=run.decoded)
    throughput.stairs(tokens / np.diff(edges), edges, color=colour(run.arm), linewidth=1.4)
    throughput.set_ylabel("tokens/s")
    throughput.set_title(f"{run.arm} at {run.level}% memory", color=colour(run.arm))
    memory.plot(run.end_s, [100 * share for share in run.used_share], color=INK, linewidth=1.2, label="device KV, %")
    memory.set(ylabel="device KV, %", ylim=(0, 105))
    host = memory.twinx()
    host.spines["right"].set_visible(True)
    host.grid(False)
    host.plot(run.end_s, [size_bytes / 2**20 for size_bytes in run.host_bytes], color=COLOURS["swap"], linewidth=1.2)
    host.set_ylabel("host pool, MiB", color=COLOURS["swap"])
    host.set_ylim(bottom=0)
    requests.plot(run.end_s, run.running, color=INK, linewidth=1.2, label="running")
    requests.plot(run.end_s, run.waiting, color=MUTED, linewidth=1.2, linestyle="--", label="waiting")
    requests.set_ylabel("requests")
    requests.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    # Values below 0 position the marks of preemptions; they are no counts of requests.
    requests.yaxis.set_major_formatter(lambda value, _: f"{value:.0f}" if value >= 0 else "")
    _marks(requests, run)
    requests.legend(loc="upper right", ncols=2, fontsize=9, borderaxespad=0.1, columnspacing=1.0)


def _marks(axes: Axes, run: ServedRun) -> None:
    """Mark preemptions (triangles down) and returns of victims (triangles up), coloured by what was executed."""
    top = max(*run.running, *run.waiting, 1)
    axes.set_ylim(-0.2 * top, 1.5 * top)
    for marks, sign, name in ((run.preempted, "v", "preempted"), (run.resumed, "^", "back")):
        for kind in KINDS:
            times = [mark.time_s for mark in marks if mark.kind == kind]
            if times:
                y = [-0.1 * top] * len(times)
                axes.plot(
                    times, y, linestyle="", marker=sign, markersize=4, color=COLOURS[kind], label=f"{name}, {kind}",
                    markeredgewidth=0,
                )  # fmt: skip
