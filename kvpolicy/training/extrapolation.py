"""Inner extrapolation of a cost model: models fitted to short training states are tested on the longer ones.

Outside the trained range an interval's margin grows with the distance from the range. The growth is estimated inside
the training data: a model is fitted to the states up to a share of the longest length, and predicts the longer ones.
Where its errors exceed the margin *that the states up to there alone would have given*, the excess determines the
growth. Coverage outside the range is then tested by the same procedure within the states up to a quarter, and up to
half, of the longest length; the states beyond, on which it is tested, take no part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isinf, log, sqrt
from statistics import fmean, median
from typing import Any

from kvpolicy.cost.intervals import PREDICTED, Intervals, Misses, calibrate, carried_quantities
from kvpolicy.cost.model import FittedModel
from kvpolicy.datasets.examples import expected_examples_of
from kvpolicy.datasets.profiles import State
from kvpolicy.events import KINDS, Kind
from kvpolicy.features import GROWING, Features
from kvpolicy.regression.conformal import CONFIDENCE, SHARES, Margin, carries, excess, growth_of
from kvpolicy.regression.residual import inner_rows
from kvpolicy.training.coverage import share_held

MIN_SHORT_STATES = 12
"""Minimum number of states up to an inner edge: with fewer no law can be determined."""
LOG_DOUBLE = log(2.0)
"""Distance at which coverage is reported in two parts: up to twice the edge, and from there on."""
ALL_SHARES = tuple(sorted({*SHARES, *(share * other for share in SHARES for other in SHARES)}))
"""Shares of the longest length up to which models are fitted: :data:`SHARES` to estimate growth, and their products to
estimate it again within each share, where coverage is tested."""


@dataclass(frozen=True, slots=True)
class ExtrapolatedMiss:
    """Errors of a model fitted to shorter states on one longer state."""

    share: float
    """The model was fitted to states up to this share of the longest length."""
    name: str
    carried: Misses
    """With the residual held at its value at the range's edge."""
    dropped: Misses
    """Without the residual."""
    distance: Mapping[str, float]
    """Distance from the model's range, by predicted quantity; 0 if inside, however long the state is."""

    def miss(self, quantity: str, kept_residuals: Mapping[Kind, bool]) -> float:
        """log(measured / predicted) of one quantity; ``kept_residuals``: whether each option's residual is kept."""
        if quantity == "ratio":
            return self.miss("swap", kept_residuals) - self.miss("recompute", kept_residuals)
        return next(
            (self.carried if kept_residuals[kind] else self.dropped).model[kind] for kind in KINDS if kind == quantity
        )


def extrapolated_misses(
    states: Sequence[State],
    fit: Callable[[Sequence[State]], FittedModel],
    misses_of: Callable[[FittedModel, Sequence[State]], list[Misses]],
) -> list[ExtrapolatedMiss]:
    """Errors on the longer states of models fitted up to each of :data:`ALL_SHARES` of the longest length."""
    extrapolated = []
    for share, short_rows, longer_rows in inner_rows([state.computed_tokens for state in states], ALL_SHARES):
        if len(short_rows) < MIN_SHORT_STATES:
            continue
        longer = [states[i] for i in longer_rows]
        model = fit([states[i] for i in short_rows])
        carried, dropped = (
            misses_of(replace(model, carried=dict.fromkeys(KINDS, keep)), longer) for keep in (True, False)
        )
        examples = expected_examples_of(longer)
        for i, state in enumerate(longer):
            distance = {kind: model.distance(kind, examples[kind][i].x) for kind in KINDS}
            by_quantity: dict[str, float] = {kind: distance[kind] for kind in KINDS}
            by_quantity["ratio"] = max(distance.values())
            extrapolated.append(ExtrapolatedMiss(share, state.name, carried[i], dropped[i], by_quantity))
    return extrapolated


def residuals_kept(extrapolated: Sequence[ExtrapolatedMiss], trees: Mapping[Kind, int]) -> dict[Kind, bool]:
    """Whether to keep each option's residual outside the range; False if too few states can decide it."""
    kept_residuals = {}
    for kind in KINDS:
        outside = [miss for miss in extrapolated if miss.share in SHARES and miss.distance[kind] > 0]
        carried, dropped = ([getattr(miss, name).model[kind] for miss in outside] for name in ("carried", "dropped"))
        kept_residuals[kind] = bool(trees[kind]) and carries(
            carried, dropped, len({miss.name for miss in outside}), default=False
        )
    return kept_residuals


def with_growth(
    intervals: Intervals,
    inside: Sequence[Misses],
    extrapolated: Sequence[ExtrapolatedMiss],
    kept_residuals: Mapping[Kind, bool],
    min_growth: Mapping[str, float],
) -> Intervals:
    """The intervals with the margin that they gain per unit of distance, at least ``min_growth``.

    ``inside``: the errors that they were calibrated on.
    """
    growth = _growth(inside, extrapolated, kept_residuals)
    return replace(intervals, growth={quantity: max(growth[quantity], min_growth[quantity]) for quantity in PREDICTED})


def inner_coverage(
    inside: Sequence[Misses], extrapolated: Sequence[ExtrapolatedMiss], kept_residuals: Mapping[Kind, bool]
) -> dict[str, Any]:
    """Coverage of intervals outside the range, tested within the training data.

    Margins and growth come from the states up to a share of the longest length; they are tested on the errors that a
    model fitted up to there makes on the longer states. Returned by predicted quantity, with the number of tested
    states and the 95% interval; empty if there are too few short states.
    """
    hits: dict[str, list[tuple[float, bool]]] = {quantity: [] for quantity in PREDICTED}
    longest = _longest(inside)
    for share in SHARES:
        short = [miss for miss in inside if miss.computed_tokens <= share * longest]
        intervals = _intervals_up_to(short, share, extrapolated, kept_residuals)
        if intervals is None:
            continue
        for miss in extrapolated:
            if miss.share != share:
                continue
            for quantity in PREDICTED:
                below, above = margin = _margin_of(intervals, miss, quantity)
                if miss.distance[quantity] > 0 and not isinf(max(margin)):
                    hits[quantity].append(
                        (miss.distance[quantity], -below <= miss.miss(quantity, kept_residuals) <= above)
                    )
    return {
        quantity: share_held([hit for _, hit in pairs])
        | {
            "up_to_2x": share_held([hit for distance, hit in pairs if distance < LOG_DOUBLE]),
            "from_2x": share_held([hit for distance, hit in pairs if distance >= LOG_DOUBLE]),
        }
        for quantity, pairs in hits.items()
    }


STRETCHES = (2.0, 4.0, 8.0)
"""Multiples of the trained lengths at which models fitted to parts of the states are compared."""
STUDENT_T = 2.132
"""95th percentile of Student's t with 4 degrees of freedom: five fits give an uncertain estimate of their scatter."""


def growth_by_scatter(
    fits: Sequence[FittedModel], states: Sequence[State], kept_residuals: Mapping[Kind, bool]
) -> dict[str, float]:
    """Growth of the margin, per unit of distance, that the scatter of the fits themselves requires.

    ``fits``: one model per fold, fitted to all other folds. Their predictions for the longest states, stretched, are
    compared (the delete-a-group jackknife; median of the states, maximum of the stretches). Constants that hardly
    matter within the range and dominate beyond it show in no error inside.
    """
    models = [replace(model, carried=dict(kept_residuals)) for model in fits]
    longest = max(state.computed_tokens for state in states)
    edge = [state for state in states if state.computed_tokens > longest / 2]
    examples = expected_examples_of(edge)
    growth = dict.fromkeys(PREDICTED, 0.0)
    for times in STRETCHES:
        stretched = [{kind: _stretched(examples[kind][i].x, times) for kind in KINDS} for i in range(len(edge))]
        logs = [{kind: [log(model.seconds(kind, x[kind])) for model in models] for kind in KINDS} for x in stretched]
        for quantity in PREDICTED:
            errors = [
                _jackknife_error(
                    [b - a for a, b in zip(by_kind["recompute"], by_kind["swap"], strict=True)]
                    if quantity == "ratio"
                    else next(by_kind[kind] for kind in KINDS if kind == quantity)
                )
                for by_kind in logs
            ]
            growth[quantity] = max(growth[quantity], STUDENT_T * median(errors) / log(times))
    return growth


def _stretched(x: Features, times: float) -> Features:
    """Features of a victim ``times`` as long, everything else in the engine unchanged."""
    grown = {name: getattr(x, name) * (times**2 if name == "recomputed_pairs" else times) for name in GROWING}
    return x._replace(**grown)


def _jackknife_error(values: Sequence[float]) -> float:
    """Standard error of an estimate; ``values``: the estimate without each of the groups."""
    mean = fmean(values)
    return sqrt((len(values) - 1) / len(values) * sum((value - mean) ** 2 for value in values))


def _intervals_up_to(
    short: Sequence[Misses], share: float, extrapolated: Sequence[ExtrapolatedMiss], kept_residuals: Mapping[Kind, bool]
) -> Intervals | None:
    """Intervals of a model trained on ``short`` alone, the states up to ``share``; None if they are too few."""
    if len(short) < MIN_SHORT_STATES:
        return None
    longest = _longest(short)
    nested = [
        replace(miss, share=miss.share / share)
        for miss in extrapolated
        if miss.share < share and miss.carried.computed_tokens <= longest
    ]
    return with_growth(
        calibrate(short, carried_quantities(kept_residuals)),
        short,
        nested,
        kept_residuals,
        dict.fromkeys(PREDICTED, 0.0),
    )


def _growth(
    inside: Sequence[Misses], extrapolated: Sequence[ExtrapolatedMiss], kept_residuals: Mapping[Kind, bool]
) -> dict[str, float]:
    """Growth by quantity: the maximum over the fits up to each share.

    The errors of one fit are correlated, and the next fit may be as far off as the worse of two.
    """
    longest = _longest(inside)
    growths: dict[str, list[float]] = {quantity: [] for quantity in PREDICTED}
    for share in SHARES:
        short = [miss for miss in inside if miss.computed_tokens <= share * longest]
        longer = [miss for miss in extrapolated if miss.share == share]
        if not longer or len(short) < MIN_SHORT_STATES:
            continue
        intervals = calibrate(short, carried_quantities(kept_residuals))
        for quantity in PREDICTED:
            scores = [
                excess(
                    miss.miss(quantity, kept_residuals),
                    _edge_margin(intervals, miss, quantity),
                    miss.distance[quantity],
                )
                for miss in longer
                if miss.distance[quantity] > 0
            ]
            growths[quantity].append(growth_of(scores, len(scores), CONFIDENCE))
    return {
        quantity: max((growth for growth in values if not isinf(growth)), default=inf)
        for quantity, values in growths.items()
    }


def _longest(misses: Sequence[Misses]) -> float:
    return max(miss.computed_tokens for miss in misses)


def _edge_margin(intervals: Intervals, miss: ExtrapolatedMiss, quantity: str) -> Margin:
    """Margin at the edge of the range."""
    number = intervals.bin_of(miss.carried.computed_tokens, miss.carried.running_requests)
    return intervals.room(quantity, number, True)


def _margin_of(intervals: Intervals, miss: ExtrapolatedMiss, quantity: str) -> Margin:
    """Margin at the state's distance from the range."""
    number = intervals.bin_of(miss.carried.computed_tokens, miss.carried.running_requests)
    return intervals.room(quantity, number, True, miss.distance[quantity])
