"""Transfer of a cost model to another LLM, GPU or link by a few states measured there.

The laws are first adjusted by what is known without measurements, the shapes of both LLMs and the data sheets of both
devices, and then scaled to the measured states (:mod:`kvpolicy.training.law_transfer`). The learned residual is kept,
halved or dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf

from kvpolicy.cost.intervals import calibrate, carried_quantities, unbounded
from kvpolicy.cost.laws import Law
from kvpolicy.cost.model import FittedModel, Provenance
from kvpolicy.cost.store import ForestText, forest_of
from kvpolicy.datasets.examples import Example, examples_of, log_miss, noise_floors, ranges_of
from kvpolicy.datasets.profiles import Dataset, State, TransferRecord
from kvpolicy.events import KINDS, Kind
from kvpolicy.features import FEATURES
from kvpolicy.hardware import same_machine
from kvpolicy.training.fit import misses_of
from kvpolicy.training.law_fits import MIN_STATES, fit_others_shares, fit_victim_delays, victim_delay_examples
from kvpolicy.training.law_transfer import ELSEWHERE, Spreads, carry_law, rebased

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
