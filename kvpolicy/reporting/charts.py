"""Interactive charts of the pages, from the figures that matplotlib drew: values on hover, zoom, series to switch.

Called by :func:`kvpolicy.reporting.page.inline`. The static figure stays in the page, for print and without JavaScript.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import LineCollection, QuadMesh
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import StepPatch
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter

SYMBOLS = {"o": "circle", "s": "square", "^": "triangle-up", "v": "triangle-down", "D": "diamond"}
DASHES = {"-": "solid", "--": "dash", ":": "dot"}
PATTERNS = ("", "/", ".", "x", "-")
"""Bars differ by more than their colour."""
GAP, TITLE_GAP = 0.06, 0.09
"""Between panels, and above one with a title, as shares of the figure."""
PIXELS_PER_INCH = 88
MAX_ROWS = 40
"""Rows of a table that a series gets. A longer one is thinned evenly, and the table says so."""
Series = dict[str, Any]


@cache
def library() -> str:
    """plotly.js, compressed and in base64: 1.9 MB in place of 4.5; empty where plotly is not installed."""
    if find_spec("plotly") is None:
        return ""
    from plotly.offline import get_plotlyjs  # optional

    return b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


def with_chart(drawn: Markup, figure: Figure, label: str, inks: Mapping[str, str]) -> Markup:
    """The drawn figure with what a chart is made of, and a table of the same numbers.

    ``inks``: colours of the figure -> those of the page. A figure that is a map of colours stays as it was drawn.
    """
    if any(isinstance(part, QuadMesh) for axes in figure.axes for part in axes.collections):
        return drawn
    panels = [axes for axes in figure.axes if str(axes.yaxis.get_label_position()) != "right"]
    data: list[Series] = []
    layout: dict[str, Any] = {"height": round(PIXELS_PER_INCH * figure.get_size_inches()[1])}
    layout |= {"shapes": [], "annotations": list(_titles(panels))}
    for axes in figure.axes:
        # The second y axis of a panel has that panel's position, and follows the panels' own axes in number.
        bounds = axes.get_position().bounds
        number = 1 + next(at for at, panel in enumerate(panels) if panel.get_position().bounds == bounds)
        y = number if axes in panels else number + len(panels)
        _place(layout, axes, number, y, panels)
        for one in _series(axes):
            names = {"groups": _names(axes.xaxis, one["x"]), "rows": _names(axes.yaxis, one["y"])}
            placed = {"xaxis": _named("x", number), "yaxis": _named("y", y), "meta": axes.get_ylabel()}
            data.append({**one, **placed, **{axis: own for axis, own in names.items() if own}})
        layout["shapes"] += list(_lines_across(axes, number, y))
    shown: set[str] = set()
    for one in data:  # a legend has each name once
        one["showlegend"] = False
        one["first"] = one["name"] != "" and one["name"] not in shown
        shown.add(one["name"])
    chart = json.dumps(_inked({"data": data, "layout": layout}, inks)).replace("<", "\\u003c")
    return Markup(
        f'<div class="chart" data-label="{escape(label)}"><div class="static">{drawn}</div>'
        f'<script type="application/json">{chart}</script>{_table(data, panels[-1].get_xlabel())}</div>'
    )


def _named(axis: str, number: int) -> str:
    return axis if number == 1 else f"{axis}{number}"


def _inked(value: Any, inks: Mapping[str, str]) -> Any:
    """The page's colours by their names, without `var()`: the page resolves them in its light or dark theme."""
    if isinstance(value, dict):
        return {key: _inked(one, inks) for key, one in value.items()}
    if isinstance(value, list):
        return [_inked(one, inks) for one in value]
    return inks[value][4:-1] if isinstance(value, str) and value in inks else value


def _titles(panels: Sequence[Axes]) -> Iterator[dict[str, Any]]:
    for number, axes in enumerate(panels, 1):
        if axes.get_title(loc="left"):
            yield {
                "text": f"<b>{axes.get_title(loc='left')}</b>", "showarrow": False, "x": 0, "y": 1, "xanchor": "left",
                "yanchor": "bottom", "xref": f"{_named('x', number)} domain", "yref": f"{_named('y', number)} domain",
            }  # fmt: skip


def _place(layout: dict[str, Any], axes: Axes, number: int, y: int, panels: Sequence[Axes]) -> None:
    """Add the panel's axes. Panels of which only the last names its x axis share it."""
    top, height = 1 - (number - 1) / len(panels), 1 / len(panels)
    twin, shared = y > len(panels), not any(panel.get_xlabel() for panel in panels[:-1])
    following = panels[number] if number < len(panels) else None
    below = 0.0 if following is None else TITLE_GAP if following.get_title(loc="left") or not shared else GAP
    if not twin:
        layout[f"xaxis{number if number > 1 else ''}"] = {
            "title": {"text": axes.get_xlabel()},
            "anchor": _named("y", number),
            "showticklabels": following is None or not shared,
            **_scale(axes.xaxis),
            **({"matches": "x"} if number > 1 and shared else {}),
        }
    layout[f"yaxis{y if y > 1 else ''}"] = {
        "title": {"text": axes.get_ylabel()},
        "anchor": _named("x", number),
        **_scale(axes.yaxis),
        **({"overlaying": _named("y", number), "side": "right", "showgrid": False} if twin
           else {"domain": [top - height + min(below, height / 2), top]}),
    }  # fmt: skip


def _scale(axis: Axis) -> dict[str, Any]:
    low, high = axis.get_view_interval()
    scale: dict[str, Any] = {"type": "linear", "range": [float(low), float(high)]}
    if axis.get_scale() == "log":
        scale = {"type": "log", "range": [float(np.log10(low)), float(np.log10(high))], "exponentformat": "none"}
    if isinstance(axis.get_major_formatter(), (FixedFormatter, FuncFormatter)):
        places = [float(place) for place in axis.get_majorticklocs()]
        texts = axis.get_major_formatter().format_ticks(places)
        named = [(place, text) for place, text in zip(places, texts, strict=True) if text]
        scale |= {"tickvals": [place for place, _ in named],
                  "ticktext": [text.replace("\n", "<br>") for _, text in named]}  # fmt: skip
    return scale


def _names(axis: Axis, places: Sequence[float]) -> list[str]:
    """What each point belongs to, where the axis has names and no numbers: that of the nearest tick. Series of one
    name are drawn side by side."""
    formatter = axis.get_major_formatter()
    if not isinstance(axis.get_major_locator(), FixedLocator) or not isinstance(
        formatter, (FixedFormatter, FuncFormatter)
    ):
        return []
    ticks = _numbers(axis.get_majorticklocs())
    texts = [text.replace("\n", " ") for text in formatter.format_ticks(ticks)]
    return [texts[int(np.argmin(np.abs(np.asarray(ticks) - place)))] for place in places]


def _series(axes: Axes) -> Iterator[Series]:
    done: set[Line2D] = set()
    for number, container in enumerate(axes.containers):
        name = _name(container.get_label())
        if isinstance(container, ErrorbarContainer):
            line, caps, bars = container.lines
            done |= {line, *caps}
            yield _line(line, name) | dict(_errors(line, bars, container.has_xerr, container.has_yerr))
        elif isinstance(container, BarContainer):
            parts = container.patches
            yield {
                "type": "bar",
                "name": name,
                "x": [part.get_x() + part.get_width() / 2 for part in parts],
                "y": [part.get_height() for part in parts],
                "width": [part.get_width() for part in parts],
                "marker": {"color": to_hex(parts[0].get_facecolor()),
                           "pattern": {"shape": PATTERNS[number % len(PATTERNS)], "fillmode": "overlay"}},
            }  # fmt: skip
    for line in axes.lines:
        if line not in done and _of_data(line, axes):
            yield _line(line, _name(line.get_label()))
    for patch in axes.patches:
        if isinstance(patch, StepPatch):
            values, edges, _ = patch.get_data()
            yield {
                "type": "scatter", "mode": "lines", "name": "", "x": list(map(float, edges)),
                "y": [*map(float, values), float(values[-1])],
                "line": {"color": to_hex(patch.get_edgecolor()), "shape": "hv"},
            }  # fmt: skip


def _of_data(line: Line2D, axes: Axes) -> bool:
    return line.get_transform() == axes.transData


def _name(label: object) -> str:
    return "" if str(label).startswith("_") else str(label)


def _line(line: Line2D, name: str) -> Series:
    marker, style = str(line.get_marker()), str(line.get_linestyle())
    mode = "+".join(["lines"] * (style in DASHES) + ["markers"] * (marker in SYMBOLS))
    colour = to_hex(line.get_color())
    one: Series = {"type": "scatter", "mode": mode, "name": name, "opacity": line.get_alpha() or 1.0}
    one |= {"x": _numbers(line.get_xdata()), "y": _numbers(line.get_ydata())}
    one |= {"line": {"color": colour, "dash": DASHES.get(style, "solid"), "width": 1.8}}
    return one | {"marker": {"color": colour, "symbol": SYMBOLS.get(marker, "circle"), "size": 7}}


def _numbers(values: Any) -> list[float]:
    return [float(value) for value in np.asarray(values, dtype=float)]


def _errors(line: Line2D, bars: Sequence[LineCollection], x: bool, y: bool) -> Iterator[tuple[str, Any]]:
    named = [name for name, there in (("x", x), ("y", y)) if there]
    for name, bar in zip(named, bars, strict=True):
        at = 0 if name == "x" else 1
        middles = _numbers(line.get_xdata() if name == "x" else line.get_ydata())
        segments = [np.asarray(segment) for segment in bar.get_segments()]
        yield (
            f"error_{name}",
            {
                "type": "data", "symmetric": False, "thickness": 1.2, "width": 4,
                "array": [float(one[:, at].max()) - middle for one, middle in zip(segments, middles, strict=True)],
                "arrayminus": [middle - float(one[:, at].min()) for one, middle in zip(segments, middles, strict=True)],
            },
        )  # fmt: skip


def _lines_across(axes: Axes, x: int, y: int) -> Iterator[dict[str, Any]]:
    for line in axes.lines:
        if _of_data(line, axes):
            continue
        places = _numbers(line.get_xdata()), _numbers(line.get_ydata())
        upright = places[0][0] == places[0][-1]
        ends = {"xref": _named("x", x) + ("" if upright else " domain"), "x0": places[0][0], "x1": places[0][-1]}
        ends |= {"yref": _named("y", y) + (" domain" if upright else ""), "y0": places[1][0], "y1": places[1][-1]}
        yield {"type": "line", "line": {"color": to_hex(line.get_color()), "width": 1}, **ends}


def _table(data: Sequence[Series], x_label: str) -> str:
    """The same numbers to read: a row per point. Where the figure has a row per quantity, its place is no value."""
    heads, rows, thinned = ["quantity", "series", x_label, "value", "interval"], [], False
    if in_rows := all("rows" in one for one in data):
        heads.remove("value")
    for one in data:
        every = -(-len(one["x"]) // MAX_ROWS)
        thinned |= every > 1
        error = one.get("error_y") or one.get("error_x")
        middle = one["y"] if "error_y" in one else one["x"]
        for at in range(0, len(one["x"]), every):
            ends = "" if error is None else _ends(middle[at], error["arrayminus"][at], error["array"][at])
            quantity, x = (one[key][at] if key in one else "" for key in ("rows", "groups"))
            value = [] if in_rows else [f"{one['y'][at]:.4g}"]
            cells = (quantity or one["meta"], one["name"], x or f"{one['x'][at]:.4g}", *value, ends)
            rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f'<th scope="col">{escape(one)}</th>' for one in heads)
    note = f'<p class="small muted">Series of more than {MAX_ROWS} points are thinned evenly.</p>' if thinned else ""
    return (
        f'<details class="numbers"><summary>The numbers as a table</summary>{note}<div class="scroll" tabindex="0">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _ends(middle: float, below: float, above: float) -> str:
    return f"{middle - below:.4g} to {middle + above:.4g}" if below or above else ""
