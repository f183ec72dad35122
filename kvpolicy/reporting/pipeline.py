"""`kvpolicy report`: traces to verdicts, figures and a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from kvpolicy import trace as traces
from kvpolicy.errors import InputError
from kvpolicy.evaluation.displacements import displacements_of
from kvpolicy.evaluation.log_headroom import served_headrooms, served_lines
from kvpolicy.fields import AMOUNT, WrongValue, refuse_no_path, refuse_no_paths, refuse_non_integer, refuse_other
from kvpolicy.hardware import Geometry, fingerprint
from kvpolicy.overflow import FIGURES
from kvpolicy.reporting.findings import PAPER, findings, missing
from kvpolicy.reporting.group import Group, link_name
from kvpolicy.reporting.measurements import material
from kvpolicy.reporting.model_section import Learned, learned, of_window
from kvpolicy.trace import Header, Trace, TraceError
from kvpolicy.trace.window import Window, joined, read_window


@dataclass(frozen=True, slots=True)
class StudyReport:
    """The findings of each group, and the files that were written."""

    groups: tuple[Group, ...]
    out: Path
    figures: tuple[Path, ...]
    window: Window | None = None
    """The window of time that all groups are of; None for whole traces."""

    def to_dict(self) -> dict[str, Any]:
        return {
            group.name: {
                "traces": [str(folder) for folder in group.folders],
                "window": None if self.window is None else asdict(self.window),
                "findings": [finding.to_dict() for finding in group.findings],
                "missing": dict(group.missing),
                "headroom": {state: won.to_dict() for state, won in group.headrooms.items()},
                "displacements": None if group.displacements is None else asdict(group.displacements),
            }
            for group in self.groups
        }

    def text(self) -> str:
        lines = [] if self.window is None else [self.window.text()]
        for group in self.groups:
            lines += [f"{group.name}: {group.verdict()}"]
            for figure in FIGURES:
                lines += [f"  {figure}: {PAPER[figure]}"] if group.findings_of(figure) else []
                lines += [f"    {finding.sentence()}" for finding in group.findings_of(figure)]
            lines += [f"  {figure} is not filled: {why}" for figure, why in group.missing]
            lines += [f"  {reason}" for reason in group.learned.lacking]
            lines += [f"  {line}" for line in served_lines(group.headrooms)]
            lines += [] if group.displacements is None else [f"  {line}" for line in group.displacements.lines()]
        lines.append(f"written: {self.out}" + (f" and {len(self.figures)} figure files" if self.figures else ""))
        return "\n".join(lines)


PAGES = {"bench.json": "bench_page", "demo.json": "demo_page"}
"""Files of results, of `kvpolicy bench` and `kvpolicy demo`, and the modules that make their pages."""


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The files that were written for a bench or a demo."""

    out: Path
    figures: tuple[Path, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"page": str(self.out), "figures": [str(path) for path in self.figures]}

    def text(self) -> str:
        return f"written: {self.out}" + (f" and {len(self.figures)} figure files" if self.figures else "")


def report(
    traces: Sequence[Path | str],
    out: Path | str = Path("report.html"),
    figures: Path | str | None = None,
    cost_model: str | Path | None = None,
    seed: int = 0,
    between: tuple[str, str] | None = None,
) -> StudyReport | BenchReport:
    """Test the study's findings on ``traces``, draw its figures, and write one page that needs nothing else. A single
    folder of `kvpolicy bench` or `kvpolicy demo` gets a page of its own.

    ``figures``: a folder to write each figure into as SVG and PNG. ``cost_model``: folder or name of the model whose
    boundary, calibration and regret are shown; None trains one on two thirds of the states. ``between``: only what
    servers recorded between two times such as ``("-2h", "end")``, see :mod:`kvpolicy.trace.window`.

    Raises TraceError for traces that cannot be read, InputError where matplotlib or Jinja is missing, WrongValue for
    ``out`` in a folder that does not exist.
    """
    refuse_no_paths("traces", traces)
    refuse_no_path("out", out)
    results = [Path(folder) / name for folder in traces for name in PAGES if (Path(folder) / name).exists()]
    if results:
        if between is not None:
            raise WrongValue("between", f"is given with {results[0]}, which is shown as a whole; it is for logs")
        return _results_report(traces, results, Path(out), figures)
    if cost_model is not None:
        refuse_other("cost_model", cost_model, (str, Path), "a folder or a name")
        cost_model = str(cost_model)
    page = _page()
    out = Path(out)
    _refuse_no_page(out)
    refuse_non_integer("seed", seed, AMOUNT)
    grouped = _grouped(traces)
    window = None
    if between is None:
        groups = tuple(_group(name, folders, cost_model, seed) for name, folders in grouped.items())
    else:
        found, window = read_window([folder for folders in grouped.values() for folder in folders], between)
        groups = tuple(_groups_of_window(grouped, found, cost_model, seed))
    if figures is not None:
        Path(figures).mkdir(parents=True, exist_ok=True)
    drawings = page.draw_all(groups)
    out.write_text(page.render(groups, drawings, seed, window), encoding="utf-8")
    written = () if figures is None else page.write_figures(drawings, Path(figures))
    return StudyReport(groups, out, written, window)


def _refuse_no_page(out: Path) -> None:
    """Raise WrongValue for a file that is no page, or cannot be written."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise WrongValue("out", f"is {out}, should end in .html")
    if not out.parent.is_dir():
        raise WrongValue("out", f"is {out}: there is no folder {out.parent}")


def _results_report(
    folders: Sequence[Path | str], results: Sequence[Path], out: Path, figures: Path | str | None
) -> BenchReport:
    if len(folders) > 1:
        what = results[0].stem
        raise InputError(f"{results[0].parent} has a {what}: a page shows one {what}, and no trace beside it")
    page = _page(PAGES[results[0].name])
    _refuse_no_page(out)
    written = page.write_page(results[0], out, None if figures is None else Path(figures))
    return BenchReport(out, written)


def _page(name: str = "page") -> Any:
    try:
        return import_module(f"kvpolicy.reporting.{name}")
    except ImportError as error:
        raise InputError(f"a report needs matplotlib and Jinja ({error}): pip install 'kvpolicy[plots]'") from error


def _grouped(folders: Sequence[Path | str]) -> dict[str, list[Path]]:
    """Folders grouped by machine, model and link. Names hold the link alone where it suffices to tell groups apart."""
    if not folders:
        raise TraceError("no trace was given")
    by_key: dict[tuple[str, str, str], list[Path]] = {}
    for folder in map(Path, folders):
        keys = {_key(Header.read(core / "header.json")) for core in traces.core_folders(folder)}
        if len(keys) > 1:
            raise TraceError(f"{folder}: its cores were measured on different machines, models or links")
        group_folders = by_key.setdefault(keys.pop(), [])
        if folder in group_folders:
            raise TraceError(f"{folder}: given twice")
        group_folders.append(folder)
    machines_differ = len({key[:2] for key in by_key}) > 1
    names = [f"{link}, {machine}, {model}" if machines_differ else link for machine, model, link in by_key]
    return dict(zip(names, by_key.values(), strict=True))


def _key(header: Header) -> tuple[str, str, str]:
    geometry = header.geometry
    model = f"{geometry['layers']} layers of {geometry['hidden']}, {_kv_size(header)}"
    return fingerprint(header.hardware), model, link_name(header)


def _kv_size(header: Header) -> str:
    """Bytes of KV cache for a token; of a block where windows or states share the blocks."""
    if header.block_bytes == header.block_size * Geometry.from_dict(header.geometry).kv_bytes_per_token:
        return f"{header.block_bytes / header.block_size:g} B/token"
    return f"{header.block_bytes} B/block"


def _groups_of_window(
    grouped: Mapping[str, Sequence[Path]], found: Mapping[str, Trace], cost_model: str | None, seed: int
) -> Iterator[Group]:
    """The groups without those that recorded nothing then. ``found``: what the others recorded, by folder."""
    for name, folders in grouped.items():
        if recorded := [folder for folder in folders if str(folder) in found]:
            trace = joined([found[str(folder)] for folder in recorded])
            yield _judged(name, recorded, trace, of_window(cost_model), seed)


def _group(name: str, folders: Sequence[Path], cost_model: str | None, seed: int) -> Group:
    return _judged(name, folders, traces.read(*folders), learned(folders, cost_model, seed), seed)


def _judged(name: str, folders: Sequence[Path], trace: Trace, judged: Learned, seed: int) -> Group:
    measurements = material(trace)
    rng = np.random.default_rng(seed)
    unfilled = tuple((figure, why) for figure in FIGURES if (why := missing(measurements, figure)))
    results = tuple(finding for figure in FIGURES for finding in findings(measurements, figure, rng))
    headrooms = served_headrooms(measurements.trace, judged.fitted)
    displaced = displacements_of([measurements.trace])
    return Group(name, tuple(folders), measurements, results, unfilled, judged, headrooms, displaced)
