"""Training from production logs: records in, a model folder and a report out.

Each option's law and residual come from its own records, which stand for 1 / chance situations.

The direct method, importance-weighted: with weights the law is the best one for all situations, not only for those in
which the logging policy liked the option; that matters where no law is quite right. A weight is at most
:data:`MAX_WEIGHT`, and how many were more is told. Weights enter as copies of a record, as the fits know no others.

What the model then says on average over all situations is held against the doubly robust answer, and scaled to it where
they differ by more than chance. The direct method answers by the model alone, ``mean m(x, a)``. The doubly robust
answer adds what the records of option ``a`` say of the model's misses, each for as many situations as it stands for
(Robins, Rotnitzky and Zhao, 1994; Dudik, Langford and Li, 2011):

    mean of  m(x_i, a) + [a_i = a] / p_i x (y_i - m(x_i, a))

It is right where the logged probabilities are or the model is. ``m`` is fitted without the record's own request. Where
an option had no chance at all the model stands alone.

Intervals are split conformal by option, from records of requests unseen in fitting. No situation is seen under both
options, so the interval of the log ratio is put together from the two: each at 95%, which holds both, and so the
ratio, at 90% or more whatever they have to do with each other (Bonferroni). It is wider than one from pairs would be.
Outside the trained range nothing is promised.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import floor, inf, log
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

from kvpolicy.cost import store
from kvpolicy.cost.intervals import MIN_PER_BIN, PREDICTED, Intervals, conformal_room, unbounded
from kvpolicy.cost.laws import Law
from kvpolicy.cost.model import FittedModel, Provenance
from kvpolicy.cost.store import ForestText, forest_of
from kvpolicy.datasets.examples import Example, log_miss, option_of, ranges_of
from kvpolicy.datasets.logs import Record, Records, read_records
from kvpolicy.errors import InputError
from kvpolicy.events import KINDS, Kind
from kvpolicy.features import features_of
from kvpolicy.regression.conformal import CONFIDENCE, Room
from kvpolicy.trace import TraceError
from kvpolicy.training.coverage import share_held
from kvpolicy.training.family import Costs, Family, family_of, laws_of
from kvpolicy.training.residual_fit import INPUTS, MIN_STATES, Fold, Target, choose_tree_count, fit_residual
from kvpolicy.training.transfer import scaled_by

AVERAGE_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Term:
    """One situation of the log, and one option."""

    request: str
    """What happens to one request is not independent."""
    predicted_s: float
    """By a model that was fitted without this request."""
    weight: float
    """Situations the record stands for, clipped; 0 where another option was taken."""
    measured_s: float
    """0 where another option was taken."""

    @property
    def robust_s(self) -> float:
        return self.predicted_s + self.weight * (self.measured_s - self.predicted_s)


@dataclass(frozen=True, slots=True)
class Average:
    """Seconds per preemption over all situations of a log."""

    direct_s: float
    robust_s: float
    low_s: float
    """95% interval of ``robust_s``, by requests."""
    high_s: float

    @property
    def factor(self) -> float:
        """What the model is to be multiplied by: 1 where its own answer is within the interval, or nothing above 0."""
        if self.low_s <= self.direct_s <= self.high_s or self.robust_s <= 0 or self.direct_s <= 0:
            return 1.0
        return self.robust_s / self.direct_s

    @property
    def log_factor(self) -> float:
        return log(self.factor)


def average(terms: Sequence[Term]) -> Average:
    """Mean over the terms; the interval is Student's over requests, as the linearised mean of clusters of any size.

    Raises ValueError for terms of fewer than two requests: no interval can be told from one.
    """
    names = sorted({term.request for term in terms})
    if len(names) < 2:
        raise InputError(f"terms of {len(names)} requests: at least 2 are needed")
    place = {name: number for number, name in enumerate(names)}
    cluster = np.array([place[term.request] for term in terms])
    values = np.array([term.robust_s for term in terms])
    mean = float(values.mean())
    sums = np.bincount(cluster, values - mean, len(names))
    error = float(np.sqrt(len(names) / (len(names) - 1) * np.sum(sums**2))) / len(terms)
    reach = float(student.ppf((1 + AVERAGE_CONFIDENCE) / 2, len(names) - 1)) * error
    direct = float(np.mean([term.predicted_s for term in terms]))
    return Average(direct, mean, mean - reach, mean + reach)


FOLDS = 5
MIN_RECORDS = 30
"""Of each option: fewer tell no law and no interval."""
MAX_WEIGHT = 10.0
RATIO_CONFIDENCE = (1 + CONFIDENCE) / 2
"""Of each option's interval in that of the ratio."""


@dataclass(frozen=True, slots=True)
class LoggedFit:
    """A model and what has to be stored and said beside it."""

    model: FittedModel
    forests: Mapping[Kind, ForestText]
    trees: Mapping[Kind, int]
    averages: Mapping[Kind, Average]
    """Over all situations of the log, before the model was scaled to them."""
    notes: tuple[str, ...]


def fit_logged(family: Family, training: Records, provenance: Provenance, seed: int) -> LoggedFit:
    """Fit to all of ``training``; intervals from folds, in which each request is predicted by a fit without it.

    Raises TraceError, naming the option, for one with fewer than 30 records.
    """
    by_kind = {kind: training.under(kind) for kind in KINDS}
    for kind, some in by_kind.items():
        if len(some) < MIN_RECORDS:
            raise TraceError(
                f"table decisions: {len(some)} records to learn {kind} from, at least {MIN_RECORDS} are needed; "
                "let the server's policy leave more to chance (explore:COST_MODEL), or profile"
            )
    notes: list[str] = []
    folds = _folds(training.records, seed)
    trees = _tree_counts(family, training, folds, seed, notes)
    missed: dict[Kind, list[tuple[Record, float]]] = {kind: [] for kind in KINDS}
    terms: dict[Kind, list[Term]] = {kind: [] for kind in KINDS}
    for seen, unseen in folds:
        one, _ = _fit_once(family, training, seen, provenance, trees, unbounded(), seed)
        for record in unseen:
            missed[record.kind].append((record, miss(one, record)))
            for kind in KINDS:
                terms[kind].append(term_of(one, record, kind))
    averages = {kind: average(terms[kind]) for kind in KINDS}
    notes += [
        f"{kind}: over all situations the law is off by {1 / averages[kind].factor - 1:+.1%}, and was scaled"
        for kind in KINDS
        if averages[kind].factor != 1.0
    ]
    intervals = intervals_of(
        {kind: [(one, by - averages[kind].log_factor) for one, by in some] for kind, some in missed.items()}
    )
    if inf in [side for rooms in intervals.inside.values() for room in rooms for side in room]:
        notes.append("too few records for 90% intervals in some bin: infinite there")
    notes.append("intervals hold the cost of a single preemption, its noise included; infinite outside the range")
    model, forests = _fit_once(family, training, training.records, provenance, trees, intervals, seed)
    laws = {kind: scaled_by(model.laws[kind], averages[kind].factor) for kind in KINDS}
    return LoggedFit(replace(model, laws=laws), forests, trees, averages, tuple(notes))


def term_of(model: FittedModel, record: Record, kind: Kind) -> Term:
    """What a situation says of an option that may not be the one that was taken."""
    features = features_of(record.situation, option_of(kind, record.situation.computed_tokens))
    predicted_s, taken = model.seconds(kind, features), record.kind == kind
    return Term(record.request, predicted_s, weight_of(record) if taken else 0.0, record.engine_s if taken else 0.0)


def weight_of(record: Record) -> float:
    """How many situations a record stands for, clipped."""
    return min(1.0 / record.chance, MAX_WEIGHT)


def clipped(records: Sequence[Record]) -> int:
    """Records whose weight is more than what it is clipped to."""
    return sum(1.0 / record.chance > MAX_WEIGHT for record in records)


def copied(records: Sequence[Record]) -> tuple[Example, ...]:
    """Each record's example as often as it weighs, rounded so that no sum of weights is off by one."""
    found: list[Example] = []
    total = 0.0
    for record in records:
        before, total = floor(total + 0.5), total + weight_of(record)
        found += [record.example] * (floor(total + 0.5) - before)
    return tuple(found)


def miss(model: FittedModel, record: Record) -> float:
    """log(measured / predicted)."""
    example = record.example
    return log_miss(record.engine_s, model.seconds(record.kind, example.x), model.floor_s[record.kind])


# ---- fitting ----


def _folds(records: Sequence[Record], seed: int) -> list[tuple[list[Record], list[Record]]]:
    hand = dealt_requests(records, FOLDS, random.Random(seed))
    return [
        ([r for r in records if hand[r.request] != one], [r for r in records if hand[r.request] == one])
        for one in range(FOLDS)
    ]


def dealt_requests(records: Sequence[Record], hands: int, rng: random.Random) -> dict[str, int]:
    """A hand for each request."""
    names = sorted({record.request for record in records})
    rng.shuffle(names)
    return {name: number % hands for number, name in enumerate(names)}


def _examples(records: Sequence[Record]) -> dict[Kind, tuple[Example, ...]]:
    return {kind: copied([record for record in records if record.kind == kind]) for kind in KINDS}


def _laws(family: Family, examples: Mapping[Kind, tuple[Example, ...]], training: Records) -> dict[Kind, Law]:
    return laws_of(family, Costs(examples, training.floor_s, budget_tokens=training.budget_tokens))


def _tree_counts(
    family: Family,
    training: Records,
    folds: Sequence[tuple[list[Record], list[Record]]],
    seed: int,
    notes: list[str],
) -> dict[Kind, int]:
    trees: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    if not family.trees:
        return trees
    seen_and_unseen = [(_examples(seen), _examples(unseen)) for seen, unseen in folds]
    laws = [_laws(family, seen, training) for seen, _ in seen_and_unseen]
    for kind in KINDS:
        if len(training.under(kind)) < MIN_STATES:
            notes.append(f"{kind}: under {MIN_STATES} records: physics alone, no residual was learned")
            continue
        floor_s = training.floor_s[kind]
        trees[kind] = choose_tree_count(
            [
                Fold(Target(kind, seen[kind], law[kind], floor_s), Target(kind, unseen[kind], law[kind], floor_s))
                for (seen, unseen), law in zip(seen_and_unseen, laws, strict=True)
                if unseen[kind]
            ],
            seed,
        )
        if not trees[kind]:
            notes.append(f"{kind}: a learned residual did not help on unseen records; physics alone")
    return trees


def _fit_once(
    family: Family,
    training: Records,
    records: Sequence[Record],
    provenance: Provenance,
    trees: Mapping[Kind, int],
    intervals: Intervals,
    seed: int,
) -> tuple[FittedModel, dict[Kind, ForestText]]:
    examples, floor_s = _examples(records), training.floor_s
    laws = _laws(family, examples, training)
    forests = {
        kind: fit_residual(Target(kind, examples[kind], laws[kind], floor_s[kind]), trees[kind], seed)
        for kind in KINDS
        if trees[kind]
    }
    assert all(forest.inputs == INPUTS[kind] for kind, forest in forests.items())
    model = FittedModel(
        "",
        provenance,
        laws,
        {kind: forest_of(text) for kind, text in forests.items()},
        {kind: ranges_of(examples[kind]) for kind in KINDS},
        floor_s,
        intervals,
        step_time=training.step_time,
    )
    return model, forests


# ---- intervals ----


def intervals_of(missed: Mapping[Kind, Sequence[tuple[Record, float]]]) -> Intervals:
    """By length, powers of two joined until a bin holds 30 records of either option."""
    edges = _edges(missed)
    bins = len(edges) + 1
    scores: dict[Kind, list[list[float]]] = {kind: [[] for _ in range(bins)] for kind in KINDS}
    for kind, some in missed.items():
        for record, one in some:
            scores[kind][sum(edge <= record.situation.computed_tokens for edge in edges)].append(one)
    inside: dict[str, tuple[Room, ...]] = {kind: tuple(map(conformal_room, scores[kind])) for kind in KINDS}
    inside["ratio"] = tuple(
        ratio_room(*(conformal_room(scores[kind][number], RATIO_CONFIDENCE) for kind in KINDS))
        for number in range(bins)
    )
    states = tuple(min(len(scores[kind][number]) for kind in KINDS) for number in range(bins))
    return Intervals(edges, ((),) * bins, inside, inside, dict.fromkeys(PREDICTED, inf), states)


def ratio_room(recompute: Room, swap: Room) -> Room:
    """Around log(swap / recompute), of room around either: the ratio is low where swap is low and recompute high."""
    return swap[0] + recompute[1], swap[1] + recompute[0]


def _edges(missed: Mapping[Kind, Sequence[tuple[Record, float]]]) -> tuple[float, ...]:
    """Tokens at which bins begin, but the first."""
    counts: dict[int, dict[Kind, int]] = {}
    for kind, some in missed.items():
        for record, _ in some:
            octave = record.situation.computed_tokens.bit_length()
            counts.setdefault(octave, dict.fromkeys(KINDS, 0))[kind] += 1
    starts: list[int] = []
    held = dict.fromkeys(KINDS, 0)
    for octave in sorted(counts):
        if not starts or min(held.values()) >= MIN_PER_BIN:
            starts.append(octave)
            held = dict.fromkeys(KINDS, 0)
        held = {kind: held[kind] + counts[octave][kind] for kind in KINDS}
    if len(starts) > 1 and min(held.values()) < MIN_PER_BIN:
        starts.pop()
    return tuple(float(1 << (octave - 1)) for octave in starts[1:])


# ---- judging ----


def held_out_scores(model: FittedModel, held: Sequence[Record]) -> dict[str, object]:
    """Errors on records of unseen requests, |log(measured / predicted)|, weighted as in fitting; and coverage."""
    scores: dict[str, object] = {"records": len(held)}
    for kind in KINDS:
        mine = [record for record in held if record.kind == kind]
        if not mine:
            continue
        weights = [weight_of(record) for record in mine]
        missed = [miss(model, record) for record in mine]
        by_law = [log_miss(r.engine_s, model.law_seconds(kind, r.example.x), model.floor_s[kind]) for r in mine]
        scores[kind] = {
            "records": len(mine),
            "mean_error": _mean([abs(one) for one in missed], weights),
            "bias": _mean(missed, weights),
            "law_mean_error": _mean([abs(one) for one in by_law], weights),
            "coverage": share_held([_holds(model, r, one) for r, one in zip(mine, missed, strict=True)]),
        }
    return scores


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _holds(model: FittedModel, record: Record, missed: float) -> bool:
    x = record.example.x
    number = model.intervals.bin_of(record.situation.computed_tokens, record.situation.running_requests)
    outside, distance = bool(model.outside(record.kind, x)), model.distance(record.kind, x)
    below, above = model.intervals.room(record.kind, number, outside, distance)
    return -below <= missed <= above


def as_told(report: Any) -> dict[str, Any]:
    """A report as plain values: without the model itself, which its digest stands for."""
    return {name: value for name, value in asdict(replace(report, model=None)).items() if name != "model"}


HANDS = 4
"""Requests are dealt to so many; one of them is held out."""


@dataclass(frozen=True, slots=True)
class LogTrainReport:
    """What was trained from logs, and how far it can be trusted."""

    model: FittedModel
    out: str
    """Its folder; empty where it was not stored."""
    family: str
    digest: str
    records: Mapping[Kind, int]
    """Trained on."""
    held_out_records: int
    held_out: Mapping[str, Any]
    """See :func:`kvpolicy.training.log_fits.held_out_scores`."""
    trees: Mapping[Kind, int]
    clipped: Mapping[Kind, int]
    """Training records that stand for more situations than a weight may."""
    min_chance: Mapping[Kind, float]
    averages: Mapping[Kind, Average]
    """Over all situations of the logs, directly and doubly robustly; where they differ the model was scaled."""
    left_out: Mapping[str, int]
    notes: tuple[str, ...]
    replaced: bool
    """Whether a model was in the folder before."""

    def to_dict(self) -> dict[str, Any]:
        return as_told(self)

    def text(self) -> str:
        lines = [
            f"cost model {self.out or 'in memory'} ({self.family}), from logs, digest {self.digest[:12]}",
            *(["replaces the cost model that was there"] if self.replaced else []),
            f"records: {', '.join(f'{kind} {count}' for kind, count in self.records.items())} trained on, "
            f"{self.held_out_records} of other requests held out",
            "held-out error of single preemptions, |log(measured / predicted)|, weighted by 1 / chance:",
            f"  {'option':<10} {'mean':>7} {'bias':>7} {'formula alone':>14} {'trees':>6}  90% interval holds",
        ]
        for kind in KINDS:
            score = self.held_out.get(kind)
            if score is None:
                lines.append(f"  {kind:<10} no record was held out")
                continue
            held = score["coverage"]
            holds = f"{held['holds']:.0%} of {held['states']} [{held['low']:.0%}, {held['high']:.0%}]"
            lines.append(
                f"  {kind:<10} {score['mean_error']:>7.1%} {score['bias']:>+7.1%} {score['law_mean_error']:>14.1%} "
                f"{self.trees[kind]:>6}  {holds}"
            )
        for kind in KINDS:
            lines.append(
                f"{kind}: least chance {self.min_chance[kind]:.3g}; {self.clipped[kind]} of {self.records[kind]} "
                f"records stand for more than {MAX_WEIGHT:g} situations and count as that many"
            )
        for kind in KINDS:
            one = self.averages[kind]
            lines.append(
                f"{kind}: over all situations {one.direct_s * 1e3:.3g} ms by the law, {one.robust_s * 1e3:.3g} ms "
                f"[{one.low_s * 1e3:.3g}, {one.high_s * 1e3:.3g}] doubly robustly"
            )
        lines += [f"left out: {count} {reason}" for reason, count in self.left_out.items() if count]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def train_logged(
    folders: Sequence[Path | str], out: Path | str | None, family: str | Family, seed: int, mixed_hardware: bool
) -> LogTrainReport:
    """Fit a cost model to production logs and write it to folder ``out``, if one is given. One request in four is held
    out.

    Raises TraceError as :func:`kvpolicy.datasets.logs.read_records`, and naming the option that has too few records;
    FileExistsError where ``out`` holds something that is no cost model.
    """
    family = family_of(family)
    replaced = out is not None and store.holds_model(Path(out))
    records = read_records(folders, mixed_hardware)
    hand = dealt_requests(records.records, HANDS, random.Random(f"held out {seed}"))
    seen = tuple(record for record in records.records if hand[record.request])
    held = tuple(record for record in records.records if not hand[record.request])
    training = replace(records, records=seen)
    fitted = fit_logged(family, training, _provenance(family, records, seen), seed)
    notes = (
        *fitted.notes,
        "trained from logs, in which no situation was met with both options: the interval of their ratio is put "
        "together from either's, and is wider than one from a profile",
        "delays of victims and others are not learned from logs: objective engine only",
    )
    scores = held_out_scores(fitted.model, held)
    made = replace(fitted.model.provenance, held_out=scores, notes=notes)
    model = store.round_trip(replace(fitted.model, provenance=made), fitted.forests, out)
    return LogTrainReport(
        model=model,
        out="" if out is None else str(out),
        family=family.label,
        digest=model.digest,
        records={kind: len(training.under(kind)) for kind in KINDS},
        held_out_records=len(held),
        held_out=scores,
        trees=fitted.trees,
        clipped={kind: clipped(training.under(kind)) for kind in KINDS},
        min_chance={kind: min(record.chance for record in training.under(kind)) for kind in KINDS},
        averages=fitted.averages,
        left_out=records.left_out,
        notes=notes,
        replaced=replaced,
    )


def _provenance(family: Family, records: Records, seen: Sequence[Record]) -> Provenance:
    """``state_ids`` are the requests that were learned from: an estimate must not be made on them again."""
    header = records.any_header
    return Provenance(
        family=family.label,
        hardware=dict(header.hardware),
        geometry=records.geometry,
        link=dict(header.link),
        block_sizes=tuple(sorted({one.block_size for one in records.headers.values()})),
        kv_bytes_per_token=header.block_bytes / header.block_size,
        trace_digests=records.digests,
        state_ids=tuple(sorted({record.request for record in seen})),
        noise={"variation": None},
        held_out={},
    )
