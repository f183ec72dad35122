"""What a bench over HTTP found, as a table and as a dictionary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from math import isnan
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from kvpolicy.bench_warnings import unequal_cores, warnings, wrong_conversations
from kvpolicy.json_values import finite
from kvpolicy.latency import LengthBin, by_prompt_length, length_edges
from kvpolicy.prefix_hits import hit_rates
from kvpolicy.stats import Ratio, known_ratio, unit_of
from kvpolicy_vllm.bench.rate_sweep import sustained
from kvpolicy_vllm.bench.recorded_prices import sentence

WIDTH = 192
FIFTHS = 5
"""Parts of a run's time by which hit rates are in a table."""
COLUMNS: Mapping[str, Sequence[tuple[str, str, str]]] = {
    "chat": (
        ("messages/s", "messages_s", ".3g"),
        ("steady TTFT", "steady_ttft_s.mean", ".3g"),
        ("steady e2e", "steady_e2e_s.mean", ".3g"),
        ("TTFT s mean", "ttft_s.mean", ".3g"),
        ("p50", "ttft_s.p50", ".3g"),
        ("p99", "ttft_s.p99", ".3g"),
        ("later turns", "later_ttft_s.mean", ".3g"),
        ("e2e s mean", "e2e_s.mean", ".3g"),
        ("p99", "e2e_s.p99", ".3g"),
        ("window", "window_tokens.mean", ".0f"),
        ("new", "message_tokens.mean", ".0f"),
        ("in use", "open_tokens", ".0f"),
        ("hit rate", "hit_rate", ".1%"),
        ("p/d of lost", "price_ratio", ".2f"),
    ),
    "analytics": (
        ("requests/s", "requests_s", ".4g"),
        ("e2e s mean", "e2e_s.mean", ".3g"),
        ("p50", "e2e_s.p50", ".3g"),
        ("p99", "e2e_s.p99", ".3g"),
        ("TTFT s mean", "ttft_s.mean", ".3g"),
        ("prefix s", "prefix_s", ".3g"),
        ("CPU s", "cpu_s", ".3g"),
        ("hit rate", "hit_rate", ".1%"),
        ("p/d of lost", "price_ratio", ".2f"),
    ),
    "rate": (
        ("finished/s", "requests_s", ".3g"),
        ("TTFT s mean", "ttft_s.mean", ".3g"),
        ("p50", "ttft_s.p50", ".3g"),
        ("p99", "ttft_s.p99", ".3g"),
        ("ITL ms mean", "itl_s.mean", "ms"),
        ("p99", "itl_s.p99", "ms"),
        ("e2e s mean", "e2e_s.mean", ".3g"),
        ("ms a token", "e2e_per_token_s.mean", "ms"),
        ("goodput/s", "goodput_req_s", ".3g"),
        ("in time", "slo_share", ".1%"),
        ("at once", "most_at_once", ".0f"),
    ),
}
"""Heads, figures of a run, and their formats. Shown are means over rounds."""
COMPARED: Mapping[str, Sequence[str]] = {
    "chat": ("messages_s", "steady_ttft_s.mean", "steady_e2e_s.mean", "ttft_s.mean", "e2e_s.mean"),
    "analytics": ("requests_s", "e2e_s.mean", "cpu_s"),
    "rate": ("e2e_per_token_s.mean", "ttft_s.mean", "goodput_req_s"),
}
"""Figures whose ratio to the first arm is shown, with an interval."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """All runs of a bench. ``results``: as in bench.json."""

    results: Mapping[str, Any]
    path: str
    """Of bench.json."""

    @property
    def ok(self) -> bool:
        """Whether every request was answered, and every arm had the first one's tokens but for ties."""
        return not self.errors() and not self.wrong()

    def wrong(self) -> int:
        """As :func:`kvpolicy.bench_warnings.wrong_conversations`."""
        return wrong_conversations(self.results)

    def _comparisons(self) -> list[Mapping[str, Any]]:
        """The first arm's tokens against each other arm's, by setting and round."""
        return [one for comparison in self.results["comparisons"] for one in comparison["tokens"].values()]

    def to_dict(self) -> dict[str, Any]:
        """Without the single requests, which are in bench.json."""
        cells = [
            {
                "cell": dict(cell),
                "arms": {name: {figure: self._mean(runs, figure) for _, figure, _ in self._columns}
                         for name, runs in self._by_arm(cell).items()},
                "ratios": {name: ratio.to_dict() for name, ratio in self.ratios(cell)},
            } | ({"hit_rate_over_run": self.hit_rates(cell)} if self._has_lookups else {})
            | ({"by_prompt_length": self._lengths_dict(cell)} if self._is_of_requests else {})
            for cell in self.cells()
        ]  # fmt: skip
        tokens, different, gap = self.compared()
        return {
            "kind": self.results["kind"],
            "starts": self.starts,
            "warmup_s": self.warmup_s,
            "cells": cells,
            "prices": self.results.get("prices"),
            "errors": self.errors(),
            "unequal_cores": unequal_cores(self.results),
            "tokens": {"compared": tokens, "different": different, "wrong": self.wrong(), "largest_gap": gap},
        } | ({"sustained": dict(self.sustained())} if self._is_sweep else {})

    @property
    def _columns(self) -> Sequence[tuple[str, str, str]]:
        return COLUMNS[self.results["kind"]]

    @property
    def _has_lookups(self) -> bool:
        return any("lookups" in run for run in self.results["runs"])

    def hit_rates(self, cell: Mapping[str, Any]) -> dict[str, list[float | None]]:
        """By arm, the share of tokens found in a cache in each fifth of a run's time, over all rounds."""
        return {name: hit_rates([run["lookups"] for run in runs], FIFTHS) for name, runs in self._by_arm(cell).items()}

    @property
    def _is_of_requests(self) -> bool:
        """Whether the runs have a row for each request, with the length of its prompt."""
        return any("prompt_tokens" in row for run in self.results["runs"] for row in run.get("rows", ())[:1])

    def by_prompt_length(self, cell: Mapping[str, Any]) -> dict[str, tuple[LengthBin, ...]]:
        """By arm, the answers of all rounds in bins by prompt length, the same for all arms; without errors."""
        by_arm = {name: [row for run in runs for row in run["rows"] if not row["error"] and row["ttft_s"] is not None]
                  for name, runs in self._by_arm(cell).items()}  # fmt: skip
        edges = length_edges([row["prompt_tokens"] for rows in by_arm.values() for row in rows])
        return {arm: _binned(rows, edges) for arm, rows in by_arm.items()}

    def _lengths_dict(self, cell: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
        return {arm: [finite(asdict(one)) for one in bins] for arm, bins in self.by_prompt_length(cell).items()}

    @property
    def _is_sweep(self) -> bool:
        return self.results["kind"] == "rate" and all("rate" in cell for cell in self.cells())

    def sustained(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Of every arm the highest rate before its latency exploded, that at which it had, and why."""
        for name in self.arms:
            runs = {cell["rate"]: self._by_arm(cell)[name] for cell in self.cells()}
            rate, exploded, why = sustained(runs, self.results["load"]["explodes"])
            yield name, {"rate": rate, "exploded": exploded, "why": why}

    @property
    def arms(self) -> list[str]:
        return [arm["name"] for arm in self.results["arms"]]

    @property
    def starts(self) -> int:
        """How often the servers were started. 1 where they ran already, or an earlier version did not say."""
        return len({run.get("start", 0) for run in self.results["runs"]})

    @property
    def warmup_s(self) -> float:
        """Seconds from the begin of each run of a chat that do not count."""
        return max((run.get("warmup_s", 0.0) for run in self.results["runs"]), default=0.0)

    def cells(self) -> list[Mapping[str, Any]]:
        """The settings, each once, in the order of the numbers."""
        seen = {tuple(run["cell"].items()): run["cell"] for run in self.results["runs"]}
        return [seen[key] for key in sorted(seen)]

    def _by_arm(self, cell: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
        """The runs of a setting by arm, in the order of rounds."""
        runs = sorted((run for run in self.results["runs"] if run["cell"] == cell), key=lambda run: run["round"])
        return {name: [run for run in runs if run["arm"] == name] for name in self.arms}

    def _mean(self, runs: Sequence[Mapping[str, Any]], figure: str) -> float | None:
        known = [value for run in runs if (value := value_of(run, figure)) is not None]
        return fmean(known) if known else None

    def ratios(self, cell: Mapping[str, Any]) -> Iterator[tuple[str, Ratio]]:
        """Figures over those of the first arm, over starts of the servers where there are several. None of a figure
        that is 0, or that nobody knows, in some round."""
        by_arm = self._by_arm(cell)
        first, *others = self.arms
        starts = [run.get("start", 0) for run in by_arm[first]]
        for name in others:
            for figure in COMPARED[self.results["kind"]]:
                above, below = ([value_of(run, figure) for run in by_arm[arm]] for arm in (name, first))
                if (ratio := known_ratio(above, below, starts)) is not None:
                    yield f"{figure} {name} / {first}", ratio

    def _prefixed(self, cell: Mapping[str, Any]) -> str:
        """How many conversations of a chat are prefixed, which the share is rounded to, and of how many; in each round
        by itself where that differs."""
        runs = self._by_arm(cell)[self.arms[0]]
        counts = dict.fromkeys(f"{run['prefixed_conversations']} of {run['conversations']}" for run in runs)
        return " and ".join(counts)

    def errors(self) -> dict[str, int]:
        """Requests by what went wrong, over all arms."""
        counts: Counter[str] = Counter()
        for run in self.results["runs"]:
            counts.update({f"{run['arm']}: {reason}": count for reason, count in run["errors"].items()})
        return dict(counts)

    def compared(self) -> tuple[int, int, float | None]:
        """Tokens that were compared with the first arm's, conversations that differ, and the largest gap between the
        two best log-probabilities where they do; None where none differs or the server did not say."""
        found = self._comparisons()
        different = [at for one in found for at in one["different"]]
        gaps = [at["gap"] for at in different if at.get("gap") is not None]
        return sum(one["tokens"] for one in found), len(different), max(gaps, default=None)

    def text(self) -> str:
        buffer = StringIO()
        console = Console(file=buffer, width=WIDTH, highlight=False, markup=False)
        for line in warnings(self.results):
            console.print(line)
        console.print(self._table())
        if self._has_lookups:
            console.print(self._hit_table())
        if self._is_of_requests:
            console.print(self._length_table())
        for line in self._lines():
            console.print(line)
        return buffer.getvalue()

    def _table(self) -> Table:
        starts = f", {self.starts} starts of the servers" if self.starts > 1 else ""
        table = Table(title=f"{self.results['kind']}, {self.results['model']}{starts}", title_justify="left")
        cells = self.cells()
        heads = list(cells[0]) if cells else []
        for head in (*(head.replace("_", " ") for head in heads), "arm"):
            table.add_column(head)
        for head, _, _ in self._columns:
            table.add_column(head, justify="right")
        for cell in cells:
            for name, runs in self._by_arm(cell).items():
                values = ((self._mean(runs, figure), form) for _, figure, form in self._columns)
                shown = ("" if value is None else _form(value, form) for value, form in values)
                table.add_row(*(f"{cell[head]:g}" for head in heads), name, *shown)
        return table

    def _hit_table(self) -> Table:
        title = f"tokens found in a cache, by fifth of the run's time ({100 // FIFTHS}% each)"
        table = Table(title=title, title_justify="left")
        cells = self.cells()
        for head in (*(head.replace("_", " ") for head in cells[0]), "arm"):
            table.add_column(head)
        for number in range(FIFTHS):
            table.add_column(f"to {(number + 1) / FIFTHS:.0%}", justify="right")
        for cell in cells:
            for name, rates in self.hit_rates(cell).items():
                shown = ("" if rate is None else f"{rate:.1%}" for rate in rates)
                table.add_row(*(f"{value:g}" for value in cell.values()), name, *shown)
        return table

    def _length_table(self) -> Table:
        heads = ("prompt tokens", "requests", "TTFT s mean", "p50", "p99", "e2e s mean", "p50", "p99")
        table = Table(title="by prompt length, answers of all rounds", title_justify="left")
        cells = self.cells()
        for head in (*(head.replace("_", " ") for head in cells[0]), "arm"):
            table.add_column(head)
        for head in heads:
            table.add_column(head, justify="right")
        for cell in cells:
            for name, bins in self.by_prompt_length(cell).items():
                for one in bins:
                    tails = (getattr(tail, of) for tail in (one.ttft_s, one.e2e_s) for of in ("mean", "p50", "p99"))
                    shown = ("" if isnan(value) else f"{value:.3g}" for value in tails)
                    where = f"{one.min_tokens} to {one.max_tokens}", f"{one.requests}"
                    table.add_row(*(f"{value:g}" for value in cell.values()), name, *where, *shown)
        return table

    def _lines(self) -> Iterator[str]:
        for cell in self.cells():
            for name, ratio in self.ratios(cell):
                yield f"{_where(cell)}: {name}: {ratio.text()}"
            if cell.get("prefixed"):
                yield f"{_where(cell)}: {self._prefixed(cell)} conversations begin with the prefix"
        for name, found in self.sustained() if self._is_sweep else ():
            kept = "no rate" if found["rate"] is None else f"{found['rate']:g} requests per second"
            why = "" if found["exploded"] is None else f"; at {found['exploded']:g} {found['why']}"
            yield f"{name}: serves {kept}{why or ', the highest rate tried'}"
        if prices := self.results.get("prices"):
            yield f"{_where(prices['cell'])}: {sentence(prices)}"
        yield f"figures are means over rounds; in brackets 95% intervals of ratios over {unit_of(self.starts)}"
        tokens, different, gap = self.compared()
        if len(self.arms) > 1:
            where = "" if gap is None else f", the two best log-probabilities there at most {gap:.2g} apart"
            yield f"tokens: {tokens} compared with those of {self.arms[0]}, {different} conversations differ{where}"
        if warmup_s := self.warmup_s:
            of_all = "; the table by fifth is of the whole run" if self._has_lookups else ""
            yield f"messages of the first {warmup_s:g} s do not count{of_all}"
        if missed := sum(run.get("missed_readings", 0) for run in self.results["runs"]):
            yield f"missed: {missed} readings of the servers' metrics failed, which hit rates over the run's time lack"
        for reason, count in self.errors().items():
            yield f"errors: {count} x {reason}"
        yield f"written to {self.path}"


def _binned(rows: Sequence[Mapping[str, Any]], edges: Sequence[int]) -> tuple[LengthBin, ...]:
    tokens, ttft_s, e2e_s = ([row[name] for row in rows] for name in ("prompt_tokens", "ttft_s", "e2e_s"))
    return by_prompt_length(tokens, ttft_s, e2e_s, edges)


def _where(cell: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in cell.items())


def _form(value: float, form: str) -> str:
    """A figure in a format; ``ms``: seconds as milliseconds."""
    return f"{1e3 * value:.3g}" if form == "ms" else format(value, form)


def value_of(run: Mapping[str, Any], figure: str) -> float | None:
    """A figure of a run, as ``ttft_s.mean``; None where it is undefined."""
    value: Any = run
    for name in figure.split("."):
        if value is None:
            return None
        value = value[name]
    return None if value is None else float(value)
