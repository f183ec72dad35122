"""When latency has exploded, and which rate a sweep tries next. Pure; called by
:mod:`kvpolicy_vllm.bench.rate_kind` and :mod:`kvpolicy_vllm.bench.load_report`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import sqrt
from statistics import fmean
from typing import Any

MIN_FINISHED = 0.8
"""Share of the rate of arrivals at which requests have to be finished, and of the requests that have to be answered."""
MAX_RATES = 14
"""Of a sweep."""
MAX_STEP = 1.5
"""Ratio of two neighbouring rates, one of which some arm can serve and the other of which one cannot."""
Run = Mapping[str, Any]


def why_exploded(runs: Sequence[Run], lowest: Sequence[Run], factor: float) -> str:
    """Why the latency of an arm has exploded in these runs at one rate; empty where it has not.

    ``lowest``: the arm's runs at the lowest rate.
    """
    medians_s, base_s = ([median for run in some if (median := _median_s(run)) is not None] for some in (runs, lowest))
    if not medians_s:
        return "nothing was answered"
    good, failed = (sum(counts) for counts in zip(*map(_answered, runs), strict=True))
    if good < MIN_FINISHED * (good + failed):
        return f"{good / (good + failed):.0%} of the requests are answered"
    finished = [run["finished_s"] / run["offered_s"] for run in runs if run["finished_s"] and run["offered_s"]]
    if finished and fmean(finished) < MIN_FINISHED:
        return f"requests are finished at {fmean(finished):.0%} of the rate at which they arrive"
    if base_s and fmean(medians_s) > factor * fmean(base_s):
        return f"the median time to first token is {fmean(medians_s) / fmean(base_s):.3g} times that at the lowest rate"
    return ""


def _answered(run: Run) -> tuple[int, int]:
    """Requests that were answered, and those that failed."""
    failed = sum(run["errors"].values())
    return len(run["rows"]) - failed, failed


def _median_s(run: Run) -> float | None:
    median: float | None = run["ttft_s"]["p50"]
    return median


def next_rate(first: float, factor: float, served: Mapping[float, Mapping[str, Sequence[Run]]]) -> float | None:
    """The rate that a sweep tries next; None where it has seen enough. ``served``: runs by rate and arm.

    Doubled from the first until every arm's latency has exploded, halved from there while one has exploded at the
    lowest, and then between two neighbours that are further apart than :data:`MAX_STEP`, of which the lower is served
    by some arm and the higher not by all.
    """
    if not served:
        return first
    if len(served) >= MAX_RATES:
        return None
    rates = sorted(served)
    bad = {rate: [bool(why_exploded(runs, served[rates[0]][arm], factor)) for arm, runs in served[rate].items()]
           for rate in rates}  # fmt: skip
    if any(bad[rates[0]]):
        return rates[0] / 2
    if not all(bad[rates[-1]]):
        return rates[-1] * 2
    for low, high in pairwise(rates):
        if high / low > MAX_STEP and not all(bad[low]) and any(bad[high]):
            return float(f"{sqrt(low * high):.3g}")
    return None


def sustained(runs: Mapping[float, Sequence[Run]], factor: float) -> tuple[float | None, float | None, str]:
    """Of one arm, whose runs are given by rate: the highest rate before the first at which its latency has exploded;
    that rate, and why. None, and an empty text, where there is none."""
    rates = sorted(runs)
    last = None
    for rate in rates:
        if why := why_exploded(runs[rate], runs[rates[0]], factor):
            return last, rate, why
        last = rate
    return last, None, ""
