"""The best rule by length alone: swap from some number of computed tokens on. Training and evaluation compare with it.

A cost model that is no better than this rule has learned nothing that a single number could not hold.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import copysign, floor, sqrt
from statistics import variance
from typing import Any

import numpy as np

from kvpolicy.arrays import Floats
from kvpolicy.datasets.profiles import State
from kvpolicy.errors import InputError
from kvpolicy.events import KINDS, Kind
from kvpolicy.stats import student_interval
from kvpolicy.stored_values import number_at, object_at, text_at, whole_at

PREEMPTION = "preemption"
BEST_THRESHOLD = "best threshold"
"""Name of the rule in tables."""


@dataclass(frozen=True, slots=True)
class LengthRule:
    """Swap a victim of ``swap_from`` computed tokens or more: 0 means always, None never."""

    swap_from: int | None

    @property
    def policy(self) -> str:
        """Name of the policy that decides so."""
        if self.swap_from is None:
            return "always-recompute"
        return f"threshold:{self.swap_from}" if self.swap_from else "always-swap"

    def option(self, computed_tokens: float) -> Kind:
        return "swap" if self.swap_from is not None and computed_tokens >= self.swap_from else "recompute"

    def cost_s(self, state: State) -> float:
        return state.mean_s[self.option(state.computed_tokens)]


def best_threshold(states: Sequence[State]) -> LengthRule:
    """Return the rule with the lowest total cost over ``states``, of equal ones the one that swaps most.

    Candidates are always, never, and every length measured. The difference of a state's options counts as far as it
    exceeds its standard error: else a single disturbed window could decide, and models, whose fits are robust, would be
    compared with a rule that is worse than it need be. Raises InputError for no states.
    """
    if not states:
        raise InputError("no states to choose a threshold on")
    return best_length_rule(
        np.array([state.computed_tokens for state in states], np.float64),
        np.array([_significant_difference_s(state) for state in states], np.float64),
    )


def best_length_rule(computed_tokens: Floats, extra_s: Floats) -> LengthRule:
    """Return the rule with the lowest total cost, of equal ones the one that swaps most.

    ``extra_s``: by situation, the cost of swap less that of recompute, or an unbiased estimate of it, as the doubly
    robust one of a log. Candidates are always, never, and every length.
    """
    order = np.argsort(computed_tokens, kind="stable")
    lengths, extra_s = computed_tokens[order], extra_s[order]
    # extra_from_s[i]: cost above that of never swapping if all states from the i-th on are swapped.
    extra_from_s = np.append(np.cumsum(extra_s[::-1])[::-1], 0.0)
    candidates = [0, *sorted({floor(length) for length in lengths if length >= 1})]
    totals_s = [*extra_from_s[np.searchsorted(lengths, candidates)], 0.0]
    best = int(np.argmin(totals_s))
    return LengthRule(candidates[best] if best < len(candidates) else None)


def _significant_difference_s(state: State) -> float:
    """Cost of swap less that of recompute, nearer to 0 by the standard error where options were measured repeatedly."""
    difference_s = state.mean_s["swap"] - state.mean_s["recompute"]
    costs = [state.costs_s(kind) for kind in KINDS]
    if min(map(len, costs)) < 2:
        return difference_s
    error_s = sqrt(sum(variance(values) / len(values) for values in costs))
    return copysign(max(0.0, abs(difference_s) - error_s), difference_s)


@dataclass(frozen=True, slots=True)
class Difference:
    """Cost of a policy less that of the best threshold in the same states: seconds per state, with a 95% interval.

    Of a log, states are preemptions.
    """

    policy: str
    mean_s: float
    low_s: float
    high_s: float
    states: int
    unit: str = "state"

    @property
    def verdict(self) -> str:
        if self.mean_s == self.low_s == self.high_s == 0.0:
            return "no better than the threshold: it costs the same in every state"
        if self.high_s < 0.0:
            return "better than the threshold"
        return "worse than the threshold" if self.low_s > 0.0 else "no better than the threshold, within noise"

    def stored(self, rule: LengthRule) -> dict[str, Any]:
        """For the card of the cost model that was compared: its ``held_out.against_threshold``."""
        return {"rule": rule.policy, **asdict(self)}

    @classmethod
    def from_card(cls, held_out: Mapping[str, Any]) -> tuple[str, Difference] | None:
        """The rule's policy, and the comparison; None for a card of a version that did not store it. Raises InputError,
        naming the field, for a value that is none."""
        if "against_threshold" not in held_out:
            return None
        values = object_at(held_out, "against_threshold")
        mean_s, low_s, high_s = (number_at(values, name) for name in ("mean_s", "low_s", "high_s"))
        states, unit = whole_at(values, "states"), text_at(values, "unit")
        found = cls(text_at(values, "policy"), mean_s, low_s, high_s, states, unit)
        return text_at(values, "rule"), found

    def text(self) -> str:
        mean, low, high = (f"{value * 1e3:.3f}" for value in (self.mean_s, self.low_s, self.high_s))
        return f"{self.policy} less the {BEST_THRESHOLD}: {mean} ms [{low}, {high}] per {self.unit}: {self.verdict}"


def difference(policy: str, costs_s: Sequence[float], threshold_costs_s: Sequence[float]) -> Difference:
    """Compare a policy with the best threshold, state by state. Needs two states or more."""
    pairs = zip(costs_s, threshold_costs_s, strict=True)
    mean, low, high = student_interval([cost - threshold for cost, threshold in pairs])
    return Difference(policy, mean, low, high, len(costs_s))


def clustered_difference(
    policy: str, differences_s: Sequence[float], clusters: Sequence[Hashable]
) -> Difference | None:
    """Compare a policy with the best threshold on a log, preemption by preemption.

    ``differences_s``: estimates of what the policy costs less what the rule costs. ``clusters``: preemptions of a
    cluster, as of one request, are not independent; the interval is Student's over the linearised sums of clusters.
    None for fewer than two clusters.
    """
    number = {name: index for index, name in enumerate(dict.fromkeys(clusters))}
    if len(number) < 2:
        return None
    cluster = np.array([number[name] for name in clusters])
    values = np.array(differences_s, np.float64)
    mean_s = float(values.mean())
    sums = np.bincount(cluster, values - mean_s) * len(number) / len(values)
    mean, low, high = student_interval((sums + mean_s).tolist())
    return Difference(policy, mean, low, high, len(values), PREEMPTION)
