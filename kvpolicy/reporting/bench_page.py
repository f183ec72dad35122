"""The page and the figures of a bench over HTTP, from its bench.json. A module of its own: matplotlib is optional.

Called by :mod:`kvpolicy.reporting.pipeline`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from jinja2 import TemplateError
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvpolicy.bench_warnings import warnings
from kvpolicy.errors import InputError
from kvpolicy.prefix_hits import hit_rates
from kvpolicy.reporting.figures import COLOURS, INK, LEARNED, MUTED, STYLE, legend, mean_and_half, new_figure, write
from kvpolicy.reporting.page import inline, templates
from kvpolicy.stats import known_ratio, unit_of
from kvpolicy.stored_values import read_json, reason_of
from kvpolicy.version import __version__

LINES = (INK, COLOURS["swap"], LEARNED, COLOURS["recompute"], MUTED)
"""Colours of the arms, or of the values of what is not on an axis."""
MARKS = "os^Dv"
"""Their marks: see :func:`_look`."""
BINS = 12
"""Parts of a run's time in each of which a hit rate is drawn."""
FIFTHS = 5
"""Those of the table beside the drawing."""
FIGURES: Mapping[str, Mapping[str, str]] = {
    "chat": {
        "messages_s": "messages per second",
        "steady_ttft_s.mean": "mean time to first token while everybody chats, s",
        "steady_e2e_s.mean": "mean end-to-end time while everybody chats, s",
        "ttft_s.mean": "mean time to first token, s",
        "e2e_s.mean": "mean end-to-end time, s",
        "hit_rate": "tokens found in a cache",
    },
    "analytics": {
        "requests_s": "requests per second",
        "e2e_s.mean": "mean time per request, s",
        "cpu_s": "seconds of the server's processors",
    },
    "rate": {
        "e2e_per_token_s.mean": "mean s per output token, end to end",
        "ttft_s.p50": "time to first token, median, s",
        "ttft_s.p99": "time to first token, p99, s",
        "itl_s.mean": "mean time between tokens, s",
        "goodput_req_s": "requests per second, in time",
        "requests_s": "requests finished per second",
    },
}
"""Figures of a run that are drawn and in the table, and what they are called."""
LEADS = {
    "chat": ("A chat", "Conversations whose whole window is sent back every turn."),
    "analytics": ("An analysis", "Short texts behind one long prefix, with short outputs."),
    "rate": ("Latency by rate", "Requests that arrive at a rate, whatever the server does."),
    "clients": ("Latency by clients", "Each client sends its next request when it has its answer."),
}
"""Title and first sentence of a page, by kind; ``clients``: of a rate whose cells are numbers of clients."""
AXES = {
    "chatters": "people who chat",
    "prefixed": "share that is prefixed",
    "prefix_tokens": "tokens of the prefix",
    "rate": "requests that arrive per second",
    "concurrency": "clients",
}
SHORT = {"chatters": "{} people", "prefixed": "{:.0%} prefixed"}
"""Values of the names of a chat's cells, in the legend and the title of a drawing."""
LATENCIES = ("e2e_per_token_s.mean", "ttft_s.p50", "ttft_s.p99")
SHOWN = 20.0
"""Latencies by rate are drawn up to so many times the lowest one, so that what is below the explosion can be seen."""
Run = Mapping[str, Any]


def write_page(results_file: Path, out: Path, figures: Path | None) -> tuple[Path, ...]:
    """Write the page of a bench; ``figures``: a folder for each figure as SVG and PNG. Raises InputError."""
    try:
        results = read_json(results_file)
        if not results["runs"]:
            raise InputError("has no run")
        with matplotlib.rc_context(STYLE):
            drawings = dict(_drawings(results))
        page = _rendered(results, drawings)
    # What the file should be is not written down field by field: a bench wrote it.
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, TemplateError) as error:
        raise InputError(f"{results_file}: {reason_of(error)}; should be what `kvpolicy bench` writes") from error
    out.write_text(page, encoding="utf-8")
    if figures is None:
        return ()
    figures.mkdir(parents=True, exist_ok=True)
    return tuple(path for name, (_, figure) in drawings.items() for path in write(figure, figures, name))


def _rendered(results: Run, drawings: Mapping[str, tuple[str, Figure]]) -> str:
    title, lead = LEADS["clients" if "concurrency" in results["runs"][0]["cell"] else results["kind"]]
    return str(
        templates()
        .get_template("bench.html.j2")
        .render(
            kind=results["kind"],
            title=title,
            lead=lead,
            model=results["model"],
            target=results["target"],
            arms=results["arms"],
            drawings=[(title, inline(figure, name, title)) for name, (title, figure) in drawings.items()],
            table=_table(results),
            hits=_hit_table(results),
            warnings=warnings(results),
            prices=results.get("prices"),
            ratios=list(_ratios(results)),
            unit=unit_of(len({_start(run) for run in results["runs"]})),
            tokens=_tokens(results),
            errors=[
                f"{run['arm']}: {count} x {why}" for run in results["runs"] for why, count in run["errors"].items()
            ],
            version=__version__,
        )
    )


def _value(run: Run, figure: str) -> float | None:
    """None where it is undefined, or an earlier version did not write it."""
    value: Any = run
    for name in figure.split("."):
        value = None if value is None else value.get(name)
    return None if value is None else float(value)


def _values(runs: Sequence[Run], figure: str) -> list[float]:
    return [value for run in runs if (value := _value(run, figure)) is not None]


def _start(run: Run) -> int:
    """Which start of the servers served it; 0 where they ran already, or an earlier version did not say."""
    return int(run.get("start", 0))


def _by_start(runs: Sequence[Run], figure: str) -> list[float]:
    """Values of runs over which an interval is taken: the mean of each start, or where there is one all of them."""
    starts = sorted({_start(run) for run in runs})
    if len(starts) < 2:
        return _values(runs, figure)
    by_start = (_values([run for run in runs if _start(run) == start], figure) for start in starts)
    return [fmean(values) for values in by_start if values]


def _of(results: Run, arm: str, cell: Mapping[str, Any]) -> list[Run]:
    runs = [run for run in results["runs"] if run["arm"] == arm and cell.items() <= run["cell"].items()]
    return sorted(runs, key=lambda run: run["round"])


def _cells(results: Run) -> list[dict[str, Any]]:
    seen = {tuple(run["cell"].items()): dict(run["cell"]) for run in results["runs"]}
    return [seen[key] for key in sorted(seen)]


def _drawings(results: Run) -> Iterator[tuple[str, tuple[str, Figure]]]:
    """The figures of the load by each name of the cells that has several values, the other one at its largest."""
    kind, cells = results["kind"], _cells(results)
    largest = {name: max(cell[name] for cell in cells) for name in cells[0]}
    axes = [name for name in cells[0] if len({cell[name] for cell in cells}) > 1] or [*cells[0]][:1]
    for axis in axes:
        fixed = {name: value for name, value in largest.items() if name != axis}
        file_end, title_end = (f"-by-{axis}", f", by {AXES[axis]}") if len(axes) > 1 else ("", "")
        for figure, title in FIGURES[kind].items():
            values = _values(results["runs"], figure)
            if any(values) or (values and kind != "rate"):
                drawing = _by_cell(results, figure, axis, fixed, title)
                yield _name(figure, kind) + file_end, (title + title_end, drawing)
        if kind == "chat":
            where = ", ".join(SHORT[name].format(value) for name, value in fixed.items())
            drawing = _hit_rates(results, axis, fixed)
            yield f"hit-rate-over-the-run{file_end}", (f"hit rate over the run, {where}", drawing)


def _name(figure: str, kind: str) -> str:
    """Of a drawing's file. Of a rate several figures of one latency are drawn."""
    return (figure if kind == "rate" else figure.split(".")[0]).replace("_", "-").replace(".", "-")


def _by_cell(results: Run, figure: str, axis: str, fixed: Mapping[str, Any], title: str) -> Figure:
    """A figure of a run by one name of the cells, the other as ``fixed``; a line per arm, with intervals."""
    drawing, (axes,) = new_figure(3.4)
    lowest: list[float] = []
    for number, arm in enumerate(results["arms"]):
        points = []
        for at in sorted({cell[axis] for cell in _cells(results)}):
            values = _by_start(_of(results, arm["name"], {**fixed, axis: at}), figure)
            if values:
                points.append((at, *mean_and_half(values)))
        if points:
            x, y, half = zip(*points, strict=True)
            lowest.append(min(y))
            axes.errorbar(x, y, half, **_look(number), capsize=3, label=arm["name"])
    axes.set_xlabel(", ".join([AXES[axis], *(f"{AXES[name]}: {value:g}" for name, value in fixed.items())]))
    axes.set_ylabel(title)
    axes.set_ylim(bottom=0)
    if "rate" in (axis, results["kind"]) and figure in LATENCIES and lowest:
        axes.set_ylim(top=min(axes.get_ylim()[1], SHOWN * min(lowest)))
    legend(axes)
    return drawing


def _hit_rates(results: Run, axis: str, fixed: Mapping[str, Any]) -> Figure:
    """The share of tokens found in a cache over the time of a run, a panel per arm and a line per value of one name of
    the cells, the other as ``fixed``."""
    names = [arm["name"] for arm in results["arms"]]
    drawing, panels = new_figure(1.0 + 2.2 * len(names), len(names))
    for axes, name in zip(panels, names, strict=True):
        for number, at in enumerate(sorted({cell[axis] for cell in _cells(results)})):
            runs = _of(results, name, {**fixed, axis: at})
            points = [
                (place, rate)
                for place, rate in enumerate(hit_rates([run["lookups"] for run in runs], BINS))
                if rate is not None
            ]
            if points:
                x, y = zip(*(((place + 0.5) / BINS, rate) for place, rate in points), strict=True)
                axes.plot(x, y, **_look(number), label=SHORT[axis].format(at))
        _finish(axes, name)
    panels[-1].set_xlabel("share of the run's time")
    legend(panels[0])
    return drawing


def _look(number: int) -> dict[str, Any]:
    """Colour and mark of a line by its number. After all colours they begin anew with the next mark each, so that no
    two of 25 lines look the same."""
    mark = MARKS[(number + number // len(LINES)) % len(MARKS)]
    return {"color": LINES[number % len(LINES)], "marker": mark}


def _finish(axes: Axes, name: str) -> None:
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_ylabel(f"{name}: found")


def _hit_table(results: Run) -> dict[str, Any]:
    """The same as heads, and rows of texts, over all numbers of people; empty for a load of which it is not known."""
    rows = []
    for cell in _cells(results):
        for arm in results["arms"]:
            lookups = [run["lookups"] for run in _of(results, arm["name"], cell) if "lookups" in run]
            shown = ["" if rate is None else f"{rate:.1%}" for rate in hit_rates(lookups, FIFTHS)]
            if lookups:
                rows.append([*(f"{value:g}" for value in cell.values()), arm["name"], *shown])
    parts = [f"to {(number + 1) / FIFTHS:.0%}" for number in range(FIFTHS)]
    return {"heads": [*(AXES[name] for name in _cells(results)[0]), "arm", *parts], "rows": rows} if rows else {}


def _table(results: Run) -> dict[str, Any]:
    """Heads, and rows of texts: means over rounds."""
    cells, columns = _cells(results), FIGURES[results["kind"]]
    rows = []
    for cell in cells:
        for arm in results["arms"]:
            runs = _of(results, arm["name"], cell)
            means = [fmean(values) if (values := _values(runs, figure)) else None for figure in columns]
            shown = ["" if mean is None else f"{mean:.3g}" for mean in means]
            rows.append([*(f"{value:g}" for value in cell.values()), arm["name"], *shown])
    return {"heads": [*(AXES[name] for name in cells[0]), "arm", *columns.values()], "rows": rows}


def _ratios(results: Run) -> Iterator[str]:
    first, *others = [arm["name"] for arm in results["arms"]]
    for cell in _cells(results):
        where = ", ".join(f"{AXES[name]} {value:g}" for name, value in cell.items())
        for name in others:
            for figure, title in FIGURES[results["kind"]].items():
                above, below = ([_value(run, figure) for run in _of(results, arm, cell)] for arm in (name, first))
                ratio = known_ratio(above, below, [_start(run) for run in _of(results, first, cell)])
                if ratio is not None and figure != "hit_rate":
                    yield f"{where}: {title}, {name} over {first}: {ratio.text()}"


def _tokens(results: Run) -> str:
    found = [one for comparison in results["comparisons"] for one in comparison["tokens"].values()]
    if not found:
        return ""
    different = [at for one in found for at in one["different"]]
    gaps = [at["gap"] for at in different if at.get("gap") is not None]
    apart = f", where the two best log-probabilities are at most {max(gaps):.2g} apart" if gaps else ""
    return f"{sum(one['tokens'] for one in found)} tokens compared, {len(different)} conversations differ{apart}"
