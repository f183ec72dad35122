"""A model carried to another LLM, GPU or link by a handful of states measured there.

Its laws are scaled, after what the shapes of both models and the sheets of both devices tell beforehand; what was
learned beyond the laws is kept, by half, or not at all.

Few measurements cannot fit a law anew, but they can say how much slower everything is, and a little about what is
slower than the rest. Each group of a law's coefficients is scaled by exp(common + its own); the scales are the
robust maximum a posteriori under heavy-tailed priors around 0.
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
from kvpolicy.cost.intervals import calibrate, kept_of, unbounded
from kvpolicy.cost.laws import CHANNEL_FIELDS, Channel, Law, LinearLaw, RecomputeRoofline, SwapRoofline
from kvpolicy.cost.model import FittedModel, Provenance
from kvpolicy.cost.store import ForestText, forest_of
from kvpolicy.datasets.examples import Example, examples_of, log_miss, noise_floors, ranges_of
from kvpolicy.datasets.profiles import Dataset, Move, State
from kvpolicy.events import KINDS, Kind
from kvpolicy.features import FEATURES
from kvpolicy.hardware import same_machine
from kvpolicy.hardware.sheets import known_sheet
from kvpolicy.training.fit import misses_of
from kvpolicy.training.law_fits import MIN_STATES, fit_others_shares, fit_victim_delays, victim_delay_examples

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
MAX_EXPONENT = 50.0
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
            group: exp(min(max(logs[0] + own, -MAX_EXPONENT), MAX_EXPONENT))
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


UNCHANGED_SPREAD = 0.05
"""Of both scales of a law where neither machine, model nor (for copies) link has changed."""
FLOOR_S = 1e-6
MAX_MISS_SPREAD = 0.2
"""A model that missed its own states by more was held back by noise, which counts by itself."""
LEAVE_OUTS = 10
DAMPINGS = (1.0, 0.5, 0.0)
MIN_STATES_TO_CHOOSE = 8
"""With fewer states a learned residual is kept by half: they cannot say whether it holds."""


@dataclass(frozen=True, slots=True)
class Carried:
    """A carried model and what has to be stored beside it."""

    model: FittedModel
    forests: Mapping[Kind, ForestText]


def rebased(law: Law, old: Provenance, new: Provenance, budget_tokens: float = inf) -> Law:
    """The law with what is known beforehand applied: other FLOPs per token and pair, other peak rates of the devices,
    the other engine's token budget where it is known.

    Devices without a sheet are taken to be alike until measurements say otherwise. Which share of a mixture's experts
    a token leaves alone and how wide a window is no geometry tells: both stay (see :func:`unknown_beforehand`).
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
    """Notes on what of the old LLM a law carried to another one still takes for granted."""
    if not isinstance(law, RecomputeRoofline) or old.geometry == new.geometry:
        return ()
    kept = {
        "s_per_window_pair": f"that attention windows are {law.window_tokens:g} tokens wide",
        "expert_s": f"that a token leaves {law.expert_miss:.1%} of the experts alone",
    }
    return tuple(f"recompute: takes over from the old LLM {what}" for name, what in kept.items() if getattr(law, name))


def _device_ratios(old: Any, new: Any) -> tuple[float, float]:
    """How many times the compute and the memory bandwidth of the old device the new one has."""
    was, now = known_sheet(old), known_sheet(new)
    if was is None or now is None:
        return 1.0, 1.0
    return now.bf16_flops / was.bf16_flops, now.memory_bytes_per_s / was.memory_bytes_per_s


# ---- a model ----


def carry(
    model: FittedModel, forests: Mapping[Kind, ForestText], states: Sequence[State], dataset: Dataset, made: Provenance
) -> Carried:
    """``model`` carried to where ``states`` of ``dataset`` were measured; ``made``: that place.

    Intervals come from leaving states out, infinite where there are too few.
    """
    one = carry_once(model, forests, states, dataset, made)
    hands = min(len(states), LEAVE_OUTS)
    misses = []
    for hand in range(hands if len(states) > 1 else 0):
        seen = [state for i, state in enumerate(states) if i % hands != hand]
        left = [state for i, state in enumerate(states) if i % hands == hand]
        misses += misses_of(carry_once(model, forests, seen, dataset, made).model, left)
    if not misses:
        return one
    # A handful of states cannot tell how misses grow beyond them. What its own states told holds where they were
    # measured; of any other place nothing is promised beyond what was measured there.
    same: dict[str, bool] = {kind: _unchanged(kind, model.provenance, made) for kind in KINDS}
    same["ratio"] = all(same.values())
    growth = {of: growth if same[of] else inf for of, growth in model.intervals.growth.items()}
    intervals = replace(calibrate(misses, kept_of(model.carried)), growth=growth)
    return replace(one, model=replace(one.model, intervals=intervals))


def carry_once(
    model: FittedModel, forests: Mapping[Kind, ForestText], states: Sequence[State], dataset: Dataset, made: Provenance
) -> Carried:
    """As :func:`carry`, nothing promised: its intervals are infinite."""
    examples = examples_of(states)
    repeated = any(len(some) > 1 for state in states for some in state.samples.values())
    floor_s = noise_floors(states) if repeated else dict(model.floor_s)
    moves = dataset.moves_of(states)
    laws: dict[Kind, Law] = {}
    kept: dict[Kind, ForestText] = {}
    for kind in KINDS:
        base = rebased(model.laws[kind], model.provenance, made, dataset.budget_tokens)
        share, laws[kind] = _scaled(model, kind, base, examples[kind], floor_s[kind], moves, made)
        if kind in forests and share:
            kept[kind] = damped(forests[kind], share)
    carried = FittedModel(
        name=model.name,
        provenance=made,
        laws=laws,
        residuals={kind: forest_of(text) for kind, text in kept.items()},
        ranges={kind: _ranges(model, kind, examples[kind], made) for kind in KINDS},
        floor_s=floor_s,
        intervals=unbounded(),
        victim_delays=_victim_delays(model, states),
        others_share=fit_others_shares(states) if len(states) >= MIN_STATES else dict(model.others_share),
        step_time=dataset.common_step_time,
        carried=dict(model.carried),
    )
    return Carried(carried, kept)


def _victim_delays(model: FittedModel, states: Sequence[State]) -> Mapping[Kind, Law]:
    """Fitted anew where there are enough states; scaled as a whole where there are not."""
    found = fit_victim_delays(states)
    if found:
        return found
    return {
        kind: carry_law(law, victim_delay_examples(states, kind), FLOOR_S) for kind, law in model.victim_delays.items()
    }


def _spreads(model: FittedModel, kind: Kind, made: Provenance) -> Spreads:
    """Misses as far as the model's held-out ones (their mean to a normal distribution's standard deviation)."""
    scores = model.provenance.held_out.get(kind)
    missed = scores.get("mean_error") if isinstance(scores, Mapping) else None
    spreads = (
        ELSEWHERE if not missed else replace(ELSEWHERE, miss=min(max(1.25 * float(missed), 0.05), MAX_MISS_SPREAD))
    )
    if _unchanged(kind, model.provenance, made):
        return replace(spreads, common=UNCHANGED_SPREAD, own=UNCHANGED_SPREAD)
    return spreads


def _unchanged(kind: Kind, old: Provenance, new: Provenance) -> bool:
    """Whether what was measured there holds here; an untrained model was measured nowhere."""
    here = bool(old.state_ids) and same_machine(old.hardware, new.hardware) and old.geometry == new.geometry
    return here and (kind == "recompute" or old.link == new.link)


def _offsets(model: FittedModel, kind: Kind, examples: Sequence[Example], share: float) -> list[float]:
    forest = model.residuals.get(kind)
    if forest is None or not share:
        return [0.0] * len(examples)
    kept = model.carried[kind]
    return [share * forest.predict(one.x) if kept or not model.outside(kind, one.x) else 0.0 for one in examples]


def _scaled(
    model: FittedModel,
    kind: Kind,
    base: Law,
    examples: Sequence[Example],
    floor_s: float,
    moves: Sequence[Move],
    made: Provenance,
) -> tuple[float, Law]:
    """How much of the learned residual to keep, and the law scaled beside it: what together miss the states least.

    ``base``: the law to scale, :func:`rebased`.
    """
    spreads = _spreads(model, kind, made)
    found = []
    for share in _dampings(model, kind, len(examples), made):
        offsets = _offsets(model, kind, examples, share)
        law = carry_law(base, examples, floor_s, moves, offsets, spreads)
        predicted = [sum(law.parts(one.x)) * exp(offset) for one, offset in zip(examples, offsets, strict=True)]
        missed = sum(
            abs(log_miss(one.engine_s, seconds, floor_s)) for one, seconds in zip(examples, predicted, strict=True)
        )
        found.append((missed, share, law))
    _, share, law = min(found, key=lambda one: one[0])
    return share, law


def _dampings(model: FittedModel, kind: Kind, states: int, made: Provenance) -> tuple[float, ...]:
    """The shares of the residual to try: few states cannot say whether it holds."""
    if kind not in model.residuals:
        return (0.0,)
    if states < MIN_STATES_TO_CHOOSE:
        return (1.0,) if _unchanged(kind, model.provenance, made) else (0.5,)
    return DAMPINGS


def damped(forest: ForestText, share: float) -> ForestText:
    """The forest with every leaf times ``share``."""

    def scaled(line: re.Match[str]) -> str:
        return "leaf_value=" + " ".join(repr(float(value) * share) for value in line.group(1).split())

    return replace(forest, text=re.sub(r"^leaf_value=(.*)$", scaled, forest.text, flags=re.MULTILINE))


def _ranges(
    model: FittedModel, kind: Kind, examples: Sequence[Example], made: Provenance
) -> dict[str, tuple[float, float]]:
    """What was seen here; and what was seen there, where nothing has changed: elsewhere costs were not measured."""
    old, new = model.ranges[kind], ranges_of(examples)
    if not _unchanged(kind, model.provenance, made):
        return new
    return {name: (min(old[name][0], new[name][0]), max(old[name][1], new[name][1])) for name in FEATURES}


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
    draws: int = 5,
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
