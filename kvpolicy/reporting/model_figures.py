"""Figures of the cost model: decision boundary, calibration, regret. A module of its own: matplotlib is optional."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, ScalarFormatter

from kvpolicy.evaluation.replay import EvaluationReport
from kvpolicy.events import KINDS
from kvpolicy.explanation import Explanation
from kvpolicy.explanation.plot import MAX_LOG, draw_choices
from kvpolicy.reporting.figures import COLOURS, INK, MUTED, STYLE, colour, legend, marker, new_figure, plain_log
from kvpolicy.reporting.model_section import Predicted

CHOICE = LinearSegmentedColormap.from_list("choice", [COLOURS["swap"], "#eceff4", COLOURS["recompute"]])


def draw_boundary(explanation: Explanation) -> Figure:
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure, (axes,) = new_figure(3.9)
        mesh = draw_choices(axes, explanation, CHOICE, INK)
        mesh.set_rasterized(True)
        plain_log(axes)
        axes.set(xlabel="computed tokens of the victim", ylabel="running requests beside it")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        bar = figure.colorbar(mesh, ax=axes, extend="both", ticks=[-MAX_LOG, 0, MAX_LOG])
        bar.ax.set_yticklabels(["swap", "even", "recompute"])
        return figure


def draw_calibration(predictions: Sequence[Predicted]) -> Figure:
    with matplotlib.rc_context(STYLE):
        figure, (axes,) = new_figure(4.2)
        for kind in KINDS:
            of_kind = [prediction for prediction in predictions if prediction.kind == kind]
            if not of_kind:
                continue
            predicted_ms = [1e3 * prediction.predicted_s for prediction in of_kind]
            below_ms = [1e3 * max(0.0, prediction.predicted_s - prediction.low_s) for prediction in of_kind]
            above_ms = [1e3 * max(0.0, prediction.high_s - prediction.predicted_s) for prediction in of_kind]
            axes.errorbar(
                predicted_ms, [1e3 * prediction.measured_s for prediction in of_kind], xerr=[below_ms, above_ms],
                linestyle="", marker=marker(kind), color=colour(kind), label=kind, markersize=4.5, elinewidth=0.8,
                alpha=0.8,
            )  # fmt: skip
        ends = [
            1e3 * min(prediction.predicted_s for prediction in predictions),
            1e3 * max(prediction.predicted_s for prediction in predictions),
        ]
        # The identity is a curve where only one axis is logarithmic, hence many points.
        line = np.geomspace(max(ends[0], 1e-6), max(ends[1], 1e-6), 100)
        axes.plot(line, line, color=MUTED, linewidth=1.0, linestyle=":")
        _plain(axes, min(prediction.measured_s for prediction in predictions) > 0)
        axes.set(xlabel="predicted, ms, with 90% interval", ylabel="measured on states it did not see, ms")
        legend(axes)
        return figure


def _plain(axes: Axes, above_zero: bool) -> None:
    """Make the axes logarithmic with plain numbers; y stays linear where noise brought a measurement below 0."""
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        if axis is axes.yaxis and not above_zero:
            continue
        scale("log")
        axis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_locator(NullLocator())


def draw_regret(scores: EvaluationReport, names: Sequence[str]) -> Figure:
    """Draw mean regret per policy, by length above and by load below. ``names``: labels of the policies."""
    with matplotlib.rc_context(STYLE | {"axes.grid.axis": "y"}):
        figure, panels = new_figure(5.6, 2)
        for axes, cells, label in (
            (panels[0], "by_length", "tokens of the victim"),
            (panels[1], "by_load", "requests running beside it"),
        ):
            _bars(axes, [getattr(score, cells) for score in scores.policies], names)
            axes.set(xlabel=label, ylabel="mean regret, ms")
        legend(panels[0])
        return figure


def _bars(axes: Axes, cells: Sequence[Sequence[tuple[str, int, float, float]]], names: Sequence[str]) -> None:
    groups = [name for name, _, _, _ in cells[0]]
    width = 0.8 / len(names)
    for number, (name, bars) in enumerate(zip(names, cells, strict=True)):
        positions = [place + (number - (len(names) - 1) / 2) * width for place in range(len(groups))]
        axes.bar(positions, [1e3 * regret for _, _, regret, _ in bars], width * 0.92, color=colour(name), label=name)
    axes.axhline(0.0, color=INK, linewidth=0.8)
    axes.set_xticks(range(len(groups)), [f"{name}\n({count})" for name, count, _, _ in cells[0]], fontsize=9)
