"""The commands ``train`` and ``calibrate``: traces in, a stored cost model and a report out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvpolicy.cost import load, store
from kvpolicy.cost.analytic import implausible
from kvpolicy.cost.model import CostModel, FittedModel, Provenance, with_laws
from kvpolicy.datasets.examples import examples_of, expected_examples_of, sample_states, stratified_folds
from kvpolicy.datasets.logs import holds_logs
from kvpolicy.datasets.profiles import Dataset, State, one_option_always_wins, read_dataset
from kvpolicy.datasets.tables import Situations
from kvpolicy.datasets.threshold import Difference, LengthRule, best_threshold, difference
from kvpolicy.events import KINDS, Preemption
from kvpolicy.features import FEATURES
from kvpolicy.fields import AMOUNT, WrongValue, refuse_no_path, refuse_no_paths, refuse_non_integer
from kvpolicy.hardware import fingerprint
from kvpolicy.hardware.sheets import known_sheet
from kvpolicy.trace import TraceError
from kvpolicy.training.error_by_count import doubling, error_by_count, spread
from kvpolicy.training.family import Family, family_of
from kvpolicy.training.fit import Fit, fit, held_out_scores
from kvpolicy.training.law_fits import load_notes
from kvpolicy.training.law_transfer import unknown_beforehand
from kvpolicy.training.log_fits import train_logged
from kvpolicy.training.reports import CalibrateReport, LogTrainReport, TrainReport
from kvpolicy.training.transfer import carry, carry_once

MIN_STATES = 12
"""With fewer states none could be held out."""
MAX_VARIATION = 0.30
"""Of identical undisturbed windows; above it a profile is too noisy to train on."""
MIN_STATES_TO_HOLD_OUT = 8
"""With fewer states a model is transferred by all of them, and none is held out."""
MAX_STATES = 4000
"""Largest number of training states, and of held-out states. Of more, a sample is drawn, stratified by length.
`benchmarks/training_scale.py --draws` prints what sampling costs in held-out error."""
EVALUABLE_STATES = 20
"""Held-out states if there are at least twice as many in all: `kvpolicy evaluate` needs that many."""


def train(
    traces: Sequence[Path | str],
    out: Path | str | None = None,
    family: str | Family = "boosted",
    force: bool = False,
    seed: int = 0,
    mixed_hardware: bool = False,
    pageable: bool = False,
) -> TrainReport | LogTrainReport:
    """Fit a cost model to the states that ``traces`` measured under both options.

    The model is the report's ``model``, and is written to folder ``out`` if one is given. A model already in that
    folder is replaced once the new one is complete; the report says so. ``family``: see
    :func:`kvpolicy.training.family.family_of`.

    Production logs hold one option per situation; from these each option is learned from its own records
    (:mod:`kvpolicy.training.log_fits`).

    A profile on an accelerator measures copies over page-locked and over pageable host memory. A model is of one kind:
    of page-locked memory, or with ``pageable`` of the other.

    Some of the states are held out for the scores and for :func:`kvpolicy.evaluate`. At most :data:`MAX_STATES` states
    are used for training, and as many for the scores; the report says if these are a sample.

    Raises TraceError, naming table and row or file and field, for traces that cannot be trained on: one option missing,
    fewer than 12 states, impossible values, all states of one length, different machines unless ``mixed_hardware``,
    over 30% noise unless ``force``; for ``pageable`` without copies over such
    memory; FileExistsError if ``out`` holds something other than a cost model.
    """
    refuse_no_paths("traces", traces)
    if out is not None:
        refuse_no_path("out", out)
    family = family_of(family)
    refuse_non_integer("seed", seed, AMOUNT)
    replaced = out is not None and store.holds_model(Path(out))
    if traces and holds_logs(traces):
        if pageable:
            raise WrongValue("pageable", "is for profiles; a log is of one server, with one kind of host memory")
        return train_logged(traces, out, family, seed, mixed_hardware)
    dataset = read_dataset(traces, mixed_hardware).of_host_memory(not pageable)
    if pageable and dataset.pinned is not False:
        raise TraceError(
            f"{', '.join(map(str, traces))}: table transfers has no row with pinned false: nothing was measured over "
            "pageable host memory"
        )
    variation = _variation(dataset, force)
    if len(dataset.states) < MIN_STATES:
        raise TraceError(
            f"{', '.join(map(str, traces))}: {len(dataset.states)} states were measured under both options, training "
            f"needs at least {MIN_STATES}; let `kvpolicy profile` measure more"
        )
    _refuse_one_length(dataset)
    parts = split(dataset.states, seed)
    training, held_out = (sample_states(part, MAX_STATES, random.Random(f"drawn {seed}")) for part in parts)
    dataset = replace(dataset, transfers=dataset.transfers_of(training))
    fitted = fit(family, training, dataset, provenance_of(family.label, dataset, training, variation), seed)
    data_notes = (
        *_draw_notes(parts, (training, held_out)),
        *_data_notes(dataset, training, fitted.model),
        *_law_notes(dataset, training, fitted.model),
    )
    fitted = replace(fitted, notes=(*fitted.notes, *data_notes))
    rule = best_threshold(training)
    against = _against(rule, fitted.model, held_out)
    scores = held_out_scores(fitted.model, held_out) | {"beyond": dict(fitted.inner_coverage)}
    scores["against_threshold"] = against.stored(rule)
    provenance = replace(fitted.model.provenance, held_out=scores, notes=fitted.notes)
    model = store.round_trip(replace(fitted.model, provenance=provenance), fitted.forests, out)
    report = _report(model, fitted, dataset, (training, held_out), variation, (rule, against))
    return replace(report, out="" if out is None else str(out), replaced=replaced)


def _draw_notes(parts: tuple[list[State], list[State]], samples: tuple[list[State], list[State]]) -> list[str]:
    return [
        f"{len(sample)} of {len(states)} states sampled {purpose}, over all lengths; the others are not used"
        for states, sample, purpose in zip(parts, samples, ("to train on", "to judge by"), strict=True)
        if len(sample) < len(states)
    ]


def _refuse_one_length(dataset: Dataset) -> None:
    lengths: set[int] = set()
    for state in dataset.states:
        lengths.update(state.lengths)
        if len(lengths) > 1:
            return
    if lengths:
        raise TraceError(
            f"table decisions: computed_tokens is {lengths.pop()} in all {len(dataset.states)} states; a cost model "
            "learns how costs grow with it: let `kvpolicy profile` measure several lengths"
        )


def _data_notes(dataset: Dataset, training: Sequence[State], model: FittedModel) -> list[str]:
    """Notes on features that never vary in the data, and on traces of several machines."""
    notes = []
    for kind, examples in examples_of(training).items():
        columns = dict(zip(FEATURES, zip(*(example.x for example in examples), strict=True), strict=True))
        used = model.laws[kind].used | {FEATURES[at] for at in getattr(model.residuals.get(kind), "used", ())}
        same = [f"{name} ({columns[name][0]:g})" for name in FEATURES if name in used and len(set(columns[name])) == 1]
        if same:
            notes.append(f"{kind}: the same in every state: {', '.join(same)}; their effect was not measured")
    machines = sorted({fingerprint(header.hardware) for header in dataset.headers.values()})
    if len(machines) > 1:
        notes.append(f"measured on mixed hardware: {'; '.join(machines)}")
    return notes


def _law_notes(dataset: Dataset, states: Sequence[State], model: FittedModel) -> list[str]:
    """Notes on what the data leave undetermined in the laws, and on implausible constants."""
    sheet = known_sheet(dataset.any_header.hardware.get("device"))
    notes = [*load_notes(model.laws["swap"], examples_of(states)["swap"])]
    budgets = {header.token_budget for header in dataset.headers.values()}
    if len(budgets) > 1:
        values = ", ".join(sorted("unknown" if value is None else str(value) for value in budgets))
        notes.append(f"recompute: measured under several token budgets ({values}), so that its chunks are not counted")
    return [*notes, *implausible(model.laws, dataset.geometry, sheet)]


def split(states: Sequence[State], seed: int) -> tuple[list[State], list[State]]:
    """Training and held-out states, both stratified by length: one in four held out, more if that is under 20."""
    folds = max(2, min(4, len(states) // EVALUABLE_STATES))
    fold_of = stratified_folds(states, folds, random.Random(f"held out {seed}"))
    numbered = list(zip(states, fold_of, strict=True))
    return [state for state, fold in numbered if fold], [state for state, fold in numbered if not fold]


def _variation(dataset: Dataset, force: bool) -> float | None:
    variations: list[float] = []
    for core, header in dataset.headers.items():
        if header.source != "profile":
            continue
        value = header.noise.get("variation")
        if isinstance(value, int | float) and 0 <= value <= MAX_VARIATION:
            variations.append(float(value))
        elif not force:
            raise TraceError(
                f"core {core}, header.json: noise.variation is {value!r}, should be at most {MAX_VARIATION}; "
                "measure again on a quieter machine, or --force it"
            )
        elif isinstance(value, int | float):
            variations.append(float(value))
    return max(variations, default=None)


def provenance_of(family: str, dataset: Dataset, training: Sequence[State], variation: float | None) -> Provenance:
    """Provenance of a model fitted to the ``training`` states of ``dataset``; ``family``: the family's label."""
    header = dataset.any_header
    return Provenance(
        family=family,
        hardware=dict(header.hardware),
        geometry=dataset.geometry,
        link=dict(header.link),
        block_sizes=dataset.block_sizes,
        kv_bytes_per_token=dataset.kv_bytes_per_token,
        trace_digests=dataset.digests,
        state_ids=tuple(sorted(name for state in training for name in state.ids)),
        noise={"variation": variation},
        held_out={},
        pinned=dataset.pinned,
    )


def _report(
    model: FittedModel,
    fitted: Fit,
    dataset: Dataset,
    parts: tuple[list[State], list[State]],
    variation: float | None,
    compared: tuple[LengthRule, Difference],
) -> TrainReport:
    (training, held_out), (rule, against) = parts, compared
    outside, extrapolated = natural_outside(model, dataset.natural)
    below = {kind: sum(state.typical_s[kind] < model.floor_s[kind] for state in training) for kind in KINDS}
    return TrainReport(
        model=model,
        out="",
        family=model.provenance.family,
        digest=model.digest,
        training_states=len(training),
        held_out_states=len(held_out),
        held_out=model.provenance.held_out,
        trees=fitted.trees,
        variation=variation,
        floor_s=model.floor_s,
        below_floor=below,
        natural_preemptions=len(dataset.natural),
        natural_outside=outside,
        natural_extrapolated=extrapolated,
        always_wins=one_option_always_wins(dataset.states),
        left_out=dataset.left_out,
        notes=fitted.notes,
        floor=dataset.floor,
        replaced=False,
        prices=dataset.prices,
        best_threshold=rule.policy,
        against_threshold=against,
    )


def _against(rule: LengthRule, model: FittedModel, states: Sequence[State]) -> Difference:
    """Costs of the model's choices less those of the rule's, by the mean features that were expected in each state."""
    examples, costs_s = expected_examples_of(states), []
    for number, state in enumerate(states):
        predicted_s = {kind: model.seconds(kind, examples[kind][number].x) for kind in KINDS}
        costs_s.append(state.mean_s["swap" if predicted_s["swap"] < predicted_s["recompute"] else "recompute"])
    return difference("the model", costs_s, [rule.cost_s(state) for state in states])


def natural_outside(model: FittedModel, natural: Sequence[Preemption]) -> tuple[dict[str, float], float | None]:
    """Share of situations outside the trained range, per feature; and the share whose predictions depend on that."""
    if not natural:
        return {}, None
    outside = {name: np.zeros(len(natural), np.bool_) for name in FEATURES}
    matters = np.zeros(len(natural), np.bool_)
    for kind in KINDS:
        for name, column in Situations.of(natural).features(kind).items():
            low, high = model.ranges[kind][name]
            outside_range = ~((low <= column) & (column <= high))
            outside[name] |= outside_range
            if name in model.depends_on(kind):
                matters |= outside_range
    return {name: float(flags.mean()) for name, flags in outside.items()}, float(matters.mean())


def calibrate(
    cost_model: Path | str | CostModel,
    traces: Sequence[Path | str],
    out: Path | str | None = None,
    states: int | None = None,
    seed: int = 0,
    force: bool = False,
) -> CalibrateReport:
    """Transfer a cost model to the machine, link and LLM of ``traces``.

    The model is the report's ``model``, and is written to folder ``out`` if one is given.

    ``cost_model``: a folder, the name of a shipped model, ``analytic:DEVICE[@LINK]:CONFIG`` for the untrained one, or
    a fitted model itself, as ``train(...).model``.
    ``states``: number of the traces' states to use, spread over their lengths; by default all that are not held out.

    Raises ModelError for the model, TraceError as :func:`train` for the traces (for over 30% noise too, unless
    ``force``), WrongValue for more states than there are.
    """
    refuse_no_paths("traces", traces)
    if out is not None:
        refuse_no_path("out", out)
    refuse_non_integer("seed", seed, AMOUNT)
    if states is not None:
        refuse_non_integer("states", states)
    model = with_laws(cost_model, "carried") if isinstance(cost_model, CostModel | type) else load(cost_model)
    forests = store.forest_texts(model)
    dataset = read_dataset(traces).of_host_memory(model.pinned is not False)
    variation = _variation(dataset, force)
    enough_states = len(dataset.states) >= MIN_STATES_TO_HOLD_OUT
    training, held_out = split(dataset.states, seed) if enough_states else (list(dataset.states), [])
    if states is not None and not 1 <= states <= len(training):
        raise WrongValue(
            "states", f"is {states}, should be from 1 to {len(training)}: {len(held_out)} states are held out"
        )

    def provenance_for(subset: Sequence[State]) -> Provenance:
        provenance = provenance_of(model.provenance.family, dataset, subset, variation)
        origin = f"transferred from {model.name} (digest {model.digest[:12]}) with {len(subset)} states"
        state_ids = tuple(sorted({*model.provenance.state_ids, *provenance.state_ids}))
        return replace(provenance, state_ids=state_ids, notes=(origin,))

    def predictor(subset: Sequence[State]) -> FittedModel:
        return carry_once(model, forests, subset, dataset, provenance_for(subset)).model if subset else model

    used = training if states is None else spread(training, states, random.Random(f"states {seed}"))
    carried = carry(model, forests, used, dataset, provenance_for(used))
    scores = held_out_scores(carried.model, held_out) if held_out else {}
    assumptions = unknown_beforehand(model.laws["recompute"], model.provenance, carried.model.provenance)
    notes = (*carried.model.provenance.notes, *assumptions, *_law_notes(dataset, used, carried.model))
    provenance = replace(carried.model.provenance, held_out=scores, notes=notes)
    stored = store.round_trip(replace(carried.model, provenance=provenance), carried.forests, out)
    errors = error_by_count((0, *doubling(len(training))), training, held_out, predictor, seed) if held_out else ()
    folder = "" if out is None else str(out)
    return CalibrateReport(stored, folder, model.name, stored.digest, len(used), len(held_out), errors, notes)
