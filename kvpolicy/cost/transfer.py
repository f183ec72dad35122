"""A model carried to another LLM, GPU or link by a handful of states measured there.

Few measurements cannot fit a law anew, but they can say how much slower everything is, and a little about what is
slower than the rest. Each group of a law's coefficients is scaled by exp(common + its own); the scales are the
robust maximum a posteriori under priors around 0: a heavy-tailed one for the common scale, a narrow one for each
group's own. What the shapes of both models and the sheets of both devices tell beforehand is applied before.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, log, log1p, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from kvpolicy.cost.dataset import Dataset, Move, State
from kvpolicy.cost.examples import Example, examples_of, log_miss, noise_floors, ranges_of
from kvpolicy.cost.fitting import misses_of
from kvpolicy.cost.intervals import calibrate
from kvpolicy.cost.laws import CHANNEL_FIELDS, Channel, Law, LinearLaw, RecomputeRoofline, SwapRoofline
from kvpolicy.cost.model import FittedModel, ModelError, Provenance
from kvpolicy.cost.sheets import device_sheet
from kvpolicy.cost.store import ForestText, forest_of
from kvpolicy.events import KINDS, Kind
from kvpolicy.features import FEATURES

Floats = NDArray[np.float64]
Scales = Mapping[str, float]
Apply = Callable[[Scales], Law]

COMMON_SPREAD = 0.2
"""Spread of the common scale's logarithm before anything is measured. Its prior has Cauchy's heavy tails: most often
nothing changes much, and when something does it may be by any factor."""
OWN_SPREAD = 0.3
"""Standard deviation of each group's own: a factor of 1.35."""
MISS_SPREAD = 0.1
"""What a state's measured cost misses a right law by, where the model does not say how far it missed its own."""
MOVE_SPREAD = 0.1
"""The same of a copy's duration."""
OUTLIER_SPREADS = 2.5
"""Misses and scales beyond that many spreads count only linearly."""
LEAVE_OUTS = 10
DAMPINGS = (1.0, 0.5, 0.0)
FEWEST_TO_CHOOSE = 6
"""With fewer states a learned residual is kept by half: they cannot say whether it holds."""

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


@dataclass(frozen=True, slots=True)
class Carried:
    """A carried model and what has to be stored beside it."""

    model: FittedModel
    forests: Mapping[Kind, ForestText]


# ---- one law ----


def carry_law(
    law: Law,
    examples: Sequence[Example],
    floor_s: float,
    moves: Sequence[Move] = (),
    offsets: Sequence[float] = (),
    miss_spread: float = MISS_SPREAD,
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
            for example, offset in zip(examples, offsets, strict=True)
        ]

    return apply(_scales(groups, lambda scales: misses(apply(scales)), miss_spread))


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

    return apply(_scales(present, lambda scales: misses(apply(scales)), MOVE_SPREAD))


def _pull(measured_s: float, predicted_s: float, floor_s: float) -> float:
    """log(measured / predicted); a cost too small to be told from none only pulls down what is above the floor."""
    if measured_s > floor_s:
        return log(measured_s / max(predicted_s, 1e-12))
    return min(0.0, log(floor_s / max(predicted_s, 1e-12)))


def _scales(groups: Sequence[str], misses: Callable[[Scales], list[float]], miss_spread: float) -> dict[str, float]:
    """exp(common + own) of each group at the maximum a posteriori; from two starts, as heavy tails make two valleys."""

    def named(logs: Floats) -> dict[str, float]:
        return {group: exp(logs[0] + own) for group, own in zip(groups, logs[1:], strict=True)}

    def residuals(logs: Floats) -> Floats:
        own = np.asarray(logs[1:]) / OWN_SPREAD
        missed = (_held_down(miss / miss_spread) for miss in misses(named(logs)))
        return np.array([*missed, _cauchy(logs[0] / COMMON_SPREAD), *own])

    starts = np.zeros((2, len(groups) + 1))
    starts[1, 0] = float(np.median(misses(named(starts[0]))))
    found = [least_squares(residuals, start, bounds=(-20.0, 20.0)) for start in starts]
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


def rebased(law: Law, old: Provenance, new: Provenance) -> Law:
    """The law with what is known beforehand applied: other FLOPs per token and pair, other peak rates of the devices.

    Devices without a sheet are taken to be alike until measurements say otherwise.
    """
    if not isinstance(law, RecomputeRoofline):
        return law
    flops, memory = _device_ratios(old.hardware.get("device"), new.hardware.get("device"))
    was, now = old.geometry, new.geometry
    linear = now.linear_flops_per_token / was.linear_flops_per_token
    weights = linear * now.weight_bytes / was.weight_bytes
    kv = now.kv_bytes_per_token / was.kv_bytes_per_token
    return replace(
        law,
        s_per_token=law.s_per_token * linear / flops,
        s_per_pair=law.s_per_pair * now.attention_flops_per_pair / was.attention_flops_per_pair / flops,
        weight_s=law.weight_s * weights / memory,
        s_per_kv_token=law.s_per_kv_token * kv / memory,
    )


def _device_ratios(old: Any, new: Any) -> tuple[float, float]:
    """How many times the compute and the memory bandwidth of the old device the new one has."""
    try:
        was, now = device_sheet(str(old)), device_sheet(str(new))
    except ModelError:
        return 1.0, 1.0
    return now.bf16_flops / was.bf16_flops, now.memory_bytes_per_s / was.memory_bytes_per_s


# ---- a model ----


def carry(
    model: FittedModel, forests: Mapping[Kind, ForestText], states: Sequence[State], dataset: Dataset, made: Provenance
) -> Carried:
    """``model`` carried to where ``states`` of ``dataset`` were measured; ``made``: that place.

    Intervals come from leaving states out, infinite where there are too few.
    """
    one = _carry_once(model, forests, states, dataset, made)
    hands = min(len(states), LEAVE_OUTS)
    misses = []
    for hand in range(hands if len(states) > 1 else 0):
        seen = [state for i, state in enumerate(states) if i % hands != hand]
        left = [state for i, state in enumerate(states) if i % hands == hand]
        misses += misses_of(_carry_once(model, forests, seen, dataset, made).model, left)
    if not misses:
        return one
    return replace(one, model=replace(one.model, intervals=calibrate(misses)))


def _carry_once(
    model: FittedModel, forests: Mapping[Kind, ForestText], states: Sequence[State], dataset: Dataset, made: Provenance
) -> Carried:
    examples = examples_of(states)
    repeated = any(len(some) > 1 for state in states for some in state.samples.values())
    floor_s = noise_floors(states) if repeated else dict(model.floor_s)
    moves = dataset.moves_of(states)
    laws: dict[Kind, Law] = {}
    kept: dict[Kind, ForestText] = {}
    for kind in KINDS:
        base = rebased(model.laws[kind], model.provenance, made)
        share = _damping(model, kind, base, examples[kind], floor_s[kind], moves)
        laws[kind] = carry_law(base, examples[kind], floor_s[kind], moves, _offsets(model, kind, examples[kind], share))
        if kind in forests and share:
            kept[kind] = damped(forests[kind], share)
    carried = FittedModel(
        name=model.name,
        provenance=made,
        laws=laws,
        residuals={kind: forest_of(text) for kind, text in kept.items()},
        ranges={kind: _ranges(model, kind, examples[kind], made) for kind in KINDS},
        floor_s=floor_s,
        intervals=model.intervals,
    )
    return Carried(carried, kept)


def _miss_spread(model: FittedModel, kind: Kind) -> float:
    """Of the model's held-out error where it was trained; mean to standard deviation as of a normal distribution."""
    scores = model.provenance.held_out.get(kind)
    missed = scores.get("mean_error") if isinstance(scores, Mapping) else None
    return MISS_SPREAD if not missed else min(max(1.25 * float(missed), MISS_SPREAD / 2), 1.0)


def _offsets(model: FittedModel, kind: Kind, examples: Sequence[Example], share: float) -> list[float]:
    forest = model.residuals.get(kind)
    if forest is None or not share:
        return [0.0] * len(examples)
    return [0.0 if model.outside(kind, one.x) else share * forest.predict(one.x) for one in examples]


def _damping(
    model: FittedModel, kind: Kind, base: Law, examples: Sequence[Example], floor_s: float, moves: Sequence[Move]
) -> float:
    """How much of the learned residual to keep: what misses left-out states least; half where they are too few."""
    if kind not in model.residuals:
        return 0.0
    if len(examples) < FEWEST_TO_CHOOSE:
        return 0.5
    missed = dict.fromkeys(DAMPINGS, 0.0)
    hands = min(len(examples), LEAVE_OUTS)
    for share in DAMPINGS:
        offsets = _offsets(model, kind, examples, share)
        for hand in range(hands):
            seen = [i for i in range(len(examples)) if i % hands != hand]
            law = carry_law(
                base, [examples[i] for i in seen], floor_s, moves, [offsets[i] for i in seen], _miss_spread(model, kind)
            )
            for i in range(hand, len(examples), hands):
                predicted = sum(law.parts(examples[i].x)) * exp(offsets[i])
                missed[share] += abs(log_miss(examples[i].engine_s, predicted, floor_s))
    return min(DAMPINGS, key=missed.__getitem__)


def damped(forest: ForestText, share: float) -> ForestText:
    """The forest with every leaf times ``share``."""

    def scaled(line: re.Match[str]) -> str:
        return "leaf_value=" + " ".join(repr(float(value) * share) for value in line.group(1).split())

    return replace(forest, text=re.sub(r"^leaf_value=(.*)$", scaled, forest.text, flags=re.MULTILINE))


def _ranges(
    model: FittedModel, kind: Kind, examples: Sequence[Example], made: Provenance
) -> dict[str, tuple[float, float]]:
    """What was seen here; and what was seen there, where a feature means the same in both places."""
    old, new = model.ranges[kind], ranges_of(examples)
    same_bytes = model.provenance.kv_bytes_per_token == made.kv_bytes_per_token
    found = {}
    for name in FEATURES:
        carries = same_bytes or not ("bytes" in name or "segments" in name)
        found[name] = (min(old[name][0], new[name][0]), max(old[name][1], new[name][1])) if carries else new[name]
    return found


# ---- how many measurements it takes ----


@dataclass(frozen=True, slots=True)
class ErrorByCount:
    """Held-out error after that many measured states, over several draws of them."""

    states: int
    draws: int
    mean_error: Mapping[Kind, float]
    """Mean |log(measured / predicted)| of held-out states, averaged over the draws."""
    worst_draw: Mapping[Kind, float]
    """The highest of the draws' means."""


def error_by_count(
    counts: Sequence[int],
    states: Sequence[State],
    held: Sequence[State],
    predict: Callable[[Sequence[State]], FittedModel],
    seed: int,
    draws: int = 10,
) -> tuple[ErrorByCount, ...]:
    """``predict`` makes a model of a few of ``states``; it is judged on ``held``."""
    rng = random.Random(f"error by count {seed}")
    examples, floors = examples_of(held), noise_floors([*states, *held])
    found = []
    for count in counts:
        tries = [_errors(predict(spread(states, count, rng)), examples, floors) for _ in range(draws if count else 1)]
        found.append(
            ErrorByCount(
                count,
                len(tries),
                {kind: sum(one[kind] for one in tries) / len(tries) for kind in KINDS},
                {kind: max(one[kind] for one in tries) for kind in KINDS},
            )
        )
    return tuple(found)


def _errors(
    model: FittedModel, examples: Mapping[Kind, Sequence[Example]], floors: Mapping[Kind, float]
) -> dict[Kind, float]:
    return {
        kind: sum(abs(log_miss(one.engine_s, model.seconds(kind, one.x), floors[kind])) for one in examples[kind])
        / len(examples[kind])
        for kind in KINDS
    }


def spread(states: Sequence[State], count: int, rng: random.Random) -> list[State]:
    """``count`` states, one at random out of each of as many spans of length."""
    ordered = sorted(states, key=lambda state: (state.computed_tokens, state.name))
    edges = [round(i * len(ordered) / count) for i in range(count + 1)] if count else []
    return [rng.choice(ordered[low:high]) for low, high in pairwise(edges)]


def doubling(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8 ... up to ``most``, which comes last."""
    counts = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return (*counts, most)
