"""What a log says of the requests that were displaced for others: how many, of which rank, at what price, and what they
cost in the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Any

from kvpolicy.trace import Trace

MAX_RANKS = 8
"""Ranks that are reported by themselves; the others are summed up."""
OTHERS = "others"


@dataclass(frozen=True, slots=True)
class Displacements:
    """Requests displaced by the order of service, in one or several traces."""

    order: str
    """Label of the order, or of the orders."""
    let_in: int
    """Requests that others were displaced for."""
    displaced: int
    by_rank: Mapping[str, int]
    """Displaced requests by their rank at the time, the most frequent first; a rank of several numbers joined by /."""
    priced: int
    """Displaced requests with a predicted cost."""
    mean_price_s: float | None
    """Of these: engine seconds by the cheaper option, predicted before they were displaced. None without any."""
    known: int
    """Displaced requests whose cost was measured."""
    mean_cost_s: float | None
    """Of these: measured engine seconds. None without any."""
    drawn: int
    """Choices that were left to chance: with a probability below 1."""

    def lines(self) -> list[str]:
        ranks = ", ".join(f"{rank}: {count}" for rank, count in self.by_rank.items())
        return [
            f"displaced by the order {self.order}: {self.displaced} requests for {self.let_in} others "
            f"({self.drawn} choices left to chance)",
            f"  by rank: {ranks}",
            f"  mean price {_ms(self.mean_price_s)} (predicted for {self.priced}), mean cost {_ms(self.mean_cost_s)} "
            f"(measured for {self.known})",
        ]


def displacements_of(traces: Iterable[Trace]) -> Displacements | None:
    """The displaced requests of some traces; None where no choice is recorded. Costs that were not attributed count as
    unknown."""
    orders: dict[str, None] = {}
    ranks: Counter[str] = Counter()
    prices_s: list[float] = []
    costs_s: list[float] = []
    let_in = drawn = 0
    for trace in traces:
        cost_of = costs_by_victim(trace)
        for row in trace.rows("displacements"):
            orders[row["order"]] = None
            let_in += 1
            drawn += row["probability"] < 1.0
            for victim in row["candidates"][: row["taken"]]:
                ranks["/".join(f"{value:g}" for value in victim["rank"])] += 1
                prices_s += [victim["price_s"]] if has_price(victim) else []
                cost_s = cost_of.get((row["core"], row["step"], victim["request"]))
                costs_s += [] if cost_s is None else [cost_s]
    if not let_in:
        return None
    return Displacements(
        order=", ".join(orders),
        let_in=let_in,
        displaced=ranks.total(),
        by_rank=_most_frequent(ranks),
        priced=len(prices_s),
        mean_price_s=fmean(prices_s) if prices_s else None,
        known=len(costs_s),
        mean_cost_s=fmean(costs_s) if costs_s else None,
        drawn=drawn,
    )


def has_price(candidate: Mapping[str, Any]) -> bool:
    """Whether its cost was predicted. A policy's own code may predict what is no number."""
    return candidate["price_s"] is not None and isfinite(candidate["price_s"])


def costs_by_victim(trace: Trace) -> dict[tuple[str, int, str], float]:
    """Measured engine seconds of displaced requests, by core, step and request; a request is displaced at most once in
    a step. Those without a known cost are left out."""
    engine_s: dict[Any, float | None] = {
        (row["core"], row["preemption_id"]): row["engine_s"]
        for row in trace.rows("outcomes", ("core", "preemption_id", "engine_s"))
    }
    found = {}
    for row in trace.rows("decisions", ("core", "preemption_id", "step", "request", "cause")):
        cost_s = engine_s.get((row["core"], row["preemption_id"]))
        if row["cause"] == "displaced" and cost_s is not None:
            found[row["core"], row["step"], row["request"]] = cost_s
    return found


def _most_frequent(ranks: Counter[str]) -> dict[str, int]:
    first = dict(ranks.most_common(MAX_RANKS))
    rest = ranks.total() - sum(first.values())
    return first | ({OTHERS: rest} if rest else {})


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{1e3 * seconds:.4g} ms"
