"""Off-policy estimators, each as one number per record; a mean and its interval follow in :mod:`.bounds`.

What is estimated is the mean attributed cost, per decision, of a policy *in the states that the logging policy brought
about*. What an action does to states to come is not in it; that takes a simulator.

Symbols: c is the measured cost of the chosen action a, p its logged probability, t(.) the target policy's
probabilities, q(.) a direct model's predicted costs. w = t(a) / p is the importance weight; where a share s of the
records of a have a known cost, it is t(a) / (p s) on those and 0 on the others (:mod:`.decision_log`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np

from kvpolicy.arrays import Flags, Floats, Ints
from kvpolicy.evaluation import estimation
from kvpolicy.evaluation.bounds import Terms, spread_of_mean

TAUS = (0.5, 0.75, 0.9, 0.99)
"""Quantiles of the positive weights that are tried as SWITCH's threshold, besides none at all."""
LAMBDAS = (0.1, 1.0, 10.0, 100.0)
"""Times the mean squared weight: tried as shrinkage, besides none at all."""
MISS_BINS = 10
NORMAL_95 = 1.959964
"""0.975 quantile of the standard normal."""


@dataclass(frozen=True)
class Records:
    """What estimators see of n records, K actions."""

    target: Floats
    """(n, K)"""
    probability: Floats
    """(n, K) as logged."""
    weight: Floats
    """(n,) 0 where the cost is not known."""
    cost_s: Floats
    """(n,) NaN where it is not known."""
    action: Ints
    """(n,)"""
    q_s: Floats
    """(n, K) by a direct model of all records."""
    crossed_q_s: Floats
    """(n, K) by one that has not seen the record's fold."""
    implied_weight: Floats
    """(n,) see :meth:`kvpolicy.evaluation.direct_model.Design.implied_weights`."""
    group: Ints
    """(n,) records that vary together."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """Terms of an estimator, and the hyper-parameter that was chosen for it, None where it has none."""

    terms: Terms
    tuning: float | None = None
    bias_s: float = 0.0
    """An upper bound on the size of the bias that the hyper-parameter lets in."""


def importance_weights(target: Floats, probability: Floats, action: Ints, known: Flags, share: Floats) -> Floats:
    """(n,) t(a) / (p s(a)) where the cost is known, 0 elsewhere. Logged probabilities of chosen actions are above 0."""
    row = np.arange(len(action))
    weight = np.zeros(len(action))
    a, row = action[known], row[known]
    weight[known] = target[row, a] / (probability[row, a] * share[a])
    return weight


# ---- one formula each ----


def dm_terms(target: Floats, q_s: Floats) -> Floats:
    """sum_a t(a) q(a): the direct method (Beygelzimer and Langford, KDD 2009, as the regression approach)."""
    return np.asarray((target * q_s).sum(axis=1))


def ips_terms(weight: Floats, cost_s: Floats) -> Floats:
    """w c (Horvitz and Thompson, JASA 1952). Over the mean of w it is SNIPS (Swaminathan and Joachims, NIPS 2015)."""
    return weighted(weight, cost_s)


def dr_terms(target: Floats, q_s: Floats, weight: Floats, cost_s: Floats, action: Ints) -> Floats:
    """sum_a t(a) q(a) + w (c - q(a)) (Dudik, Langford, Li, ICML 2011)."""
    return dm_terms(target, q_s) + weighted(weight, cost_s - chosen(q_s, action))


def switch_weights(weight: Floats, tau: float) -> Floats:
    """w where w <= tau, else 0, which leaves the direct model alone there (Wang, Agarwal, Dudik, ICML 2017)."""
    return np.where(weight <= tau, weight, 0.0)


def shrunk_weights(weight: Floats, lam: float) -> Floats:
    """lam w / (w^2 + lam), DRos; w itself for lam = inf, 0 for lam = 0 (Su et al., ICML 2020, optimistic shrinkage)."""
    if lam == inf:
        return weight
    return np.asarray(weight * lam / (weight**2 + lam), np.float64) if lam > 0 else np.zeros(len(weight))


def weighted(weight: Floats, value: Floats) -> Floats:
    """Their product; 0 where the weight is, whatever the value: it may be unknown there."""
    return np.asarray(weight * np.where(weight > 0, value, 0.0))


def chosen(values: Floats, action: Ints) -> Floats:
    """Of (n, K) values, those of the chosen actions."""
    return np.asarray(values[np.arange(len(action)), action])


# ---- estimators by name ----


def dm(one: Records) -> Tuned:
    """With what each record's cost did to the fit, which is 0 in the mean: the interval knows that q was learned."""
    owed = one.implied_weight * np.where(one.implied_weight == 0, 0.0, one.cost_s - chosen(one.q_s, one.action))
    return Tuned(Terms(dm_terms(one.target, one.q_s) + owed - owed.mean()))


def ips(one: Records) -> Tuned:
    return Tuned(Terms(ips_terms(one.weight, one.cost_s)))


def snips(one: Records) -> Tuned:
    return Tuned(Terms(ips_terms(one.weight, one.cost_s), one.weight))


def dr(one: Records) -> Tuned:
    return Tuned(Terms(dr_terms(one.target, one.q_s, one.weight, one.cost_s, one.action)))


def cross_fitted_dr(one: Records) -> Tuned:
    """DR with predictions of records unseen in fitting (Chernozhukov et al., Econometrics Journal 2018)."""
    return Tuned(Terms(dr_terms(one.target, one.crossed_q_s, one.weight, one.cost_s, one.action)))


def switch_dr(one: Records) -> Tuned:
    """Its threshold from quantiles of the weights, by the least upper bound on the MSE."""
    positive = one.weight[one.weight > 0]
    taus = [*map(float, np.quantile(positive, TAUS)), inf] if len(positive) else [inf]
    return _min_mse(one, taus, switch_weights)


def dros(one: Records) -> Tuned:
    """Its shrinkage by the least upper bound on the MSE."""
    mean_square = float((one.weight**2).mean())
    return _min_mse(one, [*(times * mean_square for times in LAMBDAS), inf], shrunk_weights)


ESTIMATORS: Mapping[str, Callable[[Records], Tuned]] = dict(
    zip(estimation.ESTIMATORS, (dm, ips, snips, dr, cross_fitted_dr, switch_dr, dros), strict=True)
)


def _min_mse(one: Records, tried: Sequence[float], changed: Callable[[Floats, float], Floats]) -> Tuned:
    """The hyper-parameter with the least upper bound on the MSE (after Su et al., ICML 2020, section 5).

    Variance of the mean by groups, plus the square of the lesser of two 95% bounds on the bias that changing the
    weights lets in, E[(w' - w)(c - q(a))]: what the records themselves say of it; and the direct model's worst
    systematic miss (:func:`worst_miss`) times the share of the policy's probability that is left to it, after Wang,
    Agarwal, Dudik (ICML 2017).
    """
    base = dm_terms(one.target, one.crossed_q_s)
    missed = weighted(np.where(one.weight > 0, 1.0, 0.0), one.cost_s - chosen(one.crossed_q_s, one.action))
    worst_s, left_to_model = worst_miss(one), _left_to_model(one)
    best: tuple[float, Tuned] | None = None
    for parameter in tried:
        weight = changed(one.weight, parameter)
        terms = base + weight * missed
        bias_s = 0.0
        if parameter != inf:
            left_out = (weight - one.weight) * missed
            bias_s = abs(float(left_out.mean())) + NORMAL_95 * spread_of_mean(left_out, one.group)
            bias_s = min(bias_s, worst_s * left_to_model(changed, parameter))
        bound = spread_of_mean(terms, one.group) ** 2 + bias_s**2
        if best is None or bound < best[0]:
            best = bound, Tuned(Terms(terms), parameter, bias_s)
    if best is None:
        raise ValueError("no hyper-parameter to try")
    return best[1]


def worst_miss(one: Records) -> float:
    """How far the direct model is off where it is off most, seconds: the largest upper bound on |mean (c - q)| over
    tenths of the records of an action, by predicted cost. Where weights are heavy it is taken to miss by no more."""
    worst_s = 0.0
    known = ~np.isnan(one.cost_s)
    for action in range(one.target.shape[1]):
        mine = np.flatnonzero(known & (one.action == action))
        q_s = one.crossed_q_s[mine, action]
        for part in np.array_split(mine[np.argsort(q_s)], MISS_BINS):
            if len(part) < 2:
                continue
            missed = one.cost_s[part] - one.crossed_q_s[part, action]
            bound_s = abs(float(missed.mean())) + NORMAL_95 * float(missed.std(ddof=1)) / sqrt(len(part))
            worst_s = max(worst_s, bound_s)
    return worst_s


def _left_to_model(one: Records) -> Callable[[Callable[[Floats, float], Floats], float], float]:
    """Of changed weights, the share of the policy's probability for which the direct model stands in: the mean of
    sum_a t(a) |1 - w'(a) / w(a)|."""
    counted = (one.probability > 0) & (one.target > 0)
    share = one.target[counted]
    weight = share / one.probability[counted]
    n = len(one.target)

    def left(changed: Callable[[Floats, float], Floats], parameter: float) -> float:
        return float(share @ np.abs(1 - changed(weight, parameter) / weight)) / n

    return left
