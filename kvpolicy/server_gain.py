"""Whether choosing better between recompute and swap is worth it in a live server, by its metrics alone.

Called by `kvpolicy watch`. The formulas are those of :mod:`kvpolicy.headroom`, of all that the server counted since it
started. Metrics have no time for which the engine was busy: it is at most the server's age, and at least the time of
the decodes and of what preemptions cost. So the forecast is an interval.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kvpolicy.headroom import MIN_GAIN, NO_DECODES, NO_PRICES, Headroom, Work, headroom, share_text
from kvpolicy.server_metrics import OURS, Metrics

NO_STEP_TIMES = "the bound needs a cost model with step times, as `kvpolicy train` learns one"
NO_PLUGIN = (
    "how much they lose is counted with kvpolicy alone, in shadow mode without changing anything: "
    "KVPOLICY=cheapest:MODEL,shadow=on"
)
Verdict = Literal["worth it", "not worth it", "cannot tell"]


@dataclass(frozen=True, slots=True)
class Gain:
    """The answer, and why."""

    verdict: Verdict
    why: str

    def text(self) -> str:
        return f"{self.verdict}: {self.why}"


def gain_of(metrics: Metrics, now_s: float) -> Gain:
    """Worth it, or not, from a gain of :data:`kvpolicy.headroom.MIN_GAIN` on. ``now_s``: since the epoch."""
    preempted = metrics.total("vllm:num_preemptions_total")
    if not metrics.total("vllm:generation_tokens_total"):
        return Gain("cannot tell", f"{NO_DECODES}.")
    if not preempted:
        return Gain("not worth it", "nothing was preempted since the server started.")
    if not metrics.has_plugin:
        return Gain("cannot tell", f"{preempted:g} requests were preempted; {NO_PLUGIN}.")
    work, saved_s = work_of(metrics), _saved_s(metrics)
    low = headroom(replace(work, busy_s=_age_s(metrics, now_s)), saved_s, _unknown(work, saved_s))
    high = headroom(replace(work, busy_s=_spent_s(work)), saved_s, _unknown(work, saved_s))
    return _judged(low, high)


def work_of(metrics: Metrics) -> Work:
    """U, R, D, P and W of all engine cores; seconds are None where the server has no cost model with step times.

    D is the price of a token that was decoded beside recomputed ones, for all decoded tokens. W is the mean cost of the
    swaps that were measured, for all that are over.
    """
    decoded, recomputed = metrics.total("vllm:generation_tokens_total"), metrics.total(f"{OURS}recomputed_tokens_total")
    added_s, beside_s = (
        metrics.total(f"{OURS}{name}_microseconds_total") / 1e6 for name in ("recompute", "beside_recompute")
    )
    beside = metrics.total(f"{OURS}beside_recompute_tokens_total")
    return Work(
        decoded_tokens=int(decoded),
        recomputed_tokens=int(recomputed),
        decode_s=decoded * beside_s / beside if beside else None,
        recompute_s=added_s if added_s or not recomputed else None,
        busy_s=None,
        swap_s=_swap_s(metrics),
    )


def _swap_s(metrics: Metrics) -> float | None:
    swapped = metrics.total(f"{OURS}resumed_total", executed="swap")
    measured = metrics.total(f"{OURS}measured_preemptions_total", executed="swap")
    if not swapped:
        return 0.0
    if not measured:
        return None
    return max(0.0, metrics.total(f"{OURS}measured_cost_microseconds", executed="swap") / 1e6 / measured * swapped)


def _saved_s(metrics: Metrics) -> float | None:
    """S, as expected when the preemptions were decided; None where not all of them were priced."""
    if metrics.total(f"{OURS}priced_preemptions_total") < metrics.total(f"{OURS}preemptions_total"):
        return None
    return metrics.total(f"{OURS}avoidable_cost_microseconds_total") / 1e6


def _age_s(metrics: Metrics, now_s: float) -> float | None:
    """Seconds since the server started, for each of its engine cores; None where it does not say when."""
    started_s = metrics.largest("process_start_time_seconds")
    cores = len(metrics.by("vllm:generation_tokens_total", "engine"))
    return None if started_s is None else max(0.0, now_s - started_s) * cores


def _spent_s(work: Work) -> float | None:
    parts = work.decode_s, work.recompute_s, work.swap_s
    return None if None in parts else sum(part for part in parts if part is not None)


def _unknown(work: Work, saved_s: float | None) -> str:
    if work.recompute_s is None or work.swap_s is None:
        return NO_STEP_TIMES
    return NO_PRICES if saved_s is None else ""


def _judged(low: Headroom, high: Headroom) -> Gain:
    """``low`` and ``high``: the same work in the longest and in the shortest busy time."""
    if high.bound is None or high.tax is None:
        return Gain("cannot tell", high.sentence())
    bound = (
        f"{share_text(high.tax)} of the decoded tokens were computed again; at most {share_text(high.bound)} of "
        "throughput at saturation is to be won here"
    )
    if high.bound < MIN_GAIN:
        return Gain("not worth it", f"{bound}.")
    if high.forecast is None:
        return Gain("cannot tell", f"{bound}; how much of it is likely is not known: {high.unknown}.")
    if high.forecast < MIN_GAIN:
        return Gain("not worth it", f"{bound}, and at most {share_text(high.forecast)} is likely.")
    if low.forecast is None or low.forecast < MIN_GAIN:
        above = "" if low.forecast is None else f"{share_text(low.forecast)} to "
        return Gain(
            "cannot tell",
            f"{bound}; likely is {above}{share_text(high.forecast)}, by how much of its time the server was idle or "
            "computed prompts, which metrics do not say.",
        )
    return Gain("worth it", f"{bound}, and at least {share_text(low.forecast)} is likely.")
