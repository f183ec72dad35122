"""Inner extrapolation of a cost model: fits on short states judged on the longer ones, all within the training data.

A fit up to a share of the longest length misses what is longer; what sticks out of the room *that the states up to
there alone would have given* tells growth. Whether intervals made so hold is judged by doing all of it once more on
the states up to a quarter, and up to half, and looking at the states beyond: none of those told anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isinf, log, sqrt
from statistics import fmean, median
from typing import Any

from kvpolicy.cost.intervals import PREDICTED, Intervals, Misses, calibrate, kept_of
from kvpolicy.cost.model import FittedModel
from kvpolicy.datasets.examples import examples_of
from kvpolicy.datasets.profiles import State
from kvpolicy.events import KINDS, Kind
from kvpolicy.features import GROWING, Features
from kvpolicy.regression.conformal import CONFIDENCE, SHARES, Room, carries, excess, growth_of
from kvpolicy.training.coverage import share_held

MIN_SHORT_STATES = 12
"""States up to an inner edge: with fewer no law is told."""
DOUBLE = log(2.0)
"""Coverage is told up to twice the edge, and from there on."""
ALL_SHARES = tuple(sorted({*SHARES, *(one * other for one in SHARES for other in SHARES)}))
"""Of the longest length: the fits that tell growth, and those that tell it where growth is judged."""


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
    """What fits on the states up to each of :data:`ALL_SHARES` of the longest miss of the rest."""
    longest = max(state.computed_tokens for state in states)
    found = []
    for share in ALL_SHARES:
        short = [state for state in states if state.computed_tokens <= share * longest]
        if len(short) < MIN_SHORT_STATES:
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
        mine = [one for one in missed if one.share in SHARES and one.distance[kind] > 0]
        kept, left = ([getattr(one, which).model[kind] for one in mine] for which in ("carried", "dropped"))
        found[kind] = bool(trees[kind]) and carries(kept, left, len({one.name for one in mine}), otherwise=False)
    return found


def growing(
    intervals: Intervals,
    inside: Sequence[Misses],
    missed: Sequence[Beyond],
    kept: Mapping[Kind, bool],
    least: Mapping[str, float],
) -> Intervals:
    """The intervals with the room that they gain per unit of distance, ``least`` or more.

    ``inside``: what they were calibrated on.
    """
    told = _growth(inside, missed, kept)
    return replace(intervals, growth={of: max(told[of], least[of]) for of in PREDICTED})


def inner_coverage(inside: Sequence[Misses], missed: Sequence[Beyond], kept: Mapping[Kind, bool]) -> dict[str, Any]:
    """How often intervals hold outside the range: room and growth told by states up to a share of the longest length,
    judged on what a fit up to there missed of the longer ones.

    By what is predicted, with the number of states judged and its 95% interval; empty where too few states are short
    enough to tell anything.
    """
    held: dict[str, list[tuple[float, bool]]] = {of: [] for of in PREDICTED}
    longest = _longest(inside)
    for share in SHARES:
        short = [one for one in inside if one.computed_tokens <= share * longest]
        told = _told(short, share, missed, kept)
        if told is None:
            continue
        for one in missed:
            if one.share != share:
                continue
            for of in PREDICTED:
                below, above = room = _room(told, one, of)
                if one.distance[of] > 0 and not isinf(max(room)):
                    held[of].append((one.distance[of], -below <= one.miss(of, kept) <= above))
    return {
        of: share_held([hit for _, hit in some])
        | {
            "up_to_2x": share_held([hit for at, hit in some if at < DOUBLE]),
            "from_2x": share_held([hit for at, hit in some if at >= DOUBLE]),
        }
        for of, some in held.items()
    }


STRETCHES = (2.0, 4.0, 8.0)
"""Times the trained lengths at which fits to parts of the states are asked how far they disagree."""
STUDENT_T = 2.132
"""95th percentile of Student's t with 4 degrees of freedom: five fits tell how far fits scatter, and not for sure."""


def unsteady(fits: Sequence[FittedModel], states: Sequence[State], kept: Mapping[Kind, bool]) -> dict[str, float]:
    """Room per unit of distance that the fits themselves need: by how far fits to all folds but one drift apart on
    the longest states stretched (the delete-a-group jackknife, the median of the states, the worst of the lengths).

    Constants that hardly matter within the range and rule beyond it are told by no miss inside.
    """
    models = [replace(model, carried=dict(kept)) for model in fits]
    longest = max(state.computed_tokens for state in states)
    edge = [state for state in states if state.computed_tokens > longest / 2]
    examples = examples_of(edge)
    found = dict.fromkeys(PREDICTED, 0.0)
    for times in STRETCHES:
        stretched = [{kind: _stretched(examples[kind][i].x, times) for kind in KINDS} for i in range(len(edge))]
        logs = [
            {kind: [log(model.seconds(kind, one[kind])) for model in models] for kind in KINDS} for one in stretched
        ]
        for of in PREDICTED:
            spread = [
                _jackknifed(
                    [b - a for a, b in zip(one["recompute"], one["swap"], strict=True)]
                    if of == "ratio"
                    else next(one[kind] for kind in KINDS if kind == of)
                )
                for one in logs
            ]
            found[of] = max(found[of], STUDENT_T * median(spread) / log(times))
    return found


def _stretched(x: Features, times: float) -> Features:
    """Of a victim so many times as long, in the same surroundings."""
    grown = {name: getattr(x, name) * (times**2 if name == "recomputed_pairs" else times) for name in GROWING}
    return x._replace(**grown)


def _jackknifed(values: Sequence[float]) -> float:
    """Standard error of the whole from values each of all groups but one."""
    middle = fmean(values)
    return sqrt((len(values) - 1) / len(values) * sum((value - middle) ** 2 for value in values))


def _told(
    short: Sequence[Misses], share: float, missed: Sequence[Beyond], kept: Mapping[Kind, bool]
) -> Intervals | None:
    """The intervals of a model that had learned from ``short`` alone; None where it is too little to judge by."""
    if len(short) < MIN_SHORT_STATES:
        return None
    longest = _longest(short)
    nested = [
        replace(one, share=one.share / share)
        for one in missed
        if one.share < share and one.carried.computed_tokens <= longest
    ]
    return growing(calibrate(short, kept_of(kept)), short, nested, kept, dict.fromkeys(PREDICTED, 0.0))


def _growth(inside: Sequence[Misses], missed: Sequence[Beyond], kept: Mapping[Kind, bool]) -> dict[str, float]:
    """Of the fits up to each share the one that needs most: the misses of one lean together, and the next may be as
    far off as the worst of two."""
    longest = _longest(inside)
    found: dict[str, list[float]] = {of: [] for of in PREDICTED}
    for share in SHARES:
        short = [one for one in inside if one.computed_tokens <= share * longest]
        mine = [one for one in missed if one.share == share]
        if not mine or len(short) < MIN_SHORT_STATES:
            continue
        rooms = calibrate(short, kept_of(kept))
        for of in PREDICTED:
            scores = [
                excess(one.miss(of, kept), _edge(rooms, one, of), one.distance[of])
                for one in mine
                if one.distance[of] > 0
            ]
            found[of].append(growth_of(scores, len(scores), CONFIDENCE))
    return {of: max((one for one in some if not isinf(one)), default=inf) for of, some in found.items()}


def _longest(misses: Sequence[Misses]) -> float:
    return max(one.computed_tokens for one in misses)


def _edge(intervals: Intervals, one: Beyond, of: str) -> Room:
    number = intervals.bin_of(one.carried.computed_tokens, one.carried.running_requests)
    return intervals.room(of, number, True)


def _room(intervals: Intervals, one: Beyond, of: str) -> Room:
    number = intervals.bin_of(one.carried.computed_tokens, one.carried.running_requests)
    return intervals.room(of, number, True, one.distance[of])
