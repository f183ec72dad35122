"""The page and the figures of a demo, from its demo.json. A module of its own: matplotlib is optional.

Called by :mod:`kvpolicy.reporting.pipeline`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from jinja2 import TemplateError
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from kvpolicy.errors import InputError
from kvpolicy.headroom import share_text
from kvpolicy.reporting.figures import COLOURS, INK, LEARNED, MUTED, STYLE, new_figure, write
from kvpolicy.reporting.page import inline, templates
from kvpolicy.stored_values import read_json, reason_of
from kvpolicy.version import __version__

MARKS: Sequence[tuple[str, str]] = ((MUTED, "s"), (COLOURS["swap"], "o"), (LEARNED, "D"))
"""Colour and mark of the arms, from the last one back: what the headline judges has the last one."""
NAMES: Mapping[str, str] = {
    "TTFT": "time to first token",
    "urgent TTFT": "urgent: time to first token",
    "urgent TTFT p99": "urgent: its p99",
    "e2e per token": "time per output token",
    "e2e": "end-to-end time",
    "e2e p99": "its p99",
    "tok/s": "tokens/s",
    "batch tok/s": "batch: tokens/s",
    "batch e2e": "batch: end-to-end time",
}
UNITS = {name: "" if "tok/s" in name else " ms" if "per token" in name else " s" for name in NAMES}
MORE_IS_BETTER = ("tok/s", "batch tok/s")
WIDE = 30.0
"""Ratio of the axis' ends from which on powers of ten alone are written."""
Results = Mapping[str, Any]


def write_page(results_file: Path, out: Path, figures: Path | None) -> tuple[Path, ...]:
    """Write the page of a demo; ``figures``: a folder for each figure as SVG and PNG. Raises InputError."""
    try:
        results = read_json(results_file)
        scenarios = {name: _scenario(one) for name, one in results["scenarios"].items()}
        headline, bound = [_headline(one) for one in results["headline"]], results["bound"]
        with matplotlib.rc_context(STYLE):
            drawings = {f"demo-{number}": _ratios(one) for number, one in enumerate(results["scenarios"].values())}
        page = (
            templates()
            .get_template("demo.html.j2")
            .render(
                kind=results["kind"],
                headline=headline,
                where=results["where"],
                cost=list(_cost(bound)),
                scenarios=[
                    {"name": name, **one, "drawing": inline(drawing, key, f"{name}: ratios over stock vLLM")}
                    for (name, one), (key, drawing) in zip(scenarios.items(), drawings.items(), strict=True)
                ],
                exactness=results["exactness"],
                machine=results.get("machine"),
                seconds=results["seconds"],
                version=__version__,
            )
        )
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, TemplateError) as error:
        raise InputError(f"{results_file}: {reason_of(error)}; should be what `kvpolicy demo` writes") from error
    out.write_text(page, encoding="utf-8")
    if figures is None:
        return ()
    figures.mkdir(parents=True, exist_ok=True)
    return tuple(path for name, figure in drawings.items() for path in write(figure, figures, name))


def _headline(entry: Results) -> dict[str, str]:
    verdict = "open" if _holds_one(entry) else "yes" if entry["ratio"] < 1 else "no"
    words = {"open": "could not be told", "yes": "shorter", "no": "longer"}[verdict]
    factor = 1 / entry["ratio"] if entry["ratio"] < 1 else entry["ratio"]
    return {
        "name": entry["name"],
        "verdict": verdict,
        "words": words if verdict == "open" else f"{factor:.3g} times {words}",
        "ratio": _ratio_text(entry["ratio"], entry),
    }


def _scenario(one: Results) -> dict[str, Any]:
    """Texts of a scenario's table: a row per figure, a column per arm."""
    stock, *others = one["arms"]
    rows = []
    for figure, values in one["figures"][stock].items():
        scale = 1e3 if UNITS[figure] == " ms" else 1.0
        cells = [_cell(f"{_number(scale * fmean(values))}{UNITS[figure]}")]
        for arm in others:
            ratio = one["ratios"][f"{figure} {arm} / {stock}"]
            ends = "" if ratio["low"] is None else f"{ratio['low']:.3g} to {ratio['high']:.3g}"
            cells.append(_cell(f"x {ratio['value']:.3g}", ends, _verdict(figure, ratio)))
        rows.append({"name": NAMES[figure], "cells": cells})
    counts = [one["policies"][arm]["preemptions"] for arm in one["arms"]]
    texts = [f"{sum(count.values())} ({count['swap']})" for count in counts]
    rows.append({"name": "preempted (swapped)", "cells": list(map(_cell, texts))})
    rounds = len(next(iter(one["figures"][stock].values())))
    return {"served": one["served"], "arms": one["arms"], "rows": rows, "rounds": rounds}


def _cell(text: str, ends: str = "", verdict: str = "") -> dict[str, str]:
    return {"text": text, "ends": ends, "verdict": verdict}


def _number(value: float) -> str:
    """Three significant digits, whole from a thousand on."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _verdict(figure: str, ratio: Results) -> str:
    if _holds_one(ratio):
        return "open"
    return "yes" if (ratio["value"] > 1) == (figure in MORE_IS_BETTER) else "no"


def _holds_one(ratio: Results) -> bool:
    return ratio["low"] is None or ratio["low"] <= 1 <= ratio["high"]


def _ratio_text(value: float, ends: Results) -> str:
    return f"{value:.3g}" if ends["low"] is None else f"{value:.3g} ({ends['low']:.3g} to {ends['high']:.3g})"


def _cost(bound: Results) -> Iterator[tuple[str, str]]:
    """What preemptions cost here: names and values."""
    if bound["tax"] is not None:
        yield "decoded tokens that were computed again (tax)", share_text(bound["tax"])
    if bound["price_ratio"] is not None:
        yield "a recomputed token over a decoded one (p / d)", f"{bound['price_ratio']:.2g}"
    if bound["bound"] is not None:
        yield "throughput that choosing between recompute and swap can win at most", share_text(bound["bound"])
    if bound["forecast"] is not None:
        yield "throughput that is likely to be won by it", share_text(bound["forecast"])
    if bound["unknown"]:
        yield "what of this is not known", bound["unknown"]


def _ratios(one: Results) -> Figure:
    """Ratios over stock vLLM with their intervals, on a logarithmic axis: a row per figure, a mark per arm."""
    stock, *others = one["arms"]
    names = list(one["figures"][stock])
    drawing, (axes,) = new_figure(1.2 + 0.55 * len(names))
    for number, arm in enumerate(others):
        colour, mark = MARKS[len(MARKS) - len(others) + number]
        ratios = [one["ratios"][f"{figure} {arm} / {stock}"] for figure in names]
        values = [ratio["value"] for ratio in ratios]
        ends = [(ratio["value"],) * 2 if ratio["low"] is None else (ratio["low"], ratio["high"]) for ratio in ratios]
        below = [value - low for value, (low, _) in zip(values, ends, strict=True)]
        above = [high - value for value, (_, high) in zip(values, ends, strict=True)]
        rows = [row + 0.22 * (number - (len(others) - 1) / 2) for row in range(len(names))]
        axes.errorbar(
            values, rows, xerr=[below, above], color=colour, marker=mark, linestyle="", elinewidth=2, label=arm
        )
    axes.axvline(1.0, color=INK, linewidth=1)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > WIDE else (1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    axes.set_yticks(range(len(names)), [NAMES[figure] for figure in names])
    axes.invert_yaxis()
    axes.set_xlabel("over stock vLLM (1 is equal)")
    drawing.legend(loc="outside upper left", ncols=2, fontsize=10.5)
    return drawing
