"""Results of a grid, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from kvpolicy.events import CAUSES
from kvpolicy.hardware.sheets import known_sheet
from kvpolicy.headroom import Headroom, mean
from kvpolicy.policy import spec_lines
from kvpolicy.study.cache import Result
from kvpolicy.study.cell import Cell
from kvpolicy.study.class_report import class_rows, class_warnings, has_classes, has_lengths, length_rows
from kvpolicy.study.hit_report import has_hits, hit_rows
from kvpolicy.study.server_flags import DEFAULT, cache_words, names_of, order_of, ordered_by

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
    "repeated tok": "{recomputed_tokens:.0f}",
    "moved GB": "{moved_gb:.2f}",
    "x real": "{speed:.0f}",
}
"""Column headings and formats. Figures, quantiles included, are means over the runs of a group."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A cell whose simulation failed."""

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
    """Number of results that were cached from an earlier run."""
    specs: Mapping[str, str] = field(default_factory=dict)
    """By label, what was given where the label does not say it; see :func:`kvpolicy.policy.specs_by_label`."""

    @property
    def ok(self) -> bool:
        return not self.failed

    def to_dict(self) -> dict[str, Any]:
        failures = [{"inputs": failure.cell.inputs(), "error": failure.error} for failure in self.failed]
        return {"cells": list(self.results), "failed": failures, "taken_up": self.taken_up, "specs": dict(self.specs)}

    def text(self) -> str:
        lines = []
        for place, groups in _by_place(self.results).items():
            lines += [
                place,
                *_table(groups),
                *class_table(groups),
                *length_table(groups),
                *hit_table(groups),
                *cause_table(groups),
                *to_win(groups),
                "",
            ]
        lines += [*spec_lines(self.specs), *_notes(self.results)]
        lines += [f"failed: {failure.text()}" for failure in self.failed]
        if self.taken_up:
            lines.append(f"{self.taken_up} of {len(self.results)} cells were cached from an earlier run")
        return "\n".join(lines).rstrip()


def figures(results: Sequence[Result]) -> dict[str, float | None]:
    """Means of the table's figures over the runs that have them; None for a figure that no run has."""
    latencies = {
        f"{name}_{statistic}": _mean(result[f"{name}_s"][statistic] for result in results)
        for name in ("e2e", "ttft", "itl")
        for statistic in ("mean", "p99")
    }
    kinds = {kind: fmean(result["preemptions"].get(kind, 0) for result in results) for kind in ("recompute", "swap")}
    means = {name: _mean(result[name] for result in results) for name in ("throughput_tok_s", "recomputed_tokens")}
    wall_s = sum(result["simulator_wall_s"] for result in results)
    itl = {f"itl_{statistic}_ms": latencies[f"itl_{statistic}"] for statistic in ("mean", "p99")}
    return {
        **latencies,
        **kinds,
        **means,
        **{name: None if seconds is None else 1e3 * seconds for name, seconds in itl.items()},
        "moved_gb": fmean(result["moved_bytes"] for result in results) / 1e9,
        "speed": sum(result["makespan_s"] for result in results) / wall_s if wall_s > 0 else 0.0,
    }


def figure_text(column: str, values: Mapping[str, float | None]) -> str:
    """A figure as written in the table; blank where it is undefined."""
    form = COLUMNS[column]
    name = form[1:].partition(":")[0]
    return "" if values[name] is None else form.format(**values)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _by_place(results: Sequence[Result]) -> dict[str, dict[str, list[Result]]]:
    """Results by policy, and by order where there are several, within each combination of workload, blocks, link,
    hardware and engine."""
    by_place: dict[str, dict[str, list[Result]]] = {}
    for result, name in zip(results, names_of([result["inputs"] for result in results]), strict=True):
        inputs = result["inputs"]
        place = (
            f"{inputs['workload']}, {inputs['kv_blocks']} blocks of {inputs['serving']['block_size']}, "
            f"link {inputs['link']}, {inputs['hardware']}, engine {inputs['engine']}"
        )
        by_place.setdefault(place, {}).setdefault(name, []).append(result)
    return by_place


def _table(groups: Mapping[str, Sequence[Result]]) -> list[str]:
    rows = [["policy", *COLUMNS, "runs"]]
    for policy, results in groups.items():
        values = figures(results)
        rows.append([policy, *(figure_text(column, values) for column in COLUMNS), str(len(results))])
    return aligned(rows)


def class_table(groups: Mapping[str, Sequence[Result]]) -> list[str]:
    """Lines of a table by class; none where it would say no more than that of all requests."""
    shown = any(has_classes(results) for results in groups.values())
    return ["by class", *aligned(class_rows(groups))] if shown else []


def length_table(groups: Mapping[str, Sequence[Result]]) -> list[str]:
    """Lines of a table by prompt length; none where all prompts are equally long."""
    shown = any(has_lengths(results) for results in groups.values())
    return ["by prompt length", *aligned(length_rows(groups))] if shown else []


def hit_table(groups: Mapping[str, Sequence[Result]]) -> list[str]:
    """Lines of a table of what was found of the prompts, by tier; none where nothing was."""
    shown = any(has_hits(results) for results in groups.values())
    return ["prompts found in caches", *aligned(hit_rows(groups))] if shown else []


def cause_table(groups: Mapping[str, Sequence[Result]]) -> list[str]:
    """Lines of a table of preemptions by cause, means over runs; none where nobody was displaced."""
    counts = {policy: [result["preemption_causes"] for result in results] for policy, results in groups.items()}
    if not any(one.get("displaced") for runs in counts.values() for one in runs):
        return []
    causes = [cause for cause in CAUSES if any(cause in one for runs in counts.values() for one in runs)]
    rows = [
        [policy, *(f"{fmean(one.get(cause, 0) for one in runs):.0f}" for cause in causes)]
        for policy, runs in counts.items()
    ]
    return ["preemptions by cause", *aligned([["policy", *causes], *rows])]


def to_win(groups: Mapping[str, Sequence[Result]]) -> list[str]:
    """What there is to win by choosing better than always-recompute, or than the first policy where that did not run:
    means over the runs, in one sentence for each order."""
    by_order: dict[str, dict[str, str]] = {}
    for name, results in groups.items():
        inputs = results[0]["inputs"]
        by_order.setdefault(order_of(inputs), {})[inputs["policy"]] = name
    names = [policies.get(DEFAULT, next(iter(policies.values()))) for policies in by_order.values()]
    return [f"under {name}, {mean_headroom(groups[name]).sentence()}" for name in names]


def mean_headroom(results: Sequence[Result]) -> Headroom:
    """What there was to win in these runs: their means."""
    return mean([Headroom(**result["headroom"]) for result in results])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: columns as wide as their widest entry, the first left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def server_words(serving: Mapping[str, Any], device: str) -> str:
    """The server's limits in words, where those without a flag come from, and its order and classes if they are set."""
    known = known_sheet(device) is not None or device == "cpu"
    own = "defaults of vLLM 0.32 for this device" if known else f"{device} is unknown: defaults for the smallest GPU"
    ahead = "one step ahead" if serving["asynchronous"] else "step by step"
    return (
        f"at most {serving['token_budget']} tokens a step and {serving['max_num_seqs']} requests, scheduling {ahead} "
        f"({own}, unless set by a flag)"
        + "".join(f", {name} {text}" for name, text in ordered_by(serving).items())
        + cache_words(serving)
    )


def left_out_warning(result: Result) -> str | None:
    """A warning about rows of the workload's file that gave no request; None without such rows."""
    rows = result["rows"] or {}
    damaged, empty = rows.get("damaged", 0), rows.get("empty", 0)
    if not damaged and not empty:
        return None
    return (
        f"{result['inputs']['workload']}: of {rows['read']} rows read, {damaged} damaged ones were skipped and {empty} "
        "without prompt or answer were left out"
    )


def beyond_warning(results: Sequence[Result]) -> str | None:
    """A warning about steps outside the tables of a measured hardware model; None without such steps."""
    steps = sum(result["steps"] for result in results if result["extrapolated_steps"])
    beyond = sum(result["extrapolated_steps"] or 0 for result in results)
    if not beyond:
        return None
    return (
        f"{beyond} of {steps} steps ({beyond / steps:.1%}) lie beyond the hardware model's tables, where "
        "their times are extrapolated by physics from the edge"
    )


def _notes(results: Sequence[Result]) -> list[str]:
    """Server limits, facts, unmeasured inputs and warnings of all results, each once."""
    lines = [f"server: {server_words(result['inputs']['serving'], result['device'])}" for result in results]
    lines += [f"hardware: {fact}" for result in results for fact in result["facts"]]
    lines += [f"not measured: {note}" for result in results for note in result["unmeasured"]]
    lines += [f"warning: {note}" for result in results for note in result["warnings"]]
    lines += [f"warning: {note}" for result in results if (note := left_out_warning(result)) is not None]
    lines += [f"warning: {note}" for note in class_warnings(results)]
    beyond = beyond_warning(results)
    lines += [] if beyond is None else [f"warning: {beyond}"]
    return list(dict.fromkeys(lines))
