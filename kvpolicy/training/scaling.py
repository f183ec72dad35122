"""Scaling a law's constants to a few measurements.

Few measurements cannot fit a law anew, but they can say how much slower everything is, and a little about what is
slower than the rest. Each group of a law's coefficients is scaled by exp(common + its own); the scales are the
robust maximum a posteriori under heavy-tailed priors around 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, log, log1p, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from kvpolicy.cost.laws import CHANNEL_FIELDS, Channel, Law, LinearLaw, RecomputeRoofline, SwapRoofline
from kvpolicy.datasets.examples import Example
from kvpolicy.datasets.profiles import Move

Floats = NDArray[np.float64]
Scales = Mapping[str, float]
Apply = Callable[[Scales], Law]


@dataclass(frozen=True, slots=True)
class Spreads:
    """How far scales and misses may go, on the log scale."""

    common: float = 0.2
    """Of the common scale before anything is measured. Its prior has Cauchy's heavy tails: most often little changes,
    and when something does it may be by any factor."""
    own: float = 0.15
    """Of each group's own, with the same tails: a link may gain in latency alone."""
    miss: float = 0.1
    """What a state's measured cost misses a right law by."""


ELSEWHERE = Spreads()
MOST_EXPONENT = 50.0
MOVE_SPREAD = 0.1
"""The same of a copy's duration."""
OUTLIER_SPREADS = 2.5
"""Misses and scales beyond that many spreads count only linearly."""
RECOMPUTE_GROUPS: Mapping[str, tuple[str, ...]] = {
    "overhead": ("fixed_s", "alone_s"),
    "linear": ("s_per_token",),
    "attention": ("s_per_pair", "s_per_kv_token", "s_per_window_pair"),
    "weights": ("weight_s", "expert_s"),
}
SHARE_GROUPS: Mapping[str, tuple[str, ...]] = {
    "overhead": ("fixed_s", "alone_s"),
    "save": ("save_share", "save_queue_share"),
    "load": ("load_alone_share", "load_beside_share", "load_queue_share"),
}
CHANNEL_GROUPS: Mapping[str, tuple[str, ...]] = {name: (name,) for name in CHANNEL_FIELDS}


def carry_law(
    law: Law,
    examples: Sequence[Example],
    floor_s: float,
    moves: Sequence[Move] = (),
    offsets: Sequence[float] = (),
    spreads: Spreads = ELSEWHERE,
) -> Law:
    """The law, scaled to a few examples. ``moves``: their copies; ``offsets``: log factors on the law's predictions."""
    offsets = offsets or [0.0] * len(examples)
    if isinstance(law, SwapRoofline):
        save, load = (_carry_channel(getattr(law, way), way, moves) for way in ("save", "load"))
        law = replace(law, save=save, load=load)
    if not examples:
        return law
    groups, apply = _scaling(law)

    def misses(scaled: Law) -> list[float]:
        return [
            _pull(example.engine_s, sum(scaled.parts(example.x)) * exp(offset), floor_s)
            / hypot(1.0, floor_s / (spreads.miss * max(example.engine_s, floor_s)))
            for example, offset in zip(examples, offsets, strict=True)
        ]

    return apply(_scales(groups, lambda scales: misses(apply(scales)), spreads))


def scaled_by(law: Law, factor: float) -> Law:
    """The law, every prediction multiplied by ``factor``."""
    groups, apply = _scaling(law)
    return apply(dict.fromkeys(groups, factor))


def _scaling(law: Law) -> tuple[tuple[str, ...], Apply]:
    """The groups of coefficients that may be scaled, and what makes the scaled law."""
    if isinstance(law, RecomputeRoofline | SwapRoofline):
        fields = RECOMPUTE_GROUPS if isinstance(law, RecomputeRoofline) else SHARE_GROUPS
        present = {group: names for group, names in fields.items() if any(getattr(law, name) for name in names)}

        def scaled(scales: Scales) -> Law:
            values = {name: getattr(law, name) * scales[group] for group, names in present.items() for name in names}
            return replace(law, **values)

        return tuple(present), scaled
    if isinstance(law, LinearLaw):
        weights = law.per_feature_s
        return ("all",), lambda scales: LinearLaw(
            law.constant_s * scales["all"], {name: weight * scales["all"] for name, weight in weights.items()}
        )
    raise TypeError(f"{type(law).__name__}: no law that can be carried")


def _carry_channel(channel: Channel, way: str, moves: Sequence[Move]) -> Channel:
    mine = [move for move in moves if move.direction == way and move.duration_s > 0]
    present = tuple(name for name in CHANNEL_FIELDS if getattr(channel, name))
    if not mine or not present:
        return channel

    def apply(scales: Scales) -> Channel:
        return replace(channel, **{name: getattr(channel, name) * scales[name] for name in present})

    def misses(scaled: Channel) -> list[float]:
        return [log(move.duration_s / scaled.seconds(move.size_bytes, move.segments)) for move in mine]

    return apply(_scales(present, lambda scales: misses(apply(scales)), replace(ELSEWHERE, miss=MOVE_SPREAD)))


def _pull(measured_s: float, predicted_s: float, floor_s: float) -> float:
    """log(measured / predicted); a cost too small to be told from none only pulls down what is above the floor."""
    if measured_s > floor_s:
        return log(measured_s / max(predicted_s, 1e-12))
    return min(0.0, log(floor_s / max(predicted_s, 1e-12)))


def _scales(groups: Sequence[str], misses: Callable[[Scales], list[float]], spreads: Spreads) -> dict[str, float]:
    """exp(common + own) of each group at the maximum a posteriori; from two starts, as heavy tails make two valleys."""

    def named(logs: Floats) -> dict[str, float]:
        return {
            group: exp(min(max(logs[0] + own, -MOST_EXPONENT), MOST_EXPONENT))
            for group, own in zip(groups, logs[1:], strict=True)
        }

    def residuals(logs: Floats) -> Floats:
        own = [_cauchy(float(one) / spreads.own) for one in logs[1:]]
        missed = (_held_down(miss / spreads.miss) for miss in misses(named(logs)))
        return np.array([*missed, _cauchy(logs[0] / spreads.common), *own])

    nothing = np.zeros(len(groups) + 1)
    apart = float(np.median(misses(named(nothing))))
    starts = [nothing] if abs(apart) < spreads.common else [nothing, np.concatenate([[apart], nothing[1:]])]
    found = [least_squares(residuals, start, xtol=1e-6, ftol=1e-6) for start in starts]
    return named(min(found, key=lambda one: float(one.cost)).x)


def _held_down(z: float) -> float:
    """A residual whose square grows only linearly beyond a few spreads (Huber)."""
    beyond = abs(z) - OUTLIER_SPREADS
    if beyond <= 0:
        return z
    return (1 if z > 0 else -1) * sqrt(OUTLIER_SPREADS**2 + 2 * OUTLIER_SPREADS * beyond)


def _cauchy(z: float) -> float:
    """A residual with half of its square the negative log density of Cauchy's distribution."""
    return (1 if z > 0 else -1) * sqrt(2 * log1p(z * z))
