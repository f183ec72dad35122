"""What a grid came to: a table for a person, JSON for a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kvpolicy.study.cells import Cell
from kvpolicy.study.kept import Result

COLUMNS: Mapping[str, str] = {
    "tok/s": "{throughput_tok_s:.1f}",
    "e2e s": "{e2e_mean:.3g}",
    "e2e p99": "{e2e_p99:.3g}",
    "ttft s": "{ttft_mean:.3g}",
    "ttft p99": "{ttft_p99:.3g}",
    "itl ms": "{itl_mean_ms:.3g}",
    "itl p99": "{itl_p99_ms:.3g}",
    "recompute": "{recompute:.0f}",
    "swap": "{swap:.0f}",
    "again tok": "{recomputed_tokens:.0f}",
    "moved GB": "{moved_gb:.2f}",
    "x real": "{speed:.0f}",
}
"""Headings, and how each is written; means over a group's runs, also of the quantiles."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A cell that came to nothing."""

    cell: Cell
    error: str

    def text(self) -> str:
        return f"{self.cell.words()}: {self.error}"


@dataclass(frozen=True, slots=True)
class SweepReport:
    """Results in the order of the grid."""

    results: tuple[Result, ...]
    failed: tuple[Failed, ...]
    taken_up: int
    """How many were kept from an earlier run."""

    @property
    def ok(self) -> bool:
        return not self.failed

    def to_dict(self) -> dict[str, Any]:
        failures = [{"inputs": one.cell.inputs(), "error": one.error} for one in self.failed]
        return {"cells": list(self.results), "failed": failures, "taken_up": self.taken_up}

    def text(self) -> str:
        lines = []
        for place, groups in _places(self.results).items():
            lines += [place, *_table(groups), ""]
        lines += _notes(self.results)
        lines += [f"failed: {one.text()}" for one in self.failed]
        if self.taken_up:
            lines.append(f"{self.taken_up} of {len(self.results)} cells were kept from an earlier run")
        return "\n".join(lines).rstrip()


def figures(results: Sequence[Result]) -> dict[str, float]:
    """Means over runs of what the table shows."""
    latencies = {
        f"{name}_{which}": fmean(one[f"{name}_s"][which] for one in results)
        for name in ("e2e", "ttft", "itl")
        for which in ("mean", "p99")
    }
    kinds = {kind: fmean(one["preemptions"].get(kind, 0) for one in results) for kind in ("recompute", "swap")}
    means = {name: fmean(one[name] for one in results) for name in ("throughput_tok_s", "recomputed_tokens")}
    wall_s = sum(one["simulator_wall_s"] for one in results)
    return {
        **latencies,
        **kinds,
        **means,
        "itl_mean_ms": 1e3 * latencies["itl_mean"],
        "itl_p99_ms": 1e3 * latencies["itl_p99"],
        "moved_gb": fmean(one["moved_bytes"] for one in results) / 1e9,
        "speed": sum(one["makespan_s"] for one in results) / wall_s if wall_s > 0 else 0.0,
    }


def _places(results: Sequence[Result]) -> dict[str, dict[str, list[Result]]]:
    """Results by policy, by what else tells cells apart but chance."""
    found: dict[str, dict[str, list[Result]]] = {}
    for one in results:
        given = one["inputs"]
        place = (
            f"{given['workload']}, {given['kv_blocks']} blocks of {given['serving']['block_size']}, "
            f"link {given['link']}, {given['hardware']}, engine {given['engine']}"
        )
        found.setdefault(place, {}).setdefault(given["policy"], []).append(one)
    return found


def _table(groups: Mapping[str, Sequence[Result]]) -> list[str]:
    rows = [["policy", *COLUMNS, "runs"]]
    for policy, results in groups.items():
        told = figures(results)
        rows.append([policy, *(form.format(**told) for form in COLUMNS.values()), str(len(results))])
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def _notes(results: Sequence[Result]) -> list[str]:
    """What nobody measured and what cost models warned of, each once."""
    told = [f"hardware: {fact}" for one in results for fact in one["facts"]]
    told += [f"not measured: {note}" for one in results for note in one["unmeasured"]]
    told += [f"warning: {note}" for one in results for note in one["warnings"]]
    return list(dict.fromkeys(told))
