"""Training: traces in, a model folder and a report out."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvpolicy.cost import load, store
from kvpolicy.cost.analytic import implausible
from kvpolicy.cost.model import CostModel, FittedModel, ModelError, Provenance
from kvpolicy.datasets.examples import dealt, drawn, examples_of
from kvpolicy.datasets.logs import holds_logs
from kvpolicy.datasets.profiles import Dataset, State, measured, one_option_always_wins
from kvpolicy.datasets.quality import Floor
from kvpolicy.datasets.tables import Situations
from kvpolicy.events import KINDS, Kind, Preemption
from kvpolicy.features import FEATURES
from kvpolicy.fields import WrongValue
from kvpolicy.hardware import fingerprint
from kvpolicy.hardware.sheets import known_sheet
from kvpolicy.trace import TraceError
from kvpolicy.training.family import Family, family_of
from kvpolicy.training.fit import Fit, fit, held_out_scores
from kvpolicy.training.law_fits import untold_loads
from kvpolicy.training.log_fits import LogTrainReport, as_told, train_logged
from kvpolicy.training.transfer import (
    ErrorByCount,
    carry,
    carry_once,
    doubling,
    error_by_count,
    spread,
    unknown_beforehand,
)

MIN_STATES = 12
"""Fewer leave nothing to judge a fit by once it is made."""
MAX_VARIATION = 0.30
MIN_STATES_TO_HOLD_OUT = 8
"""With fewer states a carried model is made of all of them, and nothing is held out to judge it by."""
MAX_STATES = 4000
"""States that are learned from, and as many at most to judge by: of more, so many are drawn, every length among them.
What a draw costs in held-out error is what `benchmarks/training_scale.py --draws` prints."""
EVALUABLE_STATES = 20
"""What is held out, where there are twice as many states: as many as `kvpolicy evaluate` asks for."""


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What was trained, and how far it can be trusted."""

    model: FittedModel
    out: str
    """Its folder; empty where it was not stored."""
    family: str
    digest: str
    training_states: int
    held_out_states: int
    held_out: Mapping[str, Any]
    """See :func:`kvpolicy.training.fit.held_out_scores`."""
    trees: Mapping[Kind, int]
    variation: float | None
    """Of identical undisturbed windows, the worst core's; None where a forced trace does not tell."""
    floor_s: Mapping[Kind, float]
    below_floor: Mapping[Kind, int]
    """Training states whose measured median was under the floor."""
    natural_preemptions: int
    natural_outside: Mapping[str, float]
    """Per feature, the share of natural preemptions outside the trained range."""
    natural_extrapolated: float | None
    """The share for which that matters to a prediction; None without natural preemptions."""
    always_wins: Kind | None
    left_out: Mapping[str, int]
    notes: tuple[str, ...]
    floor: Floor
    """What the traces say of the costs that all this rests on."""
    replaced: bool
    """Whether a model was in the folder before."""

    def to_dict(self) -> dict[str, Any]:
        return as_told(self)

    def text(self) -> str:
        lines = [
            f"cost model {self.out or 'in memory'} ({self.family}), digest {self.digest[:12]}",
            *(["replaces the cost model that was there"] if self.replaced else []),
            f"states: {self.training_states} trained on, {self.held_out_states} held out",
            "",
            "held-out error, |log(measured / predicted)| of a state's median:",
            f"  {'option':<10} {'mean':>7} {'p90':>7} {'bias':>7} {'formula alone':>14} {'trees':>6}",
        ]
        for kind in KINDS:
            score = self.held_out[kind]
            lines.append(
                f"  {kind:<10} {score['mean_error']:>7.1%} {score['p90_error']:>7.1%} {score['bias']:>+7.1%} "
                f"{score['law_mean_error']:>14.1%} {self.trees[kind]:>6}"
            )
        lines += ["", *self._coverage_lines(), *self._beyond_lines(), *self._delay_lines()]
        lines += ["", *self._noise_lines(), *self._natural_lines()]
        if self.always_wins:
            lines.append(f"{self.always_wins} costs less in every state: here the cheapest policy is a constant")
        lines += [f"left out: {count} {reason}" for reason, count in self.left_out.items() if count]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _coverage_lines(self) -> list[str]:
        lines = ["90% interval holds, of held-out states; in brackets what so few can tell (95%):"]
        for of, found in self.held_out["coverage"].items():
            for one in [found, *(found["bins"] if len(found["bins"]) > 1 else [])]:
                holds = "-" if one["holds"] is None else f"{one['holds']:.0%}"
                told = f"{holds:>4} of {one['states']:<4} [{one['low']:.0%}, {one['high']:.0%}]"
                lines.append(f"  {of:<10} {_span(one):<34} {told}")
        return lines

    def _beyond_lines(self) -> list[str]:
        lines = ["90% interval holds beyond the range, told by short training states judged on longer ones:"]
        for of, found in self.held_out["beyond"].items():
            for name, one in {
                "all": found,
                "up to 2x the edge": found["up_to_2x"],
                "from 2x": found["from_2x"],
            }.items():
                holds = "not told" if one["holds"] is None else f"{one['holds']:.0%} of {one['states']}"
                lines.append(f"  {of:<10} {name:<34} {holds} [{one['low']:.0%}, {one['high']:.0%}]")
        return lines

    def _delay_lines(self) -> list[str]:
        return [
            f"victim delay, {kind}: {score['mean_error']:.1%} mean error, bias {score['bias']:+.1%}"
            for kind, score in self.held_out["victim_delay"].items()
        ]

    def _noise_lines(self) -> list[str]:
        told = "not told" if self.variation is None else f"{self.variation:.1%} between identical undisturbed windows"
        lines = [f"noise: {told}"]
        for kind in KINDS:
            line = f"  {kind}: costs under {self.floor_s[kind] * 1e3:.3g} ms are not told from none"
            if self.below_floor[kind]:
                line += f"; {self.below_floor[kind]} states measured less and count as that much"
            if self.below_floor[kind] > self.training_states / 2:
                line += f": most costs of {kind} drown in the noise, and its scores say little"
            lines.append(line)
        return lines + self.floor.lines()

    def _natural_lines(self) -> list[str]:
        if self.natural_extrapolated is None:
            return ["natural preemptions: none in these traces; what happens under memory pressure was not trained on"]
        lines = [
            f"natural preemptions: {self.natural_preemptions}, "
            f"{self.natural_extrapolated:.1%} outside the trained range of a feature that predictions depend on"
        ]
        return lines + [f"  {name}: {share:.1%} outside" for name, share in self.natural_outside.items() if share]


def _span(one: Mapping[str, Any]) -> str:
    if "tokens_from" not in one:
        return "all"
    sides = [
        f"{name} {one[f'{name}_from'] or 0:g}" + ("+" if one[f"{name}_below"] is None else f"-{one[f'{name}_below']:g}")
        for name in ("tokens", "running")
    ]
    return ", ".join(sides)


def train(
    traces: Sequence[Path | str],
    out: Path | str | None = None,
    family: str | Family = "boosted",
    force: bool = False,
    seed: int = 0,
    mixed_hardware: bool = False,
) -> TrainReport | LogTrainReport:
    """Fit a cost model to the states that ``traces`` measured under both options; it is the report's ``model``, and is
    written to folder ``out`` where one is given. ``family``: :func:`kvpolicy.training.family.family_of`.

    Of production logs, in which each situation was met with one option, each option is learned from its own records
    (:mod:`kvpolicy.training.log_fits`).

    A model that is there already is replaced once the new one is whole, and the report says so. A part of the states
    is held out, by state, for the scores and for :func:`kvpolicy.evaluate`. Of either part no more than
    :data:`MAX_STATES` are used; the report says where they were drawn from more. Raises TraceError,
    naming table and row or file and field, for traces that cannot be trained on: one option missing, fewer than 12
    states, impossible values, all states of one length, different machines unless ``mixed_hardware``, over 30% noise
    unless ``force``; FileExistsError where ``out`` holds
    something that is no cost model.
    """
    family = family_of(family)
    if seed < 0:
        raise WrongValue("seed", f"is {seed}, should be 0 or above")
    replaced = out is not None and store.holds_model(Path(out))
    if traces and holds_logs(traces):
        return train_logged(traces, out, family, seed, mixed_hardware)
    dataset = measured(traces, mixed_hardware)
    variation = _variation(dataset, force)
    if len(dataset.states) < MIN_STATES:
        raise TraceError(
            f"{', '.join(map(str, traces))}: {len(dataset.states)} states were measured under both options, training "
            f"needs at least {MIN_STATES}; let `kvpolicy profile` measure more"
        )
    _refuse_one_length(dataset)
    parts = split(dataset.states, seed)
    training, held = (drawn(part, MAX_STATES, random.Random(f"drawn {seed}")) for part in parts)
    dataset = replace(dataset, moves=dataset.moves_of(training))
    fitted = fit(family, training, dataset, provenance_of(family.label, dataset, training, variation), seed)
    told = (
        *_draw_notes(parts, (training, held)),
        *_data_notes(dataset, training, fitted.model),
        *_law_notes(dataset, training, fitted.model),
    )
    fitted = replace(fitted, notes=(*fitted.notes, *told))
    scores = held_out_scores(fitted.model, held) | {"beyond": dict(fitted.inner_coverage)}
    made = replace(fitted.model.provenance, held_out=scores, notes=fitted.notes)
    model = store.round_trip(replace(fitted.model, provenance=made), fitted.forests, out)
    report = _report(model, fitted, dataset, (training, held), variation)
    return replace(report, out="" if out is None else str(out), replaced=replaced)


def _draw_notes(parts: tuple[list[State], list[State]], taken: tuple[list[State], list[State]]) -> list[str]:
    return [
        f"{len(one)} states drawn out of {len(whole)} {what}, every length among them; the others take no part"
        for whole, one, what in zip(parts, taken, ("to train on", "to judge by"), strict=True)
        if len(one) < len(whole)
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
    """What the data cannot teach: features that never vary; and which machines were taken together."""
    notes = []
    for kind, examples in examples_of(training).items():
        columns = dict(zip(FEATURES, zip(*(example.x for example in examples), strict=True), strict=True))
        used = model.laws[kind].used | {FEATURES[at] for at in getattr(model.residuals.get(kind), "used", ())}
        same = [f"{name} ({columns[name][0]:g})" for name in FEATURES if name in used and len(set(columns[name])) == 1]
        if same:
            notes.append(f"{kind}: the same in every state: {', '.join(same)}; what changes with it was not measured")
    machines = sorted({fingerprint(header.hardware) for header in dataset.headers.values()})
    if len(machines) > 1:
        notes.append(f"measured on mixed hardware: {'; '.join(machines)}")
    return notes


def _law_notes(dataset: Dataset, used: Sequence[State], model: FittedModel) -> list[str]:
    """What of the laws the data did not tell, or cannot be."""
    sheet = known_sheet(dataset.any_header.hardware.get("device"))
    notes = [*untold_loads(model.laws["swap"], examples_of(used)["swap"])]
    budgets = {header.token_budget for header in dataset.headers.values()}
    if len(budgets) > 1:
        some = ", ".join(sorted("unknown" if one is None else str(one) for one in budgets))
        notes.append(f"recompute: measured under several token budgets ({some}), so that its chunks are not counted")
    return [*notes, *implausible(model.laws, dataset.geometry, sheet)]


def split(states: Sequence[State], seed: int) -> tuple[list[State], list[State]]:
    """Training and held-out states, every length in both: one in four held out, more where that is under 20."""
    hands = max(2, min(4, len(states) // EVALUABLE_STATES))
    hand = dealt(states, hands, random.Random(f"held out {seed}"))
    numbered = list(zip(states, hand, strict=True))
    return [state for state, one in numbered if one], [state for state, one in numbered if not one]


def _variation(dataset: Dataset, force: bool) -> float | None:
    found: list[float] = []
    for core, header in dataset.headers.items():
        if header.source != "profile":
            continue
        value = header.noise.get("variation")
        if isinstance(value, int | float) and 0 <= value <= MAX_VARIATION:
            found.append(float(value))
        elif not force:
            raise TraceError(
                f"core {core}, header.json: noise.variation is {value!r}, should be at most {MAX_VARIATION}; "
                "measure again on a quieter machine, or --force it"
            )
        elif isinstance(value, int | float):
            found.append(float(value))
    return max(found, default=None)


def provenance_of(family: str, dataset: Dataset, training: Sequence[State], variation: float | None) -> Provenance:
    """What a model of that ``family`` (its label), fitted to the ``training`` states of ``dataset`` was measured on."""
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
    )


def _report(
    model: FittedModel, fitted: Fit, dataset: Dataset, parts: tuple[list[State], list[State]], variation: float | None
) -> TrainReport:
    training, held = parts
    outside, extrapolated = natural_outside(model, dataset.natural)
    below = {kind: sum(state.typical_s[kind] < model.floor_s[kind] for state in training) for kind in KINDS}
    return TrainReport(
        model=model,
        out="",
        family=model.provenance.family,
        digest=model.digest,
        training_states=len(training),
        held_out_states=len(held),
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
    )


def natural_outside(model: FittedModel, natural: Sequence[Preemption]) -> tuple[dict[str, float], float | None]:
    """Share of situations outside the trained range, per feature; and of those where a prediction depends on it."""
    if not natural:
        return {}, None
    outside = {name: np.zeros(len(natural), np.bool_) for name in FEATURES}
    matters = np.zeros(len(natural), np.bool_)
    for kind in KINDS:
        for name, column in Situations.of(natural).features(kind).items():
            low, high = model.ranges[kind][name]
            beyond = ~((low <= column) & (column <= high))
            outside[name] |= beyond
            if name in model.depends_on(kind):
                matters |= beyond
    return {name: float(some.mean()) for name, some in outside.items()}, float(matters.mean())


@dataclass(frozen=True, slots=True)
class CalibrateReport:
    """A model carried to another machine, link or LLM, and what a few measurements were worth there."""

    model: FittedModel
    out: str
    """Its folder; empty where it was not stored."""
    source: str
    digest: str
    states: int
    held_out_states: int
    errors: tuple[ErrorByCount, ...]
    """Held-out error by number of measured states; empty where too few states were left to tell."""
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return as_told(self)

    def text(self) -> str:
        lines = [
            f"cost model {self.out or 'in memory'}, digest {self.digest[:12]}: "
            f"{self.source} carried here by {self.states} states"
        ]
        if self.errors:
            lines += [
                f"held-out error on {self.held_out_states} states, |log(measured / predicted)| of a state's median, by "
                f"number of measured states; mean (and worst) of {max(one.draws for one in self.errors)} draws:",
                f"  {'states':>6} " + " ".join(f"{kind:>18}" for kind in KINDS),
            ]
        for one in self.errors:
            shown = (f"{one.mean_error[kind]:.1%} ({one.worst_draw[kind]:.1%})" for kind in KINDS)
            lines.append(f"  {one.states:>6} " + " ".join(f"{text:>18}" for text in shown))
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def calibrate(
    cost_model: Path | str | CostModel,
    traces: Sequence[Path | str],
    out: Path | str | None = None,
    states: int | None = None,
    seed: int = 0,
    force: bool = False,
) -> CalibrateReport:
    """Carry a cost model to where ``traces`` were measured; it is the report's ``model``, and is written to folder
    ``out`` where one is given.

    ``cost_model``: a folder, the name of one that ships, or ``analytic:DEVICE[@LINK]:CONFIG``, the untrained one; or a
    model itself, as ``train(...).model``, if it is of this package's own kind.
    ``states``: how many of the traces' states to use, spread over their lengths; all that are not held out without it.
    Raises ModelError for the model, TraceError as :func:`train` for the traces (over 30% noise too, unless
    ``force``), ValueError for a number of states that
    is not there.
    """
    model = _to_carry(cost_model)
    forests = store.forest_texts(model)
    dataset = measured(traces)
    variation = _variation(dataset, force)
    tellable = len(dataset.states) >= MIN_STATES_TO_HOLD_OUT
    training, held = split(dataset.states, seed) if tellable else (list(dataset.states), [])
    if states is not None and not 1 <= states <= len(training):
        raise WrongValue("states", f"is {states}, should be from 1 to {len(training)}: {len(held)} states are held out")

    def place(some: Sequence[State]) -> Provenance:
        here = provenance_of(model.provenance.family, dataset, some, variation)
        carried = f"carried from {model.name} (digest {model.digest[:12]}) by {len(some)} states"
        seen = tuple(sorted({*model.provenance.state_ids, *here.state_ids}))
        return replace(here, state_ids=seen, notes=(carried,))

    def predictor(some: Sequence[State]) -> FittedModel:
        return carry_once(model, forests, some, dataset, place(some)).model if some else model

    used = training if states is None else spread(training, states, random.Random(f"states {seed}"))
    carried = carry(model, forests, used, dataset, place(used))
    scores = held_out_scores(carried.model, held) if held else {}
    taken = unknown_beforehand(model.laws["recompute"], model.provenance, carried.model.provenance)
    notes = (*carried.model.provenance.notes, *taken, *_law_notes(dataset, used, carried.model))
    made = replace(carried.model.provenance, held_out=scores, notes=notes)
    found = store.round_trip(replace(carried.model, provenance=made), carried.forests, out)
    errors = error_by_count((0, *doubling(len(training))), training, held, predictor, seed) if held else ()
    place_of = "" if out is None else str(out)
    return CalibrateReport(found, place_of, model.name, found.digest, len(used), len(held), errors, notes)


def _to_carry(cost_model: Path | str | CostModel) -> FittedModel:
    """The model itself, or the one of that name."""
    if isinstance(cost_model, FittedModel):
        return cost_model
    if isinstance(cost_model, CostModel):
        raise ModelError(
            f"cost model {cost_model.name} is a {type(cost_model).__name__}, which has no laws that could be carried: "
            "should be one that `train` or `calibrate` made, or an untrained one"
        )
    return load(cost_model)
