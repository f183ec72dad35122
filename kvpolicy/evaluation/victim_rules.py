"""What other rules for victims among equals would have cost, estimated from a log in which some were left to chance.

A record is one choice: a request that others were displaced for. The action is the sequence of its victims, which is
the start of the order in which a rule would take them. c is what displacing them cost, the sum of their engine seconds;
p the recorded probability of that sequence. The weight is 1 / p where the rule would have displaced the same ones in
the same sequence, and 0 elsewhere. As in :mod:`.estimators` a choice with an unknown cost is represented by the others.

The estimand is the mean cost per choice *in the situations that the logging order brought about*. Who is displaced
later, and for how long a victim is away, is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np

from kvpolicy.arrays import Floats
from kvpolicy.evaluation import bounds
from kvpolicy.evaluation.bounds import Resamples, Terms
from kvpolicy.evaluation.diagnostics import MAX_UNKNOWN, MIN_CLUSTERS, MIN_EFFECTIVE, WEIGHT_LIMITS
from kvpolicy.evaluation.displacements import costs_by_victim, has_price
from kvpolicy.evaluation.estimators import ips_terms, weighted
from kvpolicy.trace import Trace

Row = Mapping[str, Any]
Rule = Callable[[Row, int], tuple[float, ...]]
"""Whoever has the lowest value is displaced first, among those of equal rank; the first comer, where values are equal.
From a candidate and the block size."""
RULES: Mapping[str, Rule] = {
    "last": lambda candidate, block_size: (-candidate["number"],),
    "least-computed": lambda candidate, block_size: (candidate["computed_tokens"],),
    "cheapest": lambda candidate, block_size: (
        candidate["price_s"] / max(1, -(-candidate["computed_tokens"] // block_size)),
        candidate["computed_tokens"],
    ),
}
"""The rules of orders that ship, from what a trace says of a candidate; see :data:`kvpolicy.order.rules.VICTIM_RULES`.
"""
NEEDS_PRICES = ("cheapest",)
SAME = 1e-9
"""Weights that differ by less are equal: their mean has no interval."""


@dataclass(frozen=True, slots=True)
class VictimEstimate:
    """Estimate of a rule's mean cost per choice, seconds, with its 95% interval."""

    estimator: str
    value_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True)
class VictimRule:
    """Result for one rule: estimates, or the reasons why there are none."""

    rule: str
    choices: int
    agreed: int
    """Choices in which the rule would have displaced the same requests."""
    effective_share: float
    """Effective sample size, as a share of the choices."""
    estimates: tuple[VictimEstimate, ...]
    refused: tuple[str, ...]

    def lines(self) -> list[str]:
        if self.refused:
            return [f"victims {self.rule}: refused", *(f"  because {why}" for why in self.refused)]
        lines = [
            f"victims {self.rule}: agrees with {self.agreed} of {self.choices} choices, effective sample "
            f"{self.effective_share:.1%} of them"
        ]
        return lines + [
            f"  {one.estimator:<18} {1e3 * one.value_s:>9.4g} ms  [{1e3 * one.low_s:.4g}, {1e3 * one.high_s:.4g}]"
            for one in self.estimates
        ]


@dataclass(frozen=True, slots=True)
class _Choice:
    """A row of ``displacements`` with the cost of its victims, and the size of a block."""

    row: Row
    cost_s: float
    block_size: int

    def would_take(self, rule: Rule) -> list[Row]:
        """The victims by ``rule``, in its sequence."""
        row = self.row
        # Candidates are recorded in the sequence in which they were drawn, so that it must not decide between equals.
        candidates = sorted(
            row["candidates"],
            key=lambda one: (*(-value for value in one["rank"]), *rule(one, self.block_size), one["number"]),
        )
        taken: list[Row] = []
        free, places = row["free_blocks"], row["free_places"]
        for candidate in candidates:
            if free >= row["need_blocks"] and places >= row["need_places"]:
                break
            taken.append(candidate)
            free += candidate["freed_blocks"]
            places += 1
        return taken

    @property
    def taken(self) -> list[Row]:
        return list(self.row["candidates"][: self.row["taken"]])


def judge_rules(traces: Iterable[Trace], seed: int = 0) -> tuple[VictimRule, ...]:
    """Judge all rules on logs whose costs are attributed; none where nothing was left to chance.

    Left out are choices of which not all candidates are recorded, and those whose probability is not known.
    """
    choices = [choice for trace in traces for choice in _choices(trace)]
    if all(choice.row["probability"] >= 1.0 for choice in choices):
        return ()
    return tuple(_judged(name, rule, choices, seed) for name, rule in RULES.items())


def _choices(trace: Trace) -> Iterable[_Choice]:
    cost_of = costs_by_victim(trace)
    for row in trace.rows("displacements"):
        if row["left_out"] or not 0.0 < row["probability"] <= 1.0:
            continue
        victims = row["candidates"][: row["taken"]]
        costs_s = [cost_of.get((row["core"], row["step"], victim["request"]), nan) for victim in victims]
        yield _Choice(row, sum(costs_s), trace.headers[row["core"]].block_size)


def _judged(name: str, rule: Rule, choices: Sequence[_Choice], seed: int) -> VictimRule:
    cost_s = np.array([choice.cost_s for choice in choices])
    known = ~np.isnan(cost_s)
    priced = all(has_price(one) for choice in choices for one in choice.row["candidates"])
    refused = _log_refusals(choices, float(known.mean()))
    if name in NEEDS_PRICES and not priced:
        refused.append("the log's policy predicted no prices")
    if refused:
        return VictimRule(name, len(choices), 0, 0.0, (), tuple(refused))
    would = [choice.would_take(rule) for choice in choices]
    agrees = np.array([_numbers(taken) == _numbers(one.taken) for taken, one in zip(would, choices, strict=True)])
    probability = np.array([choice.row["probability"] for choice in choices])
    weight = np.where(agrees & known, 1.0 / (probability * known.mean()), 0.0)
    resamples = Resamples.of(_clusters(choices), np.random.default_rng(seed))
    share = float(weight.sum()) ** 2 / (float((weight**2).sum()) or 1.0) / len(choices)
    refused = _support_refusals(weight, share, resamples)
    terms = {"ips": Terms(ips_terms(weight, cost_s)), "snips": Terms(ips_terms(weight, cost_s), weight)}
    if priced:
        would_s = np.array([_price_s(taken) for taken in would])
        taken_s = np.array([_price_s(choice.taken) for choice in choices])
        terms["dr"] = Terms(would_s + weighted(weight, cost_s - taken_s))
    estimates = () if refused else tuple(_estimate(key, one, resamples) for key, one in terms.items())
    return VictimRule(name, len(choices), int(agrees.sum()), share, estimates, tuple(refused))


def _log_refusals(choices: Sequence[_Choice], known_share: float) -> list[str]:
    refused = []
    clusters = len({(choice.row["core"], choice.row["step"]) for choice in choices})
    if clusters < MIN_CLUSTERS:
        refused.append(f"the log displaces in {clusters} steps, fewer than {MIN_CLUSTERS}")
    if known_share < 1.0 - MAX_UNKNOWN:
        refused.append(f"the costs of {1.0 - known_share:.1%} of the choices are unknown, over {MAX_UNKNOWN:.0%}")
    return refused


def _support_refusals(weight: Floats, share: float, resamples: Resamples) -> list[str]:
    refused = []
    if share < MIN_EFFECTIVE:
        refused.append(f"the effective sample is {share:.1%} of the choices, under {MIN_EFFECTIVE:.0%}")
    same = float(np.ptp(weight)) < SAME
    low, high = (float(weight.mean()),) * 2 if same else bounds.bootstrap(Terms(weight), resamples)
    if low < WEIGHT_LIMITS[0] or high > WEIGHT_LIMITS[1]:
        refused.append(f"the mean weight's interval is [{low:.3g}, {high:.3g}], not within {WEIGHT_LIMITS}")
    return refused


def _estimate(name: str, terms: Terms, resamples: Resamples) -> VictimEstimate:
    return VictimEstimate(name, terms.mean(), *bounds.bootstrap(terms, resamples))


def _clusters(choices: Sequence[_Choice]) -> Any:
    """Choices of one step are one draw."""
    steps: dict[tuple[str, int], int] = {}
    return np.array([steps.setdefault((one.row["core"], one.row["step"]), len(steps)) for one in choices])


def _numbers(candidates: Sequence[Row]) -> list[int]:
    return [candidate["number"] for candidate in candidates]


def _price_s(candidates: Sequence[Row]) -> float:
    return float(sum(candidate["price_s"] for candidate in candidates))
