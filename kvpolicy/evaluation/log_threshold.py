"""The best rule by length alone on a production log. Called by :mod:`kvpolicy.evaluation.offpolicy`.

No situation of a log shows both options. A rule is chosen by doubly robust estimates of what swap costs more than
recompute, on other records than it is judged on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvpolicy.arrays import Flags, Floats
from kvpolicy.datasets.threshold import BEST_THRESHOLD, LengthRule, best_length_rule
from kvpolicy.evaluation.decision_log import Log
from kvpolicy.evaluation.direct_model import FOLDS, Design, folds_of
from kvpolicy.evaluation.estimators import dr_terms, importance_weights
from kvpolicy.events import KINDS

MIN_RECORDS = 60
"""Records that a policy's model was trained on, to choose the rule on these; with fewer, it is chosen by folds."""


@dataclass(frozen=True, slots=True)
class ChosenRules:
    """A rule for each record, chosen without its cost and those of its fold."""

    by_record: tuple[LengthRule, ...]
    chosen_on: str

    @property
    def names(self) -> tuple[str, ...]:
        """The policies that were chosen."""
        return tuple(sorted({rule.policy for rule in self.by_record}))

    def choice(self) -> str:
        """The rules and what they were chosen on, as text."""
        return f"{BEST_THRESHOLD}: {', '.join(self.names)}, chosen doubly robustly on {self.chosen_on}"

    def targets(self, log: Log) -> Floats:
        """(n, K) probabilities of the rules, as of a policy: a record with one feasible option leaves no choice."""
        swap = np.array(
            [
                rule.option(situation.computed_tokens) == "swap"
                for rule, situation in zip(self.by_record, log.situations, strict=True)
            ],
            np.bool_,
        )
        wanted = np.column_stack([swap if kind == "swap" else ~swap for kind in KINDS])
        return np.where(_free(log)[:, None], wanted, log.feasible).astype(np.float64)


def choose_rules(full: Log, log: Log, rng: np.random.Generator) -> ChosenRules:
    """Choose on the records of ``full`` that ``log`` lacks, if there are enough; else by cross-fitting.

    ``full``: the log with the records that a policy's model was trained on; ``log``: without them.
    """
    if len(full) - len(log) >= MIN_RECORDS:
        training = full.without(frozenset(log.requests), "held out")
        rule = best_length_rule(_lengths(training), extra_s(training, rng))
        return ChosenRules((rule,) * len(log), f"{len(training)} records that a model was trained on")
    fold = folds_of(log.cluster, rng)
    rules = {}
    for number in set(fold.tolist()):
        others = log.only(fold != number, "held out")
        rules[number] = best_length_rule(_lengths(others), extra_s(others, rng))
    return ChosenRules(
        tuple(rules[number] for number in fold.tolist()), f"the records of the other folds, {FOLDS} folds"
    )


def extra_s(log: Log, rng: np.random.Generator) -> Floats:
    """(n,) doubly robust estimate of what swap costs more than recompute; 0 where only one of them was feasible."""
    design = Design.of(log.x, log.action, log.known, len(KINDS), folds_of(log.cluster, rng))
    q_s = design.predict(log.cost_s).cross_fitted
    by_kind = {}
    for number, kind in enumerate(KINDS):
        always = np.zeros_like(log.probability)
        always[:, number] = 1.0
        weight = importance_weights(always, log.probability, log.action, log.known, log.known_share)
        by_kind[kind] = dr_terms(always, q_s, weight, log.cost_s, log.action)
    return np.where(_free(log), by_kind["swap"] - by_kind["recompute"], 0.0)


def _free(log: Log) -> Flags:
    """(n,) whether both options were feasible."""
    return np.asarray(log.feasible.all(axis=1))


def _lengths(log: Log) -> Floats:
    return np.array([situation.computed_tokens for situation in log.situations], np.float64)
