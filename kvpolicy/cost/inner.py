"""Inner extrapolation of a cost model: fits on short states judged on the longer ones, all within the training data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isinf, log
from typing import Any

from kvpolicy.cost.beyond import SHARES, Room, carries, excess, growth_of
from kvpolicy.cost.coverage import share_held
from kvpolicy.cost.dataset import State
from kvpolicy.cost.examples import examples_of
from kvpolicy.cost.intervals import CONFIDENCE, PREDICTED, Intervals, Misses
from kvpolicy.cost.model import FittedModel
from kvpolicy.events import KINDS, Kind

FEWEST_SHORT = 12
"""States up to an inner edge: with fewer no law is told."""
DOUBLE = log(2.0)
"""Coverage is told up to twice the edge, and from there on."""


@dataclass(frozen=True, slots=True)
class Beyond:
    """One longer state as a fit on shorter ones missed it."""

    share: float
    """Of the longest length: up to there the fit had learned."""
    name: str
    carried: Misses
    """With the residual kept at the range's edge."""
    dropped: Misses
    distance: Mapping[str, float]
    """By what is predicted; 0 where it is inside the fit's range for all its length."""

    def miss(self, of: str, kept: Mapping[Kind, bool]) -> float:
        """log(measured / predicted) with the residuals kept that are to be."""
        if of == "ratio":
            return self.miss("swap", kept) - self.miss("recompute", kept)
        return next((self.carried if kept[kind] else self.dropped).model[kind] for kind in KINDS if kind == of)


def beyond(
    states: Sequence[State],
    fit: Callable[[list[State]], FittedModel],
    misses_of: Callable[[FittedModel, Sequence[State]], list[Misses]],
) -> list[Beyond]:
    """What fits on the states up to each of :data:`~kvpolicy.cost.beyond.SHARES` of the longest miss of the rest."""
    longest = max(state.computed_tokens for state in states)
    found = []
    for share in SHARES:
        short = [state for state in states if state.computed_tokens <= share * longest]
        if len(short) < FEWEST_SHORT:
            continue
        rest = [state for state in states if state.computed_tokens > share * longest]
        model = fit(short)
        kept, left = (misses_of(replace(model, carried=dict.fromkeys(KINDS, keep)), rest) for keep in (True, False))
        examples = examples_of(rest)
        for i, state in enumerate(rest):
            distance = {kind: model.distance(kind, examples[kind][i].x) for kind in KINDS}
            by_name: dict[str, float] = {kind: distance[kind] for kind in KINDS}
            by_name["ratio"] = max(distance.values())
            found.append(Beyond(share, state.name, kept[i], left[i], by_name))
    return found


def carried(missed: Sequence[Beyond], trees: Mapping[Kind, int]) -> dict[Kind, bool]:
    """Which residuals are to be kept outside the range; none where nothing tells."""
    found = {}
    for kind in KINDS:
        mine = [one for one in missed if one.distance[kind] > 0]
        kept, left = ([getattr(one, which).model[kind] for one in mine] for which in ("carried", "dropped"))
        found[kind] = bool(trees[kind]) and carries(kept, left, len({one.name for one in mine}), otherwise=False)
    return found


def growing(intervals: Intervals, missed: Sequence[Beyond], kept: Mapping[Kind, bool]) -> Intervals:
    """The intervals with the room that they gain per unit of distance."""
    return replace(intervals, growth={of: _growth(intervals, missed, kept, of) for of in PREDICTED})


def inner_coverage(intervals: Intervals, missed: Sequence[Beyond], kept: Mapping[Kind, bool]) -> dict[str, Any]:
    """How often intervals hold outside the range: growth told by one inner fit, judged on the misses of the other.

    By what is predicted, with the number of states judged and its 95% interval; empty where one fit alone was told.
    """
    found: dict[str, Any] = {}
    for of in PREDICTED:
        held: list[tuple[float, bool]] = []
        for share in SHARES:
            told = _growth(intervals, [one for one in missed if one.share != share], kept, of)
            if isinf(told):
                continue
            for one in missed:
                if one.share == share and one.distance[of] > 0:
                    sticks_out = excess(one.miss(of, kept), _edge(intervals, one, of), one.distance[of])
                    held.append((one.distance[of], sticks_out <= told))
        found[of] = share_held([hit for _, hit in held]) | {
            "up_to_2x": share_held([hit for at, hit in held if at < DOUBLE]),
            "from_2x": share_held([hit for at, hit in held if at >= DOUBLE]),
        }
    return found


def _growth(intervals: Intervals, missed: Sequence[Beyond], kept: Mapping[Kind, bool], of: str) -> float:
    mine = [one for one in missed if one.distance[of] > 0]
    scores = [excess(one.miss(of, kept), _edge(intervals, one, of), one.distance[of]) for one in mine]
    return growth_of(scores, len({one.name for one in mine}), CONFIDENCE)


def _edge(intervals: Intervals, one: Beyond, of: str) -> Room:
    number = intervals.bin_of(one.carried.computed_tokens, one.carried.running_requests)
    return intervals.room(of, number, True)
