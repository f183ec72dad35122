"""The decision boundary as a figure. Apart, because matplotlib is optional."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import Colormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvpolicy.explanation.report import Explanation

MAX_LOG = 1.5
"""Colours are full where one option costs 4.5 times the other."""


def draw(found: Explanation, file: Path) -> None:
    """Into an SVG or PNG file, by its ending; the same bytes for the same explanation."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    shown = draw_choices(axes, found, "RdBu", "black")
    axes.set(
        xscale="log", xlabel="computed tokens of the victim", ylabel="running requests",
        title=f"{found.cost_model}: blocks of {found.asked.situation.block_size}; dots: extrapolated",
    )  # fmt: skip
    bar = figure.colorbar(shown, ax=axes, extend="both")
    bar.set_label(f"log(swap / recompute), {found.objective.text}: red swap, blue recompute")
    ending = file.suffix.lower()[1:]
    with matplotlib.rc_context({"svg.hashsalt": "kvpolicy"}):
        figure.savefig(file, format=ending, dpi=150, metadata={"Date": None} if ending == "svg" else None)


def draw_choices(axes: Axes, found: Explanation, colours: str | Colormap, ink: str) -> QuadMesh:
    """The cheaper option over lengths and loads: the line between them, dots where the model guesses, and a mark at the
    situation that was asked about."""
    grid, one = found.grid, found.asked.situation
    norm = TwoSlopeNorm(0.0, -MAX_LOG, MAX_LOG)
    shown = axes.pcolormesh(grid.tokens, grid.running, grid.log_ratio, norm=norm, cmap=colours, shading="nearest")
    lowest, highest = (of(value for row in grid.log_ratio for value in row) for of in (min, max))
    if lowest < 0 < highest:
        axes.contour(grid.tokens, grid.running, grid.log_ratio, levels=[0.0], colors=ink, linewidths=1.5)
    outside = [[float(value) for value in row] for row in grid.extrapolated]
    if any(value for row in outside for value in row):
        axes.contourf(grid.tokens, grid.running, outside, levels=[0.5, 1.5], colors="none", hatches=["..."])
    axes.plot([one.computed_tokens], [one.running_requests], marker="o", color=ink, markerfacecolor="white")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return shown
