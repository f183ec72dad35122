"""Train cost models from production logs. Called by :func:`kvpolicy.training.train`.

The law and the residual of an option are fitted to the records of that option, weighted by their logged probability.

The model's mean over all situations is compared with the doubly robust estimate (see
:mod:`kvpolicy.training.importance_weights`), and the model is scaled to it where the difference is significant.

Intervals are split conformal by option, from records of requests not used in fitting. No situation is measured under
both options, so the interval of the log ratio is combined from the two: each has 95% coverage, so both hold together,
and with them the ratio, with at least 90% whatever their dependence (Bonferroni). It is wider than one from pairs.
Outside the trained range intervals are infinite.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import numpy as np

from kvpolicy.cost import store
from kvpolicy.cost.intervals import MIN_PER_BIN, PREDICTED, Intervals, conformal_margin, octave_bins
from kvpolicy.cost.model import FittedModel, Provenance
from kvpolicy.cost.store import ForestText
from kvpolicy.datasets.examples import log_miss, option_of
from kvpolicy.datasets.logs import Record, Records, read_records
from kvpolicy.datasets.threshold import Difference, LengthRule, best_length_rule, clustered_difference
from kvpolicy.events import KINDS, Kind
from kvpolicy.features import features_of
from kvpolicy.regression.conformal import CONFIDENCE, Margin
from kvpolicy.trace import TraceError
from kvpolicy.training.coverage import share_held
from kvpolicy.training.family import Costs, Family, family_of
from kvpolicy.training.importance_weights import Average, Term, average, clipped, weight_of, weighted_example
from kvpolicy.training.law_transfer import scaled_by
from kvpolicy.training.model_fit import cross_fit, fit_part
from kvpolicy.training.reports import LogTrainReport

FOLDS = 5
MIN_RECORDS = 30
"""Per option: with fewer neither a law nor an interval can be determined."""
RATIO_CONFIDENCE = (1 + CONFIDENCE) / 2
"""Confidence of each option's interval in the interval of the ratio."""


@dataclass(frozen=True, slots=True)
class LoggedFit:
    """A fitted model, with what is stored and reported beside it."""

    model: FittedModel
    forests: Mapping[Kind, ForestText]
    trees: Mapping[Kind, int]
    averages: Mapping[Kind, Average]
    """Mean costs over all situations of the log, before the model was scaled to them."""
    rule: LengthRule
    """The best threshold on the training records, by their doubly robust values."""
    notes: tuple[str, ...]


def fit_logged(family: Family, training: Records, provenance: Provenance, seed: int) -> LoggedFit:
    """Fit to all of ``training``. Intervals come from cross-validation, whose folds are whole requests.

    Raises TraceError, naming the option, for fewer than 30 records of an option, and for records of one fold alone: a
    fit without that fold would have none.
    """
    by_kind = {kind: training.of_kind(kind) for kind in KINDS}
    for kind, records in by_kind.items():
        if len(records) < MIN_RECORDS:
            raise TraceError(
                f"table decisions: {len(records)} records to learn {kind} from, at least {MIN_RECORDS} are needed; "
                "serve with a policy that chooses at random more often (explore:COST_MODEL), or profile"
            )

    def costs_of(records: Sequence[Record]) -> Costs:
        examples = {
            kind: tuple(weighted_example(record) for record in records if record.kind == kind) for kind in KINDS
        }
        return Costs(examples, training.floor_s, budget_tokens=training.budget_tokens, geometry=training.geometry)

    fold_of = request_folds(training.records, FOLDS, random.Random(seed))
    for kind, records in by_kind.items():
        requests = {record.request for record in records}
        if len({fold_of[name] for name in requests}) < 2:
            raise TraceError(
                f"table decisions: all {len(records)} records to learn {kind} from are of {len(requests)} request(s) "
                f"of one fold out of {FOLDS}, so that no law can be tested; records of more requests are needed"
            )
    fold_numbers = [fold_of[record.request] for record in training.records]
    crossed = cross_fit(family, training.records, fold_numbers, costs_of, seed, "records")
    trees, notes = crossed.trees, list(crossed.notes)
    misses: dict[Kind, list[tuple[Record, float]]] = {kind: [] for kind in KINDS}
    terms: dict[Kind, list[Term]] = {kind: [] for kind in KINDS}
    judged: list[Record] = []
    for fold_model, (_, held_out) in zip(crossed.models(provenance), crossed.folds, strict=True):
        judged += held_out
        for record in held_out:
            misses[record.kind].append((record, miss(fold_model, record)))
            for kind in KINDS:
                terms[kind].append(term_of(fold_model, record, kind))
    averages = {kind: average(terms[kind]) for kind in KINDS}
    notes += [
        f"{kind}: over all situations the law is off by {1 / averages[kind].factor - 1:+.1%}, and was scaled"
        for kind in KINDS
        if averages[kind].factor != 1.0
    ]
    intervals = intervals_of(
        {kind: [(record, by - averages[kind].log_factor) for record, by in pairs] for kind, pairs in misses.items()}
    )
    if inf in [side for margins in intervals.inside.values() for margin in margins for side in margin]:
        notes.append("too few records for 90% intervals in some bin: infinite there")
    notes.append("intervals hold the cost of a single preemption, its noise included; infinite outside the range")
    whole = fit_part(family, costs_of(training.records), trees, seed)
    model = whole.model(trees, provenance, intervals, training.step_time)
    laws = {kind: scaled_by(model.laws[kind], averages[kind].factor) for kind in KINDS}
    rule = best_length_rule(
        np.array([record.situation.computed_tokens for record in judged], np.float64),
        np.array(list(map(extra_of, judged, terms["swap"], terms["recompute"])), np.float64),
    )
    return LoggedFit(replace(model, laws=laws), whole.forests(trees), trees, averages, rule, tuple(notes))


def extra_of(record: Record, swap: Term, recompute: Term) -> float:
    """Doubly robust estimate of what a swap costs more than a recompute in one situation, seconds; 0 where only one of
    them was feasible, which no rule can change."""
    return swap.robust_s - recompute.robust_s if record.had_choice else 0.0


def against_threshold(model: FittedModel, rule: LengthRule, held_out: Sequence[Record]) -> Difference | None:
    """The model's choices compared with the rule's on held-out records, by their doubly robust values.

    None for records of fewer than two requests.
    """
    differences_s = []
    for record in held_out:
        swap, recompute = (term_of(model, record, kind) for kind in ("swap", "recompute"))
        chosen: Kind = "swap" if swap.predicted_s < recompute.predicted_s else "recompute"
        ruled = rule.option(record.situation.computed_tokens)
        sign = (chosen == "swap") - (ruled == "swap")
        differences_s.append(sign * extra_of(record, swap, recompute))
    return clustered_difference("the model", differences_s, [record.request for record in held_out])


def term_of(model: FittedModel, record: Record, kind: Kind) -> Term:
    """Term of a record's situation for option ``kind``, whether or not that option was taken."""
    features = features_of(record.situation, option_of(kind, record.situation.computed_tokens))
    predicted_s, same_kind = model.seconds(kind, features), record.kind == kind
    return Term(
        record.request, predicted_s, weight_of(record) if same_kind else 0.0, record.engine_s if same_kind else 0.0
    )


def miss(model: FittedModel, record: Record) -> float:
    """log(measured / predicted), predicted as at the decision."""
    return log_miss(record.engine_s, model.seconds(record.kind, record.expected), model.floor_s[record.kind])


def request_folds(records: Sequence[Record], folds: int, rng: random.Random) -> dict[str, int]:
    """Fold number of each request."""
    requests = sorted({record.request for record in records})
    rng.shuffle(requests)
    return {name: number % folds for number, name in enumerate(requests)}


# ---- intervals ----


def intervals_of(misses: Mapping[Kind, Sequence[tuple[Record, float]]]) -> Intervals:
    """Conformal intervals by length; powers of two are joined until a bin holds 30 records of each option.

    ``misses``: by option, held-out records with log(measured / predicted).
    """
    records = [(record, score) for pairs in misses.values() for record, score in pairs]
    bins = octave_bins(records, _tokens, lambda pairs: min(len(_scores(pairs, kind)) for kind in KINDS) >= MIN_PER_BIN)
    scores = {kind: [_scores(pairs, kind) for pairs in bins] for kind in KINDS}
    inside: dict[str, tuple[Margin, ...]] = {kind: tuple(map(conformal_margin, scores[kind])) for kind in KINDS}
    inside["ratio"] = tuple(
        ratio_margin(*(conformal_margin(scores[kind][number], RATIO_CONFIDENCE) for kind in KINDS))
        for number in range(len(bins))
    )
    edges = tuple(float(_tokens(pairs[0])) for pairs in bins[1:])
    states = tuple(min(len(scores[kind][number]) for kind in KINDS) for number in range(len(bins)))
    return Intervals(edges, ((),) * len(bins), inside, inside, dict.fromkeys(PREDICTED, inf), states)


def _tokens(pair: tuple[Record, float]) -> int:
    return pair[0].situation.computed_tokens


def _scores(pairs: Sequence[tuple[Record, float]], kind: Kind) -> list[float]:
    return [score for record, score in pairs if record.kind == kind]


def ratio_margin(recompute: Margin, swap: Margin) -> Margin:
    """Margin of log(swap / recompute) from the margins of both: the ratio is low if swap is low and recompute high."""
    return swap[0] + recompute[1], swap[1] + recompute[0]


# ---- judging ----


def held_out_scores(model: FittedModel, held_out: Sequence[Record]) -> dict[str, object]:
    """Errors |log(measured / predicted)| on records of held-out requests, weighted as in fitting; and coverage."""
    scores: dict[str, object] = {"records": len(held_out)}
    for kind in KINDS:
        records = [record for record in held_out if record.kind == kind]
        if not records:
            continue
        weights = [weight_of(record) for record in records]
        misses = [miss(model, record) for record in records]
        law_misses = [log_miss(r.engine_s, model.law_seconds(kind, r.expected), model.floor_s[kind]) for r in records]
        scores[kind] = {
            "records": len(records),
            "mean_error": _mean([abs(log_error) for log_error in misses], weights),
            "bias": _mean(misses, weights),
            "law_mean_error": _mean([abs(log_error) for log_error in law_misses], weights),
            "coverage": share_held([_holds(model, r, log_error) for r, log_error in zip(records, misses, strict=True)]),
        }
    return scores


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _holds(model: FittedModel, record: Record, log_error: float) -> bool:
    x = record.expected
    number = model.intervals.bin_of(record.situation.computed_tokens, record.situation.running_requests)
    outside, distance = bool(model.outside(record.kind, x)), model.distance(record.kind, x)
    below, above = model.intervals.room(record.kind, number, outside, distance)
    return -below <= log_error <= above


HOLD_OUT_FOLDS = 4
"""Folds that requests are split into for the final scores; one of them is held out."""


def train_logged(
    folders: Sequence[Path | str], out: Path | str | None, family: str | Family, seed: int, mixed_hardware: bool
) -> LogTrainReport:
    """Fit a cost model to production logs, and write it to folder ``out`` if one is given. One request in four is held
    out.

    Raises TraceError as :func:`kvpolicy.datasets.logs.read_records`, and for an option with too few records;
    FileExistsError if ``out`` holds something other than a cost model.
    """
    family = family_of(family)
    replaced = out is not None and store.holds_model(Path(out))
    records = read_records(folders, mixed_hardware)
    fold_of = request_folds(records.records, HOLD_OUT_FOLDS, random.Random(f"held out {seed}"))
    training_records = tuple(record for record in records.records if fold_of[record.request])
    held_out = tuple(record for record in records.records if not fold_of[record.request])
    training = replace(records, records=training_records)
    fitted = fit_logged(family, training, _provenance(family, records, training_records), seed)
    notes = (
        *fitted.notes,
        "trained from logs, in which each situation shows only one option: the interval of their ratio combines those "
        "of the two options, and is wider than one from a profile",
        "delays of victims and others are not learned from logs: objective engine only",
    )
    scores, against = held_out_scores(fitted.model, held_out), against_threshold(fitted.model, fitted.rule, held_out)
    compared = {} if against is None else {"against_threshold": against.stored(fitted.rule)}
    provenance = replace(fitted.model.provenance, held_out=scores | compared, notes=notes)
    model = store.round_trip(replace(fitted.model, provenance=provenance), fitted.forests, out)
    return LogTrainReport(
        model=model,
        out="" if out is None else str(out),
        family=family.label,
        digest=model.digest,
        records={kind: len(training.of_kind(kind)) for kind in KINDS},
        held_out_records=len(held_out),
        held_out=scores,
        trees=fitted.trees,
        clipped={kind: clipped(training.of_kind(kind)) for kind in KINDS},
        min_chance={kind: min(record.chance for record in training.of_kind(kind)) for kind in KINDS},
        averages=fitted.averages,
        best_threshold=fitted.rule.policy,
        against_threshold=against,
        left_out=records.left_out,
        notes=notes,
        replaced=replaced,
    )


def _provenance(family: Family, records: Records, training_records: Sequence[Record]) -> Provenance:
    """Provenance whose ``state_ids`` are the training requests: no policy may be evaluated on these."""
    any_header = records.any_header
    return Provenance(
        family=family.label,
        hardware=dict(any_header.hardware),
        geometry=records.geometry,
        link=dict(any_header.link),
        block_sizes=tuple(sorted({header.block_size for header in records.headers.values()})),
        kv_bytes_per_token=any_header.block_bytes / any_header.block_size,
        trace_digests=records.digests,
        state_ids=tuple(sorted({record.request for record in training_records})),
        noise={"variation": None},
        held_out={},
        pinned=records.pinned,
    )
