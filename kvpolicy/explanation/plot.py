"""Draws the decision boundary as a figure. A module of its own because matplotlib is optional."""

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
"""Colours are saturated where one option costs 4.5 times the other."""


def draw(explanation: Explanation, file: Path) -> None:
    """Draw into an SVG or PNG file, by its ending; the same bytes for the same explanation."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    mesh = draw_choices(axes, explanation, "RdBu", "black")
    axes.set(
        xscale="log", xlabel="computed tokens of the victim", ylabel="running requests",
        title=f"{explanation.cost_model}: blocks of {explanation.question.situation.block_size}; dots: extrapolated",
    )  # fmt: skip
    bar = figure.colorbar(mesh, ax=axes, extend="both")
    bar.set_label(f"log(swap / recompute), {explanation.objective.text}: red swap, blue recompute")
    file_format = file.suffix.lower()[1:]
    with matplotlib.rc_context({"svg.hashsalt": "kvpolicy"}):
        figure.savefig(file, format=file_format, dpi=150, metadata={"Date": None} if file_format == "svg" else None)


def draw_choices(axes: Axes, explanation: Explanation, colours: str | Colormap, ink: str) -> QuadMesh:
    """Draw the ratio of costs over lengths and loads: a line where they are equal, dots where the model extrapolates,
    and a mark at the explained situation."""
    grid, situation = explanation.grid, explanation.question.situation
    norm = TwoSlopeNorm(0.0, -MAX_LOG, MAX_LOG)
    mesh = axes.pcolormesh(grid.tokens, grid.running, grid.log_ratio, norm=norm, cmap=colours, shading="nearest")
    lowest, highest = (extreme(value for row in grid.log_ratio for value in row) for extreme in (min, max))
    if lowest < 0 < highest:
        axes.contour(grid.tokens, grid.running, grid.log_ratio, levels=[0.0], colors=ink, linewidths=1.5)
    outside = [[float(value) for value in row] for row in grid.extrapolated]
    if any(value for row in outside for value in row):
        axes.contourf(grid.tokens, grid.running, outside, levels=[0.5, 1.5], colors="none", hatches=["..."])
    axes.plot([situation.computed_tokens], [situation.running_requests], marker="o", color=ink, markerfacecolor="white")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return mesh
