"""The bars of the matrix: ratios of paired runs, what they should be, and whether that is told by their intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import exp, log
from statistics import fmean
from typing import Any

from matrix_places import LEARNED, RECOMPUTE, SWAP, Place, Runs, short

from kvpolicy.stats import Ratio, student_interval, student_ratio
from kvpolicy.study.cache import Result
from kvpolicy.study.report import aligned

MIN_PREEMPTIONS = 20
"""Under vLLM's default, on average over the repeats: with fewer there is next to nothing to choose."""
MIN_MEAN = {True: 1.004, False: 1.015}
"""With prefix caching, and without."""
MIN_CELL, MIN_OF_BETTER = 0.998, 0.995
MAX_LONGEST_GAP, MAX_ITL = 1.0, 1.02
LONG_TAIL = ("H100-SXM", "deepseek-r1", 0.2)
"""Where recomputes are felt in the time between tokens."""
MAX_LONG_TAIL_ITL = 1 / 1.5
MET, MISSED, UNDECIDED = "met", "missed", "undecided"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One ratio and its bar."""

    bar: str
    where: str
    ratio: Ratio
    limit: float
    at_most: bool

    @property
    def text(self) -> str:
        """``undecided`` where the bar lies within the interval: more repeats would be needed."""
        low, high = self.ratio.low, self.ratio.high
        if low is None or high is None:
            return UNDECIDED
        if self.at_most:
            return MET if high <= self.limit else MISSED if low > self.limit else UNDECIDED
        return MET if low >= self.limit else MISSED if high < self.limit else UNDECIDED

    @property
    def beyond(self) -> bool:
        """Whether the mean itself is on the wrong side of the bar."""
        return self.ratio.value > self.limit if self.at_most else self.ratio.value < self.limit

    def line(self) -> str:
        sign = "at most" if self.at_most else "at least"
        return f"{self.text}: {self.where}: {self.bar} {self.ratio.text()}, {sign} {self.limit:.3g}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "bar": self.bar,
            "where": self.where,
            **self.ratio.to_dict(),
            "limit": self.limit,
            "at_most": self.at_most,
            "verdict": self.text,
        }


def ratio_over(runs: Runs, policy: str, other: str, value: Callable[[Result], float]) -> Ratio:
    """Over the repeats, pair by pair."""
    return student_ratio([value(result) for result in runs[policy]], [value(result) for result in runs[other]])


def steady(result: Result) -> float:
    return float(result["steady_tok_s"])


def preemptions(runs: Runs) -> float:
    """Of a run under vLLM's default."""
    return fmean(sum(result["preemptions"].values()) for result in runs[RECOMPUTE])


def judged(runs_by_place: Sequence[tuple[Place, Runs]]) -> list[Verdict]:
    """The bars of places with enough preemptions; those with and without prefix caching each have their own."""
    verdicts = []
    often = [(place, runs) for place, runs in runs_by_place if preemptions(runs) >= MIN_PREEMPTIONS]
    for caching in (True, False):
        chosen = [(place, runs) for place, runs in often if place.serving.prefix_caching is caching]
        if not chosen:
            continue
        words = f"{len(chosen)} cells, prefix caching {'on' if caching else 'off'}"
        mean = mean_ratio([ratio_logs(runs, LEARNED, RECOMPUTE, steady) for _, runs in chosen])
        verdicts.append(Verdict("steady rate over vLLM's, geometric mean", words, mean, MIN_MEAN[caching], False))
        verdicts += [verdict for place, runs in chosen for verdict in of_cell(place, runs)]
    return sorted(verdicts, key=lambda verdict: verdict.bar, reverse=True)


def of_cell(place: Place, runs: Runs) -> list[Verdict]:
    where = place.text() + ("" if place.serving.prefix_caching else ", no prefix caching")
    better = max((RECOMPUTE, SWAP), key=lambda one: fmean(log(steady(run)) for run in runs[one]))
    long_tail = (place.machine, short(place.workload), place.share) == LONG_TAIL
    return [
        Verdict("steady rate over vLLM's", where, ratio_over(runs, LEARNED, RECOMPUTE, steady), MIN_CELL, False),
        Verdict(
            "steady rate over the better fixed action's", where, ratio_over(runs, LEARNED, better, steady),
            MIN_OF_BETTER, False,
        ),
        Verdict("p99 of the longest gap over vLLM's", where, _p99(runs, "longest_gap_s"), MAX_LONGEST_GAP, True),
        Verdict(
            "p99 between tokens over vLLM's", where, _p99(runs, "itl_s"), MAX_LONG_TAIL_ITL if long_tail else MAX_ITL,
            True,
        ),
    ]  # fmt: skip


def _p99(runs: Runs, name: str) -> Ratio:
    return ratio_over(runs, LEARNED, RECOMPUTE, lambda result: float(result[name]["p99"]))


def ratio_logs(runs: Runs, policy: str, other: str, value: Callable[[Result], float]) -> list[float]:
    """One per repeat."""
    return [log(value(one) / value(base)) for one, base in zip(runs[policy], runs[other], strict=True)]


def mean_ratio(logs: Sequence[Sequence[float]]) -> Ratio:
    """Geometric mean over the places, with the interval over the repeats."""
    by_repeat = [fmean(values) for values in zip(*logs, strict=True)]
    value, low, high = map(exp, student_interval(by_repeat))
    return Ratio(value, low, high, len(by_repeat))


# ---- for a person ----


def lines(verdicts: Sequence[Verdict]) -> list[str]:
    """Every ratio beside its bar, and how many of each bar are met."""
    cells = [["bar", "where", "ratio, 95%", "should be", "verdict"]]
    for verdict in verdicts:
        low, high = verdict.ratio.low, verdict.ratio.high
        interval = "" if low is None else f" ({low:.4f} to {high:.4f})"
        limit = f"{'<=' if verdict.at_most else '>='} {verdict.limit:.4g}"
        cells.append([verdict.bar, verdict.where, f"{verdict.ratio.value:.4f}{interval}", limit, verdict.text])
    summary = []
    for bar, group in groupby(verdicts, lambda verdict: verdict.bar):
        of_bar = list(group)
        counts = {text: sum(verdict.text == text for verdict in of_bar) for text in (MET, UNDECIDED, MISSED)}
        beyond = sum(verdict.beyond for verdict in of_bar if verdict.text == UNDECIDED)
        summary.append(
            f"{bar}: {counts[MET]} met, {counts[UNDECIDED]} undecided (the mean of {beyond} beyond the bar), "
            f"{counts[MISSED]} missed"
        )
    return [*aligned(cells), "", *summary]


def exit_status(verdicts: Sequence[Verdict]) -> int:
    return int(any(verdict.text == MISSED for verdict in verdicts))


def dicts(verdicts: Sequence[Verdict]) -> list[Mapping[str, Any]]:
    return [verdict.to_dict() for verdict in verdicts]
