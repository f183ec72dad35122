"""Transfer of a law to another LLM, GPU or link: first by shapes and data sheets, then scaled to measured states.

Few measurements cannot determine all constants of a law, but they can determine how much slower everything is, and to
some extent what is slower than the rest. Each group of a law's coefficients is scaled by exp(common + own). The scales
are the robust maximum a posteriori estimate under heavy-tailed priors around 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, inf, log, log1p, sqrt
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from kvpolicy.arrays import Floats
from kvpolicy.cost.laws import CHANNEL_FIELDS, Channel, Law, LinearLaw, RecomputeRoofline, SwapRoofline
from kvpolicy.cost.model import Provenance
from kvpolicy.datasets.examples import Example
from kvpolicy.datasets.profiles import TransferRecord
from kvpolicy.hardware import Geometry
from kvpolicy.hardware.sheets import known_sheet

Scales = Mapping[str, float]
LawScaling = Callable[[Scales], Law]


@dataclass(frozen=True, slots=True)
class Spreads:
    """Prior spreads of the scales, and the spread of errors, on the log scale."""

    common: float = 0.2
    """Of the common scale. Its prior is Cauchy's distribution, with heavy tails: most often little changes, but a
    change may be by any factor."""
    own: float = 0.15
    """Of each group's own scale, with the same prior: of a link the latency alone may change."""
    miss: float = 0.1
    """Of log(measured / predicted) of a state under the right law."""


ELSEWHERE = Spreads()
"""Spreads for another machine, LLM or link."""
MAX_EXPONENT = 50.0
TRANSFER_SPREAD = 0.1
"""Of log(measured / predicted) of the duration of a transfer (a save or a load)."""
OUTLIER_SPREADS = 2.5
"""Errors above this many spreads count only linearly."""
RECOMPUTE_GROUPS: Mapping[str, tuple[str, ...]] = {
    "overhead": ("fixed_s", "alone_s"),
    "linear": ("s_per_token",),
    "attention": ("s_per_pair", "s_per_kv_token", "s_per_window_pair"),
    "weights": ("weight_s", "expert_s"),
}
SHARE_GROUPS: Mapping[str, tuple[str, ...]] = {
    "overhead": ("fixed_s", "alone_s"),
    "save": ("save_share", "save_queue_share"),
    "load": ("load_alone_share", "load_beside_share", "load_queue_share", "load_held_share"),
}


def carry_law(
    law: Law,
    examples: Sequence[Example],
    floor_s: float,
    transfers: Sequence[TransferRecord] = (),
    offsets: Sequence[float] = (),
    spreads: Spreads = ELSEWHERE,
) -> Law:
    """Scale the law to a few examples.

    ``transfers``: the examples' transfers (saves and loads). ``offsets``: log factors on the law's predictions, one per
    example.
    """
    offsets = offsets or [0.0] * len(examples)
    if isinstance(law, SwapRoofline):
        save, load = (_carry_channel(getattr(law, direction), direction, transfers) for direction in ("save", "load"))
        law = replace(law, save=save, load=load)
    if not examples:
        return law
    groups, apply = _scaling(law)

    def misses(scaled: Law) -> list[float]:
        return [
            _log_error_above_floor(example.engine_s, sum(scaled.parts(example.x)) * exp(offset), floor_s)
            / hypot(1.0, floor_s / (spreads.miss * max(example.engine_s, floor_s)))
            for example, offset in zip(examples, offsets, strict=True)
        ]

    return apply(_scales(groups, lambda scales: misses(apply(scales)), spreads))


def scaled_by(law: Law, factor: float) -> Law:
    """The law with every prediction multiplied by ``factor``."""
    groups, apply = _scaling(law)
    return apply(dict.fromkeys(groups, factor))


def _scaling(law: Law) -> tuple[tuple[str, ...], LawScaling]:
    """The groups of coefficients that can be scaled, and a function from their scales to the scaled law."""
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
    raise TypeError(f"{type(law).__name__}: this law cannot be transferred")


def _carry_channel(channel: Channel, direction: str, transfers: Sequence[TransferRecord]) -> Channel:
    measured = [transfer for transfer in transfers if transfer.direction == direction and transfer.duration_s > 0]
    present = tuple(name for name in CHANNEL_FIELDS if getattr(channel, name))
    if not measured or not present:
        return channel

    def apply(scales: Scales) -> Channel:
        return replace(channel, **{name: getattr(channel, name) * scales[name] for name in present})

    def misses(scaled: Channel) -> list[float]:
        return [
            log(transfer.duration_s / scaled.seconds(transfer.size_bytes, transfer.segments)) for transfer in measured
        ]

    return apply(_scales(present, lambda scales: misses(apply(scales)), replace(ELSEWHERE, miss=TRANSFER_SPREAD)))


def _log_error_above_floor(measured_s: float, predicted_s: float, floor_s: float) -> float:
    """log(measured / predicted); for a cost below the noise floor log(floor / predicted), at most 0."""
    if measured_s > floor_s:
        return log(measured_s / max(predicted_s, 1e-12))
    return min(0.0, log(floor_s / max(predicted_s, 1e-12)))


def _scales(groups: Sequence[str], misses: Callable[[Scales], list[float]], spreads: Spreads) -> dict[str, float]:
    """exp(common + own) of each group at the maximum a posteriori; from two starts, as heavy tails give two minima."""

    def named(logs: Floats) -> dict[str, float]:
        return {
            group: exp(min(max(logs[0] + own, -MAX_EXPONENT), MAX_EXPONENT))
            for group, own in zip(groups, logs[1:], strict=True)
        }

    def residuals(logs: Floats) -> Floats:
        own = [_cauchy(float(scale) / spreads.own) for scale in logs[1:]]
        errors = (_huber(miss / spreads.miss) for miss in misses(named(logs)))
        return np.array([*errors, _cauchy(logs[0] / spreads.common), *own])

    unscaled = np.zeros(len(groups) + 1)
    median_miss = float(np.median(misses(named(unscaled))))
    starts = (
        [unscaled] if abs(median_miss) < spreads.common else [unscaled, np.concatenate([[median_miss], unscaled[1:]])]
    )
    solutions = [least_squares(residuals, start, xtol=1e-6, ftol=1e-6) for start in starts]
    return named(min(solutions, key=lambda solution: float(solution.cost)).x)


def _huber(z: float) -> float:
    """A residual whose square grows only linearly above :data:`OUTLIER_SPREADS` (Huber loss)."""
    excess = abs(z) - OUTLIER_SPREADS
    if excess <= 0:
        return z
    return (1 if z > 0 else -1) * sqrt(OUTLIER_SPREADS**2 + 2 * OUTLIER_SPREADS * excess)


def _cauchy(z: float) -> float:
    """A residual half of whose square is the negative log density of Cauchy's distribution."""
    return (1 if z > 0 else -1) * sqrt(2 * log1p(z * z))


# ---- without measurements ----


def rebased(law: Law, old: Provenance, new: Provenance, budget_tokens: float = inf) -> Law:
    """The law adjusted by what is known without measurements: the FLOPs per token and pair, the devices' peak rates,
    the other engine's token budget if it is known.

    Devices without a data sheet are taken to be equal until measurements show otherwise. The share of experts that a
    token does not use is in no geometry, and the width of attention windows is missing in older ones: both stay as they
    are (see :func:`unknown_beforehand`).
    """
    if not isinstance(law, RecomputeRoofline):
        return law
    flops, memory = _device_ratios(old.hardware.get("device"), new.hardware.get("device"))
    was, now = old.geometry, new.geometry
    linear = now.linear_flops_per_token / was.linear_flops_per_token
    weights = linear * now.weight_bytes / was.weight_bytes
    kv = _ratio(now.full_layers * now.layer_kv_bytes_per_token, was.full_layers * was.layer_kv_bytes_per_token)
    s_per_pair, s_per_window_pair = _attention(law, was, now)
    return replace(
        law,
        s_per_token=law.s_per_token * linear / flops,
        s_per_pair=s_per_pair / flops,
        s_per_window_pair=s_per_window_pair / flops,
        window_tokens=float(now.window_tokens or law.window_tokens),
        weight_s=law.weight_s * weights / memory,
        expert_s=law.expert_s * weights / memory,
        s_per_kv_token=law.s_per_kv_token * kv / memory,
        budget_tokens=law.budget_tokens if budget_tokens == inf else budget_tokens,
    )


def _attention(law: RecomputeRoofline, was: Geometry, now: Geometry) -> tuple[float, float]:
    """Seconds per pair of the new LLM on the old device, in layers of full attention and in those with a window."""
    if was.window_layers or now.window_layers:
        # Equally fast kernels: what a FLOP takes in one kind of layer it takes in the other.
        full, windowed = was.attention_flops_per_pair, was.window_flops_per_pair
        s_per_flop = law.s_per_pair / full if full else _ratio(law.s_per_window_pair, windowed)
        return s_per_flop * now.attention_flops_per_pair, s_per_flop * now.window_flops_per_pair
    pairs = now.attention_flops_per_pair / was.attention_flops_per_pair
    return law.s_per_pair * pairs, law.s_per_window_pair * pairs


def _ratio(now: float, was: float) -> float:
    """0 where nothing was there to scale."""
    return now / was if was else 0.0


def unknown_beforehand(law: Law, old: Provenance, new: Provenance) -> tuple[str, ...]:
    """Notes on properties of the old LLM that a law carried to another LLM still assumes."""
    if not isinstance(law, RecomputeRoofline) or old.geometry == new.geometry:
        return ()
    assumptions = {
        "s_per_window_pair": f"that attention windows are {law.window_tokens:g} tokens wide",
        "expert_s": f"that a token leaves {law.expert_miss:.1%} of the experts alone",
    }
    if new.geometry.window_layers:
        del assumptions["s_per_window_pair"]
    return tuple(
        f"recompute: assumes, as for the original LLM, {assumption}"
        for name, assumption in assumptions.items()
        if getattr(law, name)
    )


def _device_ratios(old: Any, new: Any) -> tuple[float, float]:
    """Ratios, new device over old, of compute rate and of memory bandwidth; 1 if a data sheet is missing."""
    was, now = known_sheet(old), known_sheet(new)
    if was is None or now is None:
        return 1.0, 1.0
    return now.bf16_flops / was.bf16_flops, now.memory_bytes_per_s / was.memory_bytes_per_s
