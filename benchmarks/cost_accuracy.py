"""How far cost models miss what they have not seen, beside what others use, in one run.

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
}
PARTS = ("in_range", "extrapolated")
ROWS_OF_MANY = 2000
"""A file of many operators is drawn down further: each operator is a table of its own."""
MANY = 5


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    if not asked.trace and asked.profiles is None:
        print("give at least one --trace FOLDER or --profiles FOLDER", file=sys.stderr)
        return 2
    effort = Effort(folds=3, max_rows=1500, forest_trees=30) if asked.quick else Effort()
    effort = Effort(effort.folds, asked.rows or effort.max_rows, effort.forest_trees, asked.seed)
    began = time.monotonic()
    try:
        summary = _summary(asked.trace, asked.profiles, effort)
    except (TableError, TraceError, ValueError) as error:
        print(f"cost_accuracy: {error}", file=sys.stderr)
        return 2
    summary["quick"] = asked.quick
    summary["took_s"] = round(time.monotonic() - began, 1)
    _show(summary, asked.each)
    if asked.json is not None:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n")
    missed = missed_bars(summary)
    if asked.bars:
        print("\n".join(f"bar missed: {line}" for line in missed) or "every bar is met")
    return int(asked.bars and bool(missed))


def missed_bars(summary: Mapping[str, Any]) -> list[str]:
    """Each bar that our models miss, in words: mean errors, coverage, and bins with states enough to tell."""
    found = []
    for one in summary["files"]:
        for part in PARTS:
            if one[part] is not None:
                name, mean = f"{one['file']}, {part.replace('_', ' ')}", one[part]["families"][OURS]["mean"]
                found += _missed_error(name, part, mean)
                found += _missed_coverage(name, one[part]["coverage"], one[part]["worst_bin"])
    for trace in summary["traces"]:
        for part in PARTS:
            score = trace[part]["families"]["boosted"]
            name = f"{Path(trace['trace']).name}, {part.replace('_', ' ')}"
            for of, bins in score["coverage"].items():
                if of in KINDS:
                    found += _missed_error(f"{name}, {of}", part, score[of]["mean"])
                telling = [b["covered"] for b in bins if b["bounded"] and b["n"] >= judged_tables.MIN_PER_BIN]
                found += _missed_coverage(f"{name}, {of}", _covered(bins), min(telling, default=None))
    return found


def _missed_error(name: str, part: str, mean: float) -> list[str]:
    bar = BARS[part]["at_least"]
    return [f"{name}: mean error {mean:.1%}, should be at most {bar:.0%}"] if mean > bar else []


def _missed_coverage(name: str, covered: float | None, worst: float | None) -> list[str]:
    if covered is None:
        return [f"{name}: 90% interval is not bounded, nothing is covered"]
    (low, high), least = BARS["coverage"]["at_least"], BARS["coverage"]["every_bin_over"]
    found = []
    if not low <= covered <= high:
        found.append(f"{name}: 90% interval holds {covered:.1%}, should be {low:.0%} to {high:.0%}")
    if worst is not None and worst < least:
        found.append(f"{name}: 90% interval holds {worst:.1%} in its worst bin, should be {least:.0%} or more")
    return found


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
    drawn = [subsampled(table, _max_rows(table, tables, effort), effort.seed) for table in tables]
    with _progress() as progress:
        task = progress.add_task("", total=len(traces) + len(drawn) + bool(traces))
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
        for table in drawn:
            progress.update(task, description=f"{table.file}: {table.operator}")
            judged_o.append(judged_tables.judge(table, effort, lambda _: None))
            progress.advance(task)
    files = _by_file(judged_o)
    return {
        "error": "|predicted / measured - 1|", "bars": BARS, "ours": OURS, "seed": effort.seed,
        "traces": judged_t, "made_up_copies": made_up, "tables": judged_o, "files": files,
        "passed_over": passed_over,
    }  # fmt: skip


def _max_rows(table: Table, tables: Sequence[Table], effort: Effort) -> int:
    siblings = sum(other.file == table.file for other in tables)
    return min(effort.max_rows, ROWS_OF_MANY) if siblings >= MANY else effort.max_rows


def _progress() -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _by_file(judged: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Errors of all rows of a file together, and which of its operators are above the bar."""
    found = []
    for name in dict.fromkeys(one["file"] for one in judged):
        mine = [one for one in judged if one["file"] == name]
        row: dict[str, Any] = {"file": name, "operators": len(mine), "rows": sum(one["rows"] for one in mine)}
        for part in ("in_range", "extrapolated"):
            with_it = [one for one in mine if one[part] is not None]
            row[part] = _pooled(with_it, part) if with_it else None
        found.append(row)
    return found


def _pooled(judged: Sequence[Mapping[str, Any]], part: str) -> dict[str, Any]:
    bar = BARS[part]
    families: dict[str, Any] = {}
    for family in judged[0][part]["families"]:
        scores = [one[part]["families"][family] for one in judged]
        rows = sum(score["n"] for score in scores)
        families[family] = {
            "n": rows,
            "mean": sum(score["n"] * score["mean"] for score in scores) / rows,
            "bias": sum(score["n"] * score["bias"] for score in scores) / rows,
            "worst_operator_mean": max(score["mean"] for score in scores),
        }
    bins = [one for table in judged for one in table[part]["coverage"] if one["bounded"]]
    tested = sum(one["n"] for one in bins)
    mean = families[OURS]["mean"]
    return {
        "families": families,
        "coverage": sum(one["n"] * one["covered"] for one in bins) / tested if tested else None,
        "worst_bin": min((one["covered"] for one in bins if one["n"] >= judged_tables.MIN_PER_BIN), default=None),
        "at_least": mean <= bar["at_least"],
        "aimed": mean <= bar["aimed"],
        "operators_above": [
            f"{one['operator']} {one[part]['families'][OURS]['mean']:.1%}"
            for one in judged
            if one[part]["families"][OURS]["mean"] > bar["at_least"]
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
        rows = [one for one in summary["tables" if each else "files"] if one[part] is not None]
        if rows:
            console.print(_grid(part, title, rows, each))
    for one in summary["files"]:
        for part in ("in_range", "extrapolated"):
            if one[part] is not None and one[part]["operators_above"]:
                console.print(f"above the bar {part.replace('_', ' ')}: {one['file']}: "
                              f"{', '.join(one[part]['operators_above'])}", markup=False)  # fmt: skip
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
    for one in rows:
        scores = one[part]["families"]
        mean = scores[OURS]["mean"]
        grid.add_row(
            f"{one['file']} {one['operator']}" if each else one["file"], str(scores[OURS]["n"]),
            *(f"{scores[family]['mean']:.1%}" for family in families), f"{scores[OURS]['bias']:+.1%}",
            _percent(_covered(one[part]["coverage"])),
            "aimed" if mean <= bar["aimed"] else "at least" if mean <= bar["at_least"] else "missed",
        )  # fmt: skip
    return grid


def _covered(coverage: Any) -> float | None:
    """Of a file, one number; of a table, by bin."""
    if not isinstance(coverage, list):
        return None if coverage is None else float(coverage)
    bounded = [one for one in coverage if one.get("bounded", True)]
    tested = sum(one["n"] for one in bounded)
    return sum(one["n"] * one["covered"] for one in bounded) / tested if tested else None


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
    for direction, found in trace["segment_bytes"].items():
        _show_segments(console, f"{Path(trace['trace']).name}, {direction}s", found)


def _option_cells(score: Mapping[str, Any]) -> list[str]:
    cells = []
    for kind in KINDS:
        if kind not in score:
            cells += ["", "", "", ""]
            continue
        one, bins = score[kind], score.get("coverage", {}).get(kind)
        holds = "" if bins is None else _percent(_covered(bins))
        cells += [f"{one['mean']:.1%}", f"{one['p90']:.1%}", f"{one['bias']:+.1%}", holds]
    return cells


def _ratio_cell(score: Mapping[str, Any]) -> str:
    return _percent(_covered(score["coverage"]["ratio"])) if "coverage" in score else ""


def _show_segments(console: Console, title: str, found: Mapping[str, Any]) -> None:
    sizes = found["segment_bytes"]
    without, with_ = (found[which][OURS]["mean"] for which in ("without", "with"))
    told = "" if len(sizes) > 1 else "; all pieces are of one size, so this cannot tell"
    console.print(f"{title}: a copy's duration is missed by {without:.1%} without segment bytes, "
                  f"by {with_:.1%} with them, n {found['n']}{told}", markup=False)  # fmt: skip


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


if __name__ == "__main__":
    sys.exit(main())
