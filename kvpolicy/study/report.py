"""What a grid came to: a table for a person, JSON for a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kvpolicy.hardware.sheets import known_sheet
from kvpolicy.study.cache import Result
from kvpolicy.study.cell import Cell

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


def figures(results: Sequence[Result]) -> dict[str, float | None]:
    """Means over runs of what the table shows; None for what no run has, and over those runs that have it."""
    latencies = {
        f"{name}_{which}": _mean(one[f"{name}_s"][which] for one in results)
        for name in ("e2e", "ttft", "itl")
        for which in ("mean", "p99")
    }
    kinds = {kind: fmean(one["preemptions"].get(kind, 0) for one in results) for kind in ("recompute", "swap")}
    means = {name: _mean(one[name] for one in results) for name in ("throughput_tok_s", "recomputed_tokens")}
    wall_s = sum(one["simulator_wall_s"] for one in results)
    itl = {f"itl_{which}_ms": latencies[f"itl_{which}"] for which in ("mean", "p99")}
    return {
        **latencies,
        **kinds,
        **means,
        **{name: None if seconds is None else 1e3 * seconds for name, seconds in itl.items()},
        "moved_gb": fmean(one["moved_bytes"] for one in results) / 1e9,
        "speed": sum(one["makespan_s"] for one in results) / wall_s if wall_s > 0 else 0.0,
    }


def written(column: str, told: Mapping[str, float | None]) -> str:
    """One cell of the table; blank for what is not defined."""
    form = COLUMNS[column]
    name = form[1:].partition(":")[0]
    return "" if told[name] is None else form.format(**told)


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return fmean(found) if found else None


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
        rows.append([policy, *(written(column, told) for column in COLUMNS), str(len(results))])
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def server_words(serving: Mapping[str, Any], device: str) -> str:
    """What the server may take at a time; where no flag says it, as vLLM has it by the device."""
    known = known_sheet(device) is not None or device == "cpu"
    own = "vLLM 0.32's own for this device" if known else f"{device} is not known here: as for the smallest GPU"
    ahead = "one step ahead" if serving["asynchronous"] else "step by step"
    return (
        f"at most {serving['token_budget']} tokens a step and {serving['max_num_seqs']} requests, scheduling {ahead} "
        f"({own}, unless a flag says otherwise)"
    )


def left_out(one: Result) -> str | None:
    """Rows of the workload's file that made no request."""
    rows = one["rows"] or {}
    damaged, empty = rows.get("damaged", 0), rows.get("empty", 0)
    if not damaged and not empty:
        return None
    return (
        f"{one['inputs']['workload']}: of {rows['read']} rows read, {damaged} damaged ones were skipped and {empty} "
        "left out in which nothing was asked or answered"
    )


def beyond_warning(results: Sequence[Result]) -> str | None:
    """Where a hardware model of measured tables was asked for steps that they do not reach."""
    steps = sum(one["steps"] for one in results if one["extrapolated_steps"])
    beyond = sum(one["extrapolated_steps"] or 0 for one in results)
    if not beyond:
        return None
    return (
        f"{beyond} of {steps} steps ({beyond / steps:.1%}) lie beyond the hardware model's tables, where their "
        "times are physics carried on from the edge"
    )


def _notes(results: Sequence[Result]) -> list[str]:
    """What nobody measured and what cost models warned of, each once."""
    told = [f"server: {server_words(one['inputs']['serving'], one['device'])}" for one in results]
    told += [f"hardware: {fact}" for one in results for fact in one["facts"]]
    told += [f"not measured: {note}" for one in results for note in one["unmeasured"]]
    told += [f"warning: {note}" for one in results for note in one["warnings"]]
    told += [f"warning: {note}" for one in results if (note := left_out(one)) is not None]
    beyond = beyond_warning(results)
    told += [] if beyond is None else [f"warning: {beyond}"]
    return list(dict.fromkeys(told))
