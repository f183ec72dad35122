"""Whether choosing better between recompute and swap is worth it in a live server, by its metrics alone.

Called by `kvpolicy watch`. The formulas are those of :mod:`kvpolicy.headroom`, of all that the server counted since it
started. Metrics have no time for which the engine was busy: it is at most the server's age, and at least the time of
the decodes and of what preemptions cost. So the forecast is an interval. An age below that time comes from a clock that
is not the server's, and is not used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kvpolicy.headroom import MIN_GAIN, NO_DECODES, NO_PRICES, Headroom, Work, headroom, share_text
from kvpolicy.server_metrics import OURS, Metrics

NO_STEP_TIMES = "the bound needs a cost model with step times, as `kvpolicy train` learns one"
NO_DECODE_TIME = (
    "no step has decoded beside recomputed tokens, and the time of a decoded token is counted in such steps alone"
)
SPECULATES = (
    "the server speculates: accepted drafts count as generated tokens, and the time of a decoded token is known of "
    "requests alone that decode one in a step"
)
MIN_PRICED = 0.95
"""Share of the preemptions that must have a price: the others then count as these do."""
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
    preempted, work = metrics.total("vllm:num_preemptions_total"), work_of(metrics)
    if not work.decoded_tokens:
        return Gain("cannot tell", f"{NO_DECODES}.")
    if not preempted:
        return Gain("not worth it", "nothing was preempted since the server started.")
    if not metrics.has_plugin:
        return Gain("cannot tell", f"{preempted:g} requests were preempted; {NO_PLUGIN}.")
    if metrics.total("vllm:spec_decode_num_draft_tokens_total"):
        return Gain("cannot tell", f"{preempted:g} requests were preempted; {SPECULATES}.")
    spent_s, saved_s, unpriced = _spent_s(work), _saved_s(metrics), _unpriced(metrics)
    low, high = (
        headroom(replace(work, busy_s=busy_s), saved_s, _unknown(work, unpriced))
        for busy_s in (_age_s(metrics, now_s, spent_s), spent_s)
    )
    return _judged(low, high, unpriced)


def work_of(metrics: Metrics) -> Work:
    """U, R, D, P and W of all engine cores; seconds are None where the server has no cost model with step times.

    U is without the first token of each request, which its prompt gives. D is the price of a token that was decoded
    beside recomputed ones, for all of U. W is the mean cost of the swaps that were measured, for all that are over.
    """
    generated, first = (
        metrics.total(name) for name in ("vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count")
    )
    decoded, recomputed = max(0.0, generated - first), metrics.total(f"{OURS}recomputed_tokens_total")
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
    """S, as expected when the preemptions were decided, for all of them; None where too few were priced."""
    priced, preempted = _priced(metrics)
    if priced < MIN_PRICED * preempted:
        return None
    return metrics.total(f"{OURS}avoidable_cost_microseconds_total") / 1e6 * (preempted / priced if priced else 1.0)


def _priced(metrics: Metrics) -> tuple[float, float]:
    """Preemptions with a price, and all of them."""
    return metrics.total(f"{OURS}priced_preemptions_total"), metrics.total(f"{OURS}preemptions_total")


def _unpriced(metrics: Metrics) -> str:
    """How many preemptions have no price, of how many; empty where all have one."""
    priced, preempted = _priced(metrics)
    return f"{preempted - priced:g} of {preempted:g} preemptions" if priced < preempted else ""


def _age_s(metrics: Metrics, now_s: float, spent_s: float | None) -> float | None:
    """Seconds since the server started, for each of its engine cores; None where it does not say when, and where the
    clocks contradict what it has spent since."""
    started_s = metrics.largest("process_start_time_seconds")
    if started_s is None:
        return None
    age_s = (now_s - started_s) * len(metrics.by("vllm:generation_tokens_total", "engine"))
    return None if age_s < (spent_s or 0.0) else age_s


def _spent_s(work: Work) -> float | None:
    parts = work.decode_s, work.recompute_s, work.swap_s
    return None if None in parts else sum(part for part in parts if part is not None)


def _unknown(work: Work, unpriced: str) -> str:
    """Why the bound is not known or, where it is, the forecast."""
    if work.recompute_s is None or work.swap_s is None:
        return NO_STEP_TIMES
    if work.decode_s is None:
        return NO_DECODE_TIME
    return f"{NO_PRICES} ({unpriced})" if unpriced else ""


def _judged(low: Headroom, high: Headroom, unpriced: str) -> Gain:
    """``low`` and ``high``: the same work in the longest and in the shortest busy time."""
    without_price = f" No price: {unpriced}, counted like the others." if unpriced else ""
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
        return Gain("not worth it", f"{bound}, and at most {share_text(high.forecast)} is likely.{without_price}")
    if low.forecast is None or low.forecast < MIN_GAIN:
        above = "at most " if low.forecast is None else f"{share_text(low.forecast)} to "
        return Gain(
            "cannot tell",
            f"{bound}; likely is {above}{share_text(high.forecast)}, by how much of its time the server was idle or "
            f"computed prompts, which metrics do not say.{without_price}",
        )
    return Gain("worth it", f"{bound}, and at least {share_text(low.forecast)} is likely.{without_price}")
