"""What a trace says of the requests that were displaced for others: how many, of which rank and class and for whom, at
what price, how long they were away, and what they cost in the end. Called by `evaluate` and `report`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import fmean
from typing import Any

from kvpolicy.trace import Trace
from kvpolicy.workload import DEFAULT_CLASS

MAX_RANKS = 8
"""Ranks that are reported by themselves; the others are summed up."""
OTHERS = "others"
UNFINISHED = "(unfinished)"
"""Stands for the class of requests that had not ended when the trace did: no row says what they were."""


@dataclass(frozen=True, slots=True)
class DisplacedClass:
    """Displaced requests of one class, and requests of it that others were displaced for."""

    displaced: int
    let_in: int
    """Requests of this class that others were displaced for."""
    mean_price_s: float | None
    """Predicted engine seconds of those displaced; None where none was predicted."""
    mean_away_s: float | None
    """Seconds until they were back at the token they had reached; None where none came back."""

    def line(self, name: str) -> str:
        words = f"  class {name}: {self.displaced} displaced"
        if self.displaced:
            words += f", mean price {_ms(self.mean_price_s)}, away for {_seconds(self.mean_away_s)} on average"
        return f"{words}; others displaced for {self.let_in} of them"


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
    returned: int = 0
    """Displaced requests that came back to the token they had reached."""
    mean_away_s: float | None = None
    """Of these: seconds until then. None without any."""
    longest_away_s: float | None = None
    by_class: Mapping[str, DisplacedClass] = field(default_factory=dict)
    """By class of service; requests of traces that know no classes are of the default one."""

    def lines(self) -> list[str]:
        ranks = ", ".join(f"{rank}: {count}" for rank, count in self.by_rank.items())
        return [
            f"displaced by the order {self.order}: {self.displaced} requests for {self.let_in} others "
            f"({self.drawn} choices left to chance)",
            f"  by rank: {ranks}",
            f"  mean price {_ms(self.mean_price_s)} (predicted for {self.priced}), mean cost {_ms(self.mean_cost_s)} "
            f"(measured for {self.known})",
            f"  away for {_seconds(self.mean_away_s)} on average, {_seconds(self.longest_away_s)} at most "
            f"({self.returned} of them came back)",
            *([one.line(name) for name, one in self.by_class.items()] if len(self.by_class) > 1 else []),
        ]


def displacements_of(traces: Iterable[Trace]) -> Displacements | None:
    """The displaced requests of some traces; None where no choice is recorded. Costs that were not attributed count as
    unknown."""
    orders: dict[str, None] = {}
    let_in: Counter[str] = Counter()
    drawn = 0
    victims: list[_Victim] = []
    for trace in traces:
        class_of, cost_of, away_of = _classes(trace), costs_by_victim(trace), _away_by_victim(trace)
        for row in trace.rows("displacements"):
            orders[row["order"]] = None
            let_in[class_of.get((row["core"], row["request"]), UNFINISHED)] += 1
            drawn += row["probability"] < 1.0
            for victim in row["candidates"][: row["taken"]]:
                at = row["core"], row["step"], victim["request"]
                victims.append(
                    _Victim(
                        rank="/".join(f"{value:g}" for value in victim["rank"]),
                        class_name=class_of.get((row["core"], victim["request"]), UNFINISHED),
                        price_s=victim["price_s"] if has_price(victim) else None,
                        cost_s=cost_of.get(at),
                        away_s=away_of.get(at),
                    )
                )
    if not let_in:
        return None
    prices_s = _known(victim.price_s for victim in victims)
    costs_s = _known(victim.cost_s for victim in victims)
    away_s = _known(victim.away_s for victim in victims)
    return Displacements(
        order=", ".join(orders),
        let_in=let_in.total(),
        displaced=len(victims),
        by_rank=_most_frequent(Counter(victim.rank for victim in victims)),
        priced=len(prices_s),
        mean_price_s=_mean(prices_s),
        known=len(costs_s),
        mean_cost_s=_mean(costs_s),
        drawn=drawn,
        returned=len(away_s),
        mean_away_s=_mean(away_s),
        longest_away_s=max(away_s, default=None),
        by_class=_by_class(victims, let_in),
    )


@dataclass(frozen=True, slots=True)
class _Victim:
    rank: str
    class_name: str
    price_s: float | None
    cost_s: float | None
    away_s: float | None


def _by_class(victims: Sequence[_Victim], let_in: Mapping[str, int]) -> dict[str, DisplacedClass]:
    groups: dict[str, list[_Victim]] = {name: [] for name in sorted({*let_in, *(one.class_name for one in victims)})}
    for victim in victims:
        groups[victim.class_name].append(victim)
    return {
        name: DisplacedClass(
            displaced=len(group),
            let_in=let_in.get(name, 0),
            mean_price_s=_mean(_known(one.price_s for one in group)),
            mean_away_s=_mean(_known(one.away_s for one in group)),
        )
        for name, group in groups.items()
    }


def _classes(trace: Trace) -> dict[tuple[str, str], str]:
    """The class of every request that ended, by core and request."""
    return {(row["core"], row["request"]): row.get("class") or DEFAULT_CLASS for row in trace.rows("requests")}


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


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
    return _by_victim(trace, engine_s)


def _away_by_victim(trace: Trace) -> dict[tuple[str, int, str], float]:
    """Seconds until displaced requests were back at the token they had reached, as :func:`costs_by_victim`."""
    columns = ("core", "preemption_id", "ended", "victim_delay_s", "wait_blocks_s")
    away_s: dict[Any, float | None] = {
        (row["core"], row["preemption_id"]): row["victim_delay_s"] + row["wait_blocks_s"]
        for row in trace.rows("outcomes", columns)
        if row["ended"] == "resumed"
    }
    return _by_victim(trace, away_s)


def _by_victim(trace: Trace, values: Mapping[Any, float | None]) -> dict[tuple[str, int, str], float]:
    """The values of displaced requests by core, step and request, without unknown ones. ``values``: by core and
    preemption."""
    found = {}
    for row in trace.rows("decisions", ("core", "preemption_id", "step", "request", "cause")):
        value = values.get((row["core"], row["preemption_id"]))
        if row["cause"] == "displaced" and value is not None:
            found[row["core"], row["step"], row["request"]] = value
    return found


def _most_frequent(ranks: Counter[str]) -> dict[str, int]:
    first = dict(ranks.most_common(MAX_RANKS))
    rest = ranks.total() - sum(first.values())
    return first | ({OTHERS: rest} if rest else {})


def _seconds(seconds: float | None) -> str:
    return "an unknown time" if seconds is None else f"{seconds:.3g} s"


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{1e3 * seconds:.4g} ms"
