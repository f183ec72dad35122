"""Carry (transfer) a cost model to another LLM, GPU or link by a few states measured there.

The laws are first adjusted by what is known without measurements, the shapes of both LLMs and the data sheets of both
devices, and then scaled to the measured states. The learned residual is kept, halved or dropped.

Few measurements cannot determine all constants of a law, but they can determine how much slower everything is, and to
some extent what is slower than the rest. Each group of a law's coefficients is scaled by exp(common + own). The scales
are the robust maximum a posteriori estimate under heavy-tailed priors around 0.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, hypot, inf, log, log1p, sqrt
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from kvpolicy.arrays import Floats
from kvpolicy.cost.intervals import calibrate, carried_quantities, unbounded
from kvpolicy.cost.laws import CHANNEL_FIELDS, Channel, Law, LinearLaw, RecomputeRoofline, SwapRoofline
from kvpolicy.cost.model import FittedModel, Provenance
from kvpolicy.cost.store import ForestText, forest_of
from kvpolicy.datasets.examples import Example, examples_of, log_miss, noise_floors, ranges_of
from kvpolicy.datasets.profiles import Dataset, State, TransferRecord
from kvpolicy.events import KINDS, Kind
from kvpolicy.features import FEATURES
from kvpolicy.hardware import same_machine
from kvpolicy.hardware.sheets import known_sheet
from kvpolicy.training.fit import misses_of
from kvpolicy.training.law_fits import MIN_STATES, fit_others_shares, fit_victim_delays, victim_delay_examples

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
    "load": ("load_alone_share", "load_beside_share", "load_queue_share"),
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


UNCHANGED_SPREAD = 0.05
"""Of both scales of a law if neither the machine, the LLM nor (for swaps) the link has changed."""
FLOOR_S = 1e-6
MAX_MISS_SPREAD = 0.2
"""Larger errors of a model on its own states are due to noise, which is accounted for separately."""
LEAVE_OUTS = 10
"""Maximum number of folds that states are left out in."""
DAMPINGS = (1.0, 0.5, 0.0)
"""Shares of the learned residual to choose from."""
MIN_STATES_TO_CHOOSE = 8
"""With fewer states half of a learned residual is kept: they cannot determine whether it holds."""


@dataclass(frozen=True, slots=True)
class CarriedModel:
    """A carried model, with what is stored beside it."""

    model: FittedModel
    forests: Mapping[Kind, ForestText]


def rebased(law: Law, old: Provenance, new: Provenance, budget_tokens: float = inf) -> Law:
    """The law adjusted by what is known without measurements: the FLOPs per token and pair, the devices' peak rates,
    the other engine's token budget if it is known.

    Devices without a data sheet are taken to be equal until measurements show otherwise. The share of experts that a
    token does not use, and the width of attention windows, are in no geometry: both stay as they are (see
    :func:`unknown_beforehand`).
    """
    if not isinstance(law, RecomputeRoofline):
        return law
    flops, memory = _device_ratios(old.hardware.get("device"), new.hardware.get("device"))
    was, now = old.geometry, new.geometry
    linear = now.linear_flops_per_token / was.linear_flops_per_token
    weights = linear * now.weight_bytes / was.weight_bytes
    kv = now.kv_bytes_per_token / was.kv_bytes_per_token
    pairs = now.attention_flops_per_pair / was.attention_flops_per_pair
    return replace(
        law,
        s_per_token=law.s_per_token * linear / flops,
        s_per_pair=law.s_per_pair * pairs / flops,
        s_per_window_pair=law.s_per_window_pair * pairs / flops,
        weight_s=law.weight_s * weights / memory,
        expert_s=law.expert_s * weights / memory,
        s_per_kv_token=law.s_per_kv_token * kv / memory,
        budget_tokens=law.budget_tokens if budget_tokens == inf else budget_tokens,
    )


def unknown_beforehand(law: Law, old: Provenance, new: Provenance) -> tuple[str, ...]:
    """Notes on properties of the old LLM that a law carried to another LLM still assumes."""
    if not isinstance(law, RecomputeRoofline) or old.geometry == new.geometry:
        return ()
    assumptions = {
        "s_per_window_pair": f"that attention windows are {law.window_tokens:g} tokens wide",
        "expert_s": f"that a token leaves {law.expert_miss:.1%} of the experts alone",
    }
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


# ---- a model ----


def carry(
    model: FittedModel,
    forests: Mapping[Kind, ForestText],
    states: Sequence[State],
    dataset: Dataset,
    target: Provenance,
) -> CarriedModel:
    """Carry ``model`` to the machine, link and LLM that ``states`` of ``dataset`` were measured on.

    ``target``: provenance of the carried model. Intervals come from leaving states out; infinite if they are too few.
    """
    carried = carry_once(model, forests, states, dataset, target)
    fold_count = min(len(states), LEAVE_OUTS)
    misses = []
    for fold in range(fold_count if len(states) > 1 else 0):
        fitting = [state for i, state in enumerate(states) if i % fold_count != fold]
        held_out = [state for i, state in enumerate(states) if i % fold_count == fold]
        misses += misses_of(carry_once(model, forests, fitting, dataset, target).model, held_out)
    if not misses:
        return carried
    # A few states cannot determine how errors grow outside their range. The model's own growth holds if nothing has
    # changed; otherwise intervals outside the measured range are infinite.
    unchanged: dict[str, bool] = {kind: _unchanged(kind, model.provenance, target) for kind in KINDS}
    unchanged["ratio"] = all(unchanged.values())
    growth = {quantity: value if unchanged[quantity] else inf for quantity, value in model.intervals.growth.items()}
    intervals = replace(calibrate(misses, carried_quantities(model.carried)), growth=growth)
    return replace(carried, model=replace(carried.model, intervals=intervals))


def carry_once(
    model: FittedModel,
    forests: Mapping[Kind, ForestText],
    states: Sequence[State],
    dataset: Dataset,
    target: Provenance,
) -> CarriedModel:
    """As :func:`carry`, with infinite intervals."""
    examples = examples_of(states)
    repeated = any(len(samples) > 1 for state in states for samples in state.samples.values())
    floor_s = noise_floors(states) if repeated else dict(model.floor_s)
    transfers = dataset.transfers_of(states)
    laws: dict[Kind, Law] = {}
    stored_forests: dict[Kind, ForestText] = {}
    for kind in KINDS:
        base = rebased(model.laws[kind], model.provenance, target, dataset.budget_tokens)
        share, laws[kind] = _scaled(model, kind, base, examples[kind], floor_s[kind], transfers, target)
        if kind in forests and share:
            stored_forests[kind] = damped(forests[kind], share)
    carried = FittedModel(
        name=model.name,
        provenance=target,
        laws=laws,
        residuals={kind: forest_of(text) for kind, text in stored_forests.items()},
        ranges={kind: _ranges(model, kind, examples[kind], target) for kind in KINDS},
        floor_s=floor_s,
        intervals=unbounded(),
        victim_delays=_victim_delays(model, states),
        others_share=fit_others_shares(states) if len(states) >= MIN_STATES else dict(model.others_share),
        step_time=dataset.common_step_time,
        carried=dict(model.carried),
    )
    return CarriedModel(carried, stored_forests)


def _victim_delays(model: FittedModel, states: Sequence[State]) -> Mapping[Kind, Law]:
    """Victim delays fitted to the states if these are enough; otherwise the model's, scaled."""
    refitted = fit_victim_delays(states)
    if refitted:
        return refitted
    return {
        kind: carry_law(law, victim_delay_examples(states, kind), FLOOR_S) for kind, law in model.victim_delays.items()
    }


def _spreads(model: FittedModel, kind: Kind, target: Provenance) -> Spreads:
    """Spreads by the model's held-out error, its mean converted to the standard deviation of a normal distribution."""
    scores = model.provenance.held_out.get(kind)
    mean_error = scores.get("mean_error") if isinstance(scores, Mapping) else None
    spreads = (
        ELSEWHERE
        if not mean_error
        else replace(ELSEWHERE, miss=min(max(1.25 * float(mean_error), 0.05), MAX_MISS_SPREAD))
    )
    if _unchanged(kind, model.provenance, target):
        return replace(spreads, common=UNCHANGED_SPREAD, own=UNCHANGED_SPREAD)
    return spreads


def _unchanged(kind: Kind, old: Provenance, new: Provenance) -> bool:
    """Whether measurements of the old machine, LLM and link hold on the new; never for an untrained model."""
    same_place = bool(old.state_ids) and same_machine(old.hardware, new.hardware) and old.geometry == new.geometry
    return same_place and (kind == "recompute" or old.link == new.link)


def _offsets(model: FittedModel, kind: Kind, examples: Sequence[Example], share: float) -> list[float]:
    forest = model.residuals.get(kind)
    if forest is None or not share:
        return [0.0] * len(examples)
    keep_outside = model.carried[kind]
    return [
        share * forest.predict(example.x) if keep_outside or not model.outside(kind, example.x) else 0.0
        for example in examples
    ]


def _scaled(
    model: FittedModel,
    kind: Kind,
    base: Law,
    examples: Sequence[Example],
    floor_s: float,
    transfers: Sequence[TransferRecord],
    target: Provenance,
) -> tuple[float, Law]:
    """The share of the learned residual to keep, and the scaled law: the pair with the smallest error on the states.

    ``base``: the law to scale, from :func:`rebased`.
    """
    spreads = _spreads(model, kind, target)
    candidates = []
    for share in _dampings(model, kind, len(examples), target):
        offsets = _offsets(model, kind, examples, share)
        law = carry_law(base, examples, floor_s, transfers, offsets, spreads)
        predicted = [sum(law.parts(example.x)) * exp(offset) for example, offset in zip(examples, offsets, strict=True)]
        total_error = sum(
            abs(log_miss(example.engine_s, seconds, floor_s))
            for example, seconds in zip(examples, predicted, strict=True)
        )
        candidates.append((total_error, share, law))
    _, share, law = min(candidates, key=lambda candidate: candidate[0])
    return share, law


def _dampings(model: FittedModel, kind: Kind, states: int, target: Provenance) -> tuple[float, ...]:
    """Shares of the residual to choose from; a single one if there are too few states to choose."""
    if kind not in model.residuals:
        return (0.0,)
    if states < MIN_STATES_TO_CHOOSE:
        return (1.0,) if _unchanged(kind, model.provenance, target) else (0.5,)
    return DAMPINGS


def damped(forest: ForestText, share: float) -> ForestText:
    """The forest with every leaf value multiplied by ``share``."""

    def scaled(line: re.Match[str]) -> str:
        return "leaf_value=" + " ".join(repr(float(value) * share) for value in line.group(1).split())

    return replace(forest, text=re.sub(r"^leaf_value=(.*)$", scaled, forest.text, flags=re.MULTILINE))


def _ranges(
    model: FittedModel, kind: Kind, examples: Sequence[Example], target: Provenance
) -> dict[str, tuple[float, float]]:
    """Ranges of the measured states; joined with the model's own ranges if nothing has changed."""
    old, new = model.ranges[kind], ranges_of(examples)
    if not _unchanged(kind, model.provenance, target):
        return new
    return {name: (min(old[name][0], new[name][0]), max(old[name][1], new[name][1])) for name in FEATURES}


# ---- how many measurements it takes ----


@dataclass(frozen=True, slots=True)
class ErrorByCount:
    """Held-out error by number of measured states, over several draws of these."""

    states: int
    draws: int
    mean_error: Mapping[Kind, float]
    """Mean |log(measured / predicted)| of held-out states, averaged over the draws."""
    worst_draw: Mapping[Kind, float]
    """Maximum of the draws' means."""


def error_by_count(
    counts: Sequence[int],
    states: Sequence[State],
    held_out: Sequence[State],
    predict: Callable[[Sequence[State]], FittedModel],
    seed: int,
    draws: int = 5,
) -> tuple[ErrorByCount, ...]:
    """Error on ``held_out`` by number of ``states`` used; ``predict``: from states to a model."""
    rng = random.Random(f"error by count {seed}")
    examples, floors = examples_of(held_out), noise_floors([*states, *held_out])
    rows = []
    for count in counts:
        errors = [_errors(predict(spread(states, count, rng)), examples, floors) for _ in range(draws if count else 1)]
        rows.append(
            ErrorByCount(
                count,
                len(errors),
                {kind: sum(error[kind] for error in errors) / len(errors) for kind in KINDS},
                {kind: max(error[kind] for error in errors) for kind in KINDS},
            )
        )
    return tuple(rows)


def _errors(
    model: FittedModel, examples: Mapping[Kind, Sequence[Example]], floors: Mapping[Kind, float]
) -> dict[Kind, float]:
    return {
        kind: sum(
            abs(log_miss(example.engine_s, model.seconds(kind, example.x), floors[kind])) for example in examples[kind]
        )
        / len(examples[kind])
        for kind in KINDS
    }


def spread(states: Sequence[State], count: int, rng: random.Random) -> list[State]:
    """``count`` states, one drawn at random from each of ``count`` quantile ranges of length."""
    ordered = sorted(states, key=lambda state: (state.computed_tokens, state.name))
    edges = [round(i * len(ordered) / count) for i in range(count + 1)] if count else []
    return [rng.choice(ordered[low:high]) for low, high in pairwise(edges)]


def doubling(last: int) -> tuple[int, ...]:
    """1, 2, 4, 8 ... below ``last``, and ``last``."""
    counts = [1 << i for i in range(last.bit_length()) if 1 << i < last]
    return (*counts, last)
