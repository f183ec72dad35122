"""Errors of cost models on unseen data, compared with those of other regressors, in one run.

    python benchmarks/cost_accuracy.py [--trace FOLDER]... [--profiles FOLDER] [--json FILE] [--quick]

Traces: folders of `kvpolicy profile`. Profiles: a folder of measured operator times, layouts as in
``kvpolicy.simulator.hardware.layouts``. Errors are |predicted / measured - 1|. In range: grouped cross-validation,
repeats of a point or state never on both sides. Extrapolated: trained up to a quarter of the longest length, tested on
the rest; ``from 2x`` is the part of it at twice the longest trained length and beyond. Coverage is of finite intervals
alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import judged_tables
import judged_traces
from judged_tables import OURS, Effort
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as Grid

from kvpolicy.events import KINDS
from kvpolicy.simulator.hardware.operator_tables import Table, TableError, subsampled, tables_in
from kvpolicy.trace import TraceError

BARS: dict[str, dict[str, Any]] = {
    "in_range": {"at_least": 0.05, "aimed": 0.02},
    "extrapolated": {"at_least": 0.12, "aimed": 0.07},
    "coverage": {"at_least": [0.88, 0.92], "every_bin_over": 0.85},
    "beyond": {"share_of_bins": 0.9, "bin_holds": 0.85, "share_of_tables": 0.75, "error_from_2x": 0.12},
}
PARTS = ("in_range", "extrapolated")
ROWS_OF_MANY = 2000
"""A file of many operators is drawn down further: each operator is a table of its own."""
MANY = 5


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if not options.trace and options.profiles is None:
        print("give at least one --trace FOLDER or --profiles FOLDER", file=sys.stderr)
        return 2
    effort = Effort(folds=3, max_rows=1500, forest_trees=30) if options.quick else Effort()
    effort = Effort(effort.folds, options.rows or effort.max_rows, effort.forest_trees, options.seed)
    began = time.monotonic()
    try:
        summary = _summary(options.trace, options.profiles, effort)
    except (TableError, TraceError, ValueError) as error:
        print(f"cost_accuracy: {error}", file=sys.stderr)
        return 2
    summary["quick"] = options.quick
    summary["took_s"] = round(time.monotonic() - began, 1)
    _show(summary, options.each)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n")
    missed_targets = missed_bars(summary)
    if options.bars:
        print("\n".join(f"bar missed: {line}" for line in missed_targets) or "every bar is met")
    return int(options.bars and bool(missed_targets))


def missed_bars(summary: Mapping[str, Any]) -> list[str]:
    """Each bar that our models miss, in words: mean errors, coverage, and bins with enough states."""
    lines = _missed_beyond(summary["beyond"]) if summary["beyond"] else []
    for entry in summary["files"]:
        for part in PARTS:
            if entry[part] is not None:
                name, mean = f"{entry['file']}, {part.replace('_', ' ')}", entry[part]["families"][OURS]["mean"]
                lines += _missed_error(name, part, mean)
                lines += _missed_coverage(name, entry[part]["coverage"], entry[part]["worst_bin"])
    for trace in summary["traces"]:
        for part in PARTS:
            score = trace[part]["families"]["boosted"]
            name = f"{Path(trace['trace']).name}, {part.replace('_', ' ')}"
            for regressor, bins in score["coverage"].items():
                if regressor in KINDS:
                    lines += _missed_error(f"{name}, {regressor}", part, score[regressor]["mean"])
                bounded_shares = [b["covered"] for b in bins if b["bounded"] and b["n"] >= judged_tables.MIN_PER_BIN]
                lines += _missed_coverage(f"{name}, {regressor}", _covered(bins), min(bounded_shares, default=None))
    return lines


def _missed_error(name: str, part: str, mean: float) -> list[str]:
    bar = BARS[part]["at_least"]
    return [f"{name}: mean error {mean:.1%}, should be at most {bar:.0%}"] if mean > bar else []


def _missed_coverage(name: str, covered: float | None, worst: float | None) -> list[str]:
    if covered is None:
        return [f"{name}: 90% interval is not bounded, nothing is covered"]
    (low, high), least = BARS["coverage"]["at_least"], BARS["coverage"]["every_bin_over"]
    lines = []
    if not low <= covered <= high:
        lines.append(f"{name}: 90% interval holds {covered:.1%}, should be {low:.0%} to {high:.0%}")
    if worst is not None and worst < least:
        lines.append(f"{name}: 90% interval holds {worst:.1%} in its worst bin, should be {least:.0%} or more")
    return lines


def beyond_range(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Over all tables beyond the trained range: bins of :data:`judged_tables.MIN_PER_BIN` rows or more with a finite
    interval, and how many hold what they should; files with rows at twice the longest trained length or beyond, and
    how many have a mean error there that is low enough. None where no table is long enough."""
    judged = [entry for entry in tables if entry["extrapolated"] is not None]
    bins = [
        one
        for entry in judged
        for one in entry["extrapolated"]["coverage"]
        if one["bounded"] and one["n"] >= judged_tables.MIN_PER_BIN
    ]
    far: dict[str, list[tuple[int, float]]] = {}
    for entry in judged:
        if (score := entry["extrapolated"]["families"][OURS].get("from_2x")) is not None:
            far.setdefault(entry["file"], []).append((score["n"], score["mean"]))
    means = {name: sum(n * mean for n, mean in rows) / sum(n for n, _ in rows) for name, rows in far.items()}
    bars = BARS["beyond"]
    return {
        "bins": len(bins),
        "bins_that_hold": sum(one["covered"] >= bars["bin_holds"] for one in bins),
        "tables": len(means),
        "tables_within": sum(mean <= bars["error_from_2x"] for mean in means.values()),
        "error_from_2x": means,
    } if bins and means else None  # fmt: skip


def beyond_words(beyond: Mapping[str, Any]) -> list[str]:
    """Both counts beyond the trained range against their bars, one line each."""
    bars, lines = BARS["beyond"], []
    for what, holding, all_of, least in (
        (f"bins whose 90% interval holds {bars['bin_holds']:.0%} or more", "bins_that_hold", "bins", "share_of_bins"),
        (f"tables with a mean error of at most {bars['error_from_2x']:.0%} from twice the trained length on",
         "tables_within", "tables", "share_of_tables"),
    ):  # fmt: skip
        share = beyond[holding] / beyond[all_of]
        met = "met" if share >= bars[least] else "missed"
        lines.append(f"{what}: {beyond[holding]} of {beyond[all_of]}, {share:.1%}; bar {bars[least]:.0%}: {met}")
    return lines


def _missed_beyond(beyond: Mapping[str, Any]) -> list[str]:
    return [f"beyond the range, {line}" for line in beyond_words(beyond) if line.endswith("missed")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="append", default=[], metavar="FOLDER", help="a measured trace; repeatable")
    parser.add_argument("--profiles", type=Path, metavar="FOLDER", help="tables of measured operator times")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here")
    parser.add_argument("--quick", action="store_true", help="fewer rows and folds; figures are rougher")
    parser.add_argument("--bars", action="store_true", help="name each bar that is missed, and exit 1 for any")
    parser.add_argument("--each", action="store_true", help="one line per operator instead of one per file")
    parser.add_argument("--rows", type=int, metavar="N", help="draw tables down to about so many rows")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _summary(traces: Sequence[str], profiles: Path | None, effort: Effort) -> dict[str, Any]:
    tables, passed_over = tables_in(profiles) if profiles is not None else ([], [])
    sampled = [subsampled(table, _max_rows(table, tables, effort), effort.seed) for table in tables]
    with _progress() as progress:
        task = progress.add_task("", total=len(traces) + len(sampled) + bool(traces))
        judged_t, judged_o = [], []
        for name in traces:
            progress.update(task, description=Path(name).name)
            judged_t.append(judged_traces.judge(name, effort, lambda _: None))
            progress.advance(task)
        made_up = None
        if traces:
            progress.update(task, description="copies made up under a known law")
            made_up = judged_traces.made_up_copies(effort)
            progress.advance(task)
        for table in sampled:
            progress.update(task, description=f"{table.file}: {table.operator}")
            judged_o.append(judged_tables.judge(table, effort, lambda _: None))
            progress.advance(task)
    files = _by_file(judged_o)
    return {
        "error": "|predicted / measured - 1|", "bars": BARS, "ours": OURS, "seed": effort.seed,
        "traces": judged_t, "made_up_copies": made_up, "tables": judged_o, "files": files,
        "beyond": beyond_range(judged_o), "passed_over": passed_over,
    }  # fmt: skip


def _max_rows(table: Table, tables: Sequence[Table], effort: Effort) -> int:
    siblings = sum(other.file == table.file for other in tables)
    return min(effort.max_rows, ROWS_OF_MANY) if siblings >= MANY else effort.max_rows


def _progress() -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _by_file(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Errors of all rows of a file together, and which of its operators are above the bar."""
    files = []
    for name in dict.fromkeys(entry["file"] for entry in rows):
        file_rows = [entry for entry in rows if entry["file"] == name]
        row: dict[str, Any] = {
            "file": name,
            "operators": len(file_rows),
            "rows": sum(entry["rows"] for entry in file_rows),
        }
        for part in ("in_range", "extrapolated"):
            with_it = [entry for entry in file_rows if entry[part] is not None]
            row[part] = _pooled(with_it, part) if with_it else None
        files.append(row)
    return files


def _pooled(tables: Sequence[Mapping[str, Any]], part: str) -> dict[str, Any]:
    bar = BARS[part]
    families: dict[str, Any] = {}
    for family in tables[0][part]["families"]:
        scores = [entry[part]["families"][family] for entry in tables]
        rows = sum(score["n"] for score in scores)
        families[family] = {
            "n": rows,
            "mean": sum(score["n"] * score["mean"] for score in scores) / rows,
            "bias": sum(score["n"] * score["bias"] for score in scores) / rows,
            "worst_operator_mean": max(score["mean"] for score in scores),
        }
    bins = [entry for table in tables for entry in table[part]["coverage"] if entry["bounded"]]
    count = sum(entry["n"] for entry in bins)
    mean = families[OURS]["mean"]
    return {
        "families": families,
        "coverage": sum(entry["n"] * entry["covered"] for entry in bins) / count if count else None,
        "worst_bin": min(
            (entry["covered"] for entry in bins if entry["n"] >= judged_tables.MIN_PER_BIN),
            default=None,
        ),
        "at_least": mean <= bar["at_least"],
        "aimed": mean <= bar["aimed"],
        "operators_above": [
            f"{entry['operator']} {entry[part]['families'][OURS]['mean']:.1%}"
            for entry in tables
            if entry[part]["families"][OURS]["mean"] > bar["at_least"]
        ],
    }


# ---- for a person ----


def _show(summary: Mapping[str, Any], each: bool) -> None:
    console = Console(width=None if sys.stdout.isatty() else 200)
    for trace in summary["traces"]:
        _show_trace(console, trace)
    if summary["made_up_copies"]:
        _show_segments(console, "copies made up under a known law (not measured)", summary["made_up_copies"])
    for part, title in (("in_range", "in range"), ("extrapolated", "extrapolated in length")):
        rows = [entry for entry in summary["tables" if each else "files"] if entry[part] is not None]
        if rows:
            console.print(_grid(part, title, rows, each))
    for line in beyond_words(summary["beyond"]) if summary["beyond"] else ():
        console.print(f"beyond the range, {line}", markup=False)
    for entry in summary["files"]:
        for part in ("in_range", "extrapolated"):
            if entry[part] is not None and entry[part]["operators_above"]:
                console.print(f"above the bar {part.replace('_', ' ')}: {entry['file']}: "
                              f"{', '.join(entry[part]['operators_above'])}", markup=False)  # fmt: skip
    for note in dict.fromkeys(f"{t['file']}: {note}" for t in summary["tables"] for note in t["left_out"]):
        console.print(note, markup=False)
    for note in summary["passed_over"]:
        console.print(f"passed over: {note}", markup=False)
    console.print(f"took {summary['took_s']} s")


def _grid(part: str, title: str, rows: Sequence[Mapping[str, Any]], each: bool) -> Grid:
    bar = BARS[part]
    grid = Grid(title=f"{title}: mean error (at least {bar['at_least']:.0%}, aimed {bar['aimed']:.0%})")
    grid.add_column("table", overflow="fold", min_width=40)
    grid.add_column("tested", justify="right")
    families = list(rows[0][part]["families"])
    for family in families:
        grid.add_column(family, justify="right")
    grid.add_column("bias", justify="right")
    grid.add_column("90% holds", justify="right")
    grid.add_column("bar", justify="right")
    for entry in rows:
        scores = entry[part]["families"]
        mean = scores[OURS]["mean"]
        grid.add_row(
            f"{entry['file']} {entry['operator']}" if each else entry["file"], str(scores[OURS]["n"]),
            *(f"{scores[family]['mean']:.1%}" for family in families), f"{scores[OURS]['bias']:+.1%}",
            _percent(_covered(entry[part]["coverage"])),
            "aimed" if mean <= bar["aimed"] else "at least" if mean <= bar["at_least"] else "missed",
        )  # fmt: skip
    return grid


def _covered(coverage: Any) -> float | None:
    """Of a file, one number; of a table, by bin."""
    if not isinstance(coverage, list):
        return None if coverage is None else float(coverage)
    bounded_rows = [entry for entry in coverage if entry.get("bounded", True)]
    count = sum(entry["n"] for entry in bounded_rows)
    return sum(entry["n"] * entry["covered"] for entry in bounded_rows) / count if count else None


def _show_trace(console: Console, trace: Mapping[str, Any]) -> None:
    for part in ("in_range", "extrapolated"):
        scores = trace[part]["families"]
        states = scores["boosted"]["states"]
        grid = Grid(title=f"{Path(trace['trace']).name}, {part.replace('_', ' ')}, {states} states")
        for name in ("model", *(f"{kind} {what}" for kind in KINDS for what in ("mean", "p90", "bias", "90% holds"))):
            grid.add_column(name, justify="left" if name == "model" else "right")
        grid.add_column("ratio 90% holds", justify="right")
        grid.add_column("sign right", justify="right")
        grid.add_column("regret", justify="right")
        for name, score in scores.items():
            choices = (_percent(score["sign_accuracy"]), _percent(score["regret"]))
            grid.add_row(name, *_option_cells(score), _ratio_cell(score), *choices)
        console.print(grid)
    for direction, segments in trace["segment_bytes"].items():
        _show_segments(console, f"{Path(trace['trace']).name}, {direction}s", segments)


def _option_cells(score: Mapping[str, Any]) -> list[str]:
    cells = []
    for kind in KINDS:
        if kind not in score:
            cells += ["", "", "", ""]
            continue
        option_score, bins = score[kind], score.get("coverage", {}).get(kind)
        holds = "" if bins is None else _percent(_covered(bins))
        cells += [f"{option_score['mean']:.1%}", f"{option_score['p90']:.1%}", f"{option_score['bias']:+.1%}", holds]
    return cells


def _ratio_cell(score: Mapping[str, Any]) -> str:
    return _percent(_covered(score["coverage"]["ratio"])) if "coverage" in score else ""


def _show_segments(console: Console, title: str, segments: Mapping[str, Any]) -> None:
    sizes = segments["segment_bytes"]
    without, with_ = (segments[which][OURS]["mean"] for which in ("without", "with"))
    remark = "" if len(sizes) > 1 else "; all pieces are of one size, so that their effect cannot be seen"
    console.print(f"{title}: a copy's duration is missed by {without:.1%} without segment bytes, "
                  f"by {with_:.1%} with them, n {segments['n']}{remark}", markup=False)  # fmt: skip


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


if __name__ == "__main__":
    sys.exit(main())
