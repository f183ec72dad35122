"""Off-policy estimators: each gives one number per record. Mean and interval are computed in :mod:`.bounds`.

The estimand is the mean attributed cost per decision of a policy *in the states that the logging policy brought about*.
It does not include the effect of an action on later states, which needs a simulator.

Symbols: c is the measured cost of the chosen action a, p its logged probability, t(.) the target policy's
probabilities, q(.) the costs predicted by a direct model. w = t(a) / p is the importance weight. If only a share s of
the records of a have a known cost, it is t(a) / (p s) on these and 0 on the others (:mod:`.decision_log`).
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
"""Quantiles of the positive weights: candidates for SWITCH's threshold, besides no threshold."""
LAMBDAS = (0.1, 1.0, 10.0, 100.0)
"""Multiples of the mean squared weight: candidates for DRos's shrinkage, besides no shrinkage."""
MISS_BINS = 10
NORMAL_95 = 1.959964
"""0.975 quantile of the standard normal."""


@dataclass(frozen=True)
class Records:
    """Inputs of the estimators: n records, K actions."""

    target: Floats
    """(n, K) the target policy's probabilities."""
    probability: Floats
    """(n, K) as logged."""
    weight: Floats
    """(n,) importance weight; 0 where the cost is unknown."""
    cost_s: Floats
    """(n,) NaN where unknown."""
    action: Ints
    """(n,)"""
    q_s: Floats
    """(n, K) costs by a direct model fitted to all records."""
    cross_fitted_q_s: Floats
    """(n, K) costs by a direct model fitted without the record's fold."""
    implied_weight: Floats
    """(n,) see :meth:`kvpolicy.evaluation.direct_model.Design.implied_weights`."""
    group: Ints
    """(n,) group of each record; groups are independent."""


@dataclass(frozen=True, slots=True)
class TunedTerms:
    """Terms of an estimator, with the chosen hyper-parameter, None if it has none."""

    terms: Terms
    tuning: float | None = None
    bias_s: float = 0.0
    """Upper bound on the absolute bias that the hyper-parameter introduces."""


def importance_weights(target: Floats, probability: Floats, action: Ints, known: Flags, share: Floats) -> Floats:
    """(n,) t(a) / (p s(a)) where the cost is known, else 0. Logged probabilities of chosen actions must be above 0."""
    row = np.arange(len(action))
    weight = np.zeros(len(action))
    a, row = action[known], row[known]
    weight[known] = target[row, a] / (probability[row, a] * share[a])
    return weight


# ---- formulas ----


def dm_terms(target: Floats, q_s: Floats) -> Floats:
    """sum_a t(a) q(a): the direct method (Beygelzimer and Langford, KDD 2009, as the regression approach)."""
    return np.asarray((target * q_s).sum(axis=1))


def ips_terms(weight: Floats, cost_s: Floats) -> Floats:
    """w c (Horvitz and Thompson, JASA 1952). Divided by the mean of w: SNIPS (Swaminathan and Joachims, NIPS 2015)."""
    return weighted(weight, cost_s)


def dr_terms(target: Floats, q_s: Floats, weight: Floats, cost_s: Floats, action: Ints) -> Floats:
    """sum_a t(a) q(a) + w (c - q(a)) (Dudik, Langford, Li, ICML 2011)."""
    return dm_terms(target, q_s) + weighted(weight, cost_s - chosen(q_s, action))


def switch_weights(weight: Floats, tau: float) -> Floats:
    """w where w <= tau, else 0, where only the direct model counts (Wang, Agarwal, Dudik, ICML 2017)."""
    return np.where(weight <= tau, weight, 0.0)


def shrunk_weights(weight: Floats, lam: float) -> Floats:
    """lam w / (w^2 + lam), DRos; w itself for lam = inf, 0 for lam = 0 (Su et al., ICML 2020, optimistic shrinkage)."""
    if lam == inf:
        return weight
    return np.asarray(weight * lam / (weight**2 + lam), np.float64) if lam > 0 else np.zeros(len(weight))


def weighted(weight: Floats, value: Floats) -> Floats:
    """weight * value; 0 where the weight is 0, even if the value is NaN."""
    return np.asarray(weight * np.where(weight > 0, value, 0.0))


def chosen(values: Floats, action: Ints) -> Floats:
    """(n,) values of the chosen actions, from (n, K) values."""
    return np.asarray(values[np.arange(len(action)), action])


# ---- estimators by name ----


def dm(records: Records) -> TunedTerms:
    """DM. The influence of each record's cost on the fit is added, with mean 0, so that the interval includes the
    variance of q."""
    correction = records.implied_weight * np.where(
        records.implied_weight == 0, 0.0, records.cost_s - chosen(records.q_s, records.action)
    )
    return TunedTerms(Terms(dm_terms(records.target, records.q_s) + correction - correction.mean()))


def ips(records: Records) -> TunedTerms:
    return TunedTerms(Terms(ips_terms(records.weight, records.cost_s)))


def snips(records: Records) -> TunedTerms:
    return TunedTerms(Terms(ips_terms(records.weight, records.cost_s), records.weight))


def dr(records: Records) -> TunedTerms:
    return TunedTerms(Terms(dr_terms(records.target, records.q_s, records.weight, records.cost_s, records.action)))


def cross_fitted_dr(records: Records) -> TunedTerms:
    """DR with predictions by models fitted without the record (Chernozhukov et al., Econometrics Journal 2018)."""
    return TunedTerms(
        Terms(dr_terms(records.target, records.cross_fitted_q_s, records.weight, records.cost_s, records.action))
    )


def switch_dr(records: Records) -> TunedTerms:
    """SWITCH-DR; the threshold is the quantile of the weights with the smallest upper bound on the MSE."""
    positive = records.weight[records.weight > 0]
    taus = [*map(float, np.quantile(positive, TAUS)), inf] if len(positive) else [inf]
    return _min_mse(records, taus, switch_weights)


def dros(records: Records) -> TunedTerms:
    """DRos; the shrinkage is the candidate with the smallest upper bound on the MSE."""
    mean_square = float((records.weight**2).mean())
    return _min_mse(records, [*(times * mean_square for times in LAMBDAS), inf], shrunk_weights)


ESTIMATORS: Mapping[str, Callable[[Records], TunedTerms]] = dict(
    zip(estimation.ESTIMATORS, (dm, ips, snips, dr, cross_fitted_dr, switch_dr, dros), strict=True)
)


def _min_mse(
    records: Records, parameters: Sequence[float], change_weights: Callable[[Floats, float], Floats]
) -> TunedTerms:
    """Choose the hyper-parameter with the smallest upper bound on the MSE (after Su et al., ICML 2020, section 5).

    The bound is the variance of the mean by groups, plus the square of the bias that changing the weights introduces,
    E[(w' - w)(c - q(a))]. The bias is the smaller of two 95% bounds: one estimated from the records; and the direct
    model's largest systematic error (:func:`worst_miss`) times the share of the policy's probability that is left to
    the direct model, after Wang, Agarwal, Dudik (ICML 2017).

    ``change_weights``: from weights and a hyper-parameter to changed weights.
    """
    base = dm_terms(records.target, records.cross_fitted_q_s)
    errors = weighted(
        np.where(records.weight > 0, 1.0, 0.0), records.cost_s - chosen(records.cross_fitted_q_s, records.action)
    )
    worst_s, model_share = worst_miss(records), _model_share(records)
    best: tuple[float, TunedTerms] | None = None
    for parameter in parameters:
        weight = change_weights(records.weight, parameter)
        terms = base + weight * errors
        bias_s = 0.0
        if parameter != inf:
            removed = (weight - records.weight) * errors
            bias_s = abs(float(removed.mean())) + NORMAL_95 * spread_of_mean(removed, records.group)
            bias_s = min(bias_s, worst_s * model_share(change_weights, parameter))
        bound = spread_of_mean(terms, records.group) ** 2 + bias_s**2
        if best is None or bound < best[0]:
            best = bound, TunedTerms(Terms(terms), parameter, bias_s)
    if best is None:
        raise ValueError("no hyper-parameter to try")
    return best[1]


def worst_miss(records: Records) -> float:
    """Largest systematic error of the direct model, seconds: the maximum upper bound on |mean (c - q)| over tenths of
    an action's records by predicted cost. Its error where weights are large is assumed to be no larger."""
    worst_s = 0.0
    known = ~np.isnan(records.cost_s)
    for action in range(records.target.shape[1]):
        rows = np.flatnonzero(known & (records.action == action))
        q_s = records.cross_fitted_q_s[rows, action]
        for part in np.array_split(rows[np.argsort(q_s)], MISS_BINS):
            if len(part) < 2:
                continue
            errors = records.cost_s[part] - records.cross_fitted_q_s[part, action]
            bound_s = abs(float(errors.mean())) + NORMAL_95 * float(errors.std(ddof=1)) / sqrt(len(part))
            worst_s = max(worst_s, bound_s)
    return worst_s


def _model_share(records: Records) -> Callable[[Callable[[Floats, float], Floats], float], float]:
    """A function from changed weights to the share of the policy's probability that is left to the direct model: the
    mean of sum_a t(a) |1 - w'(a) / w(a)|."""
    possible = (records.probability > 0) & (records.target > 0)
    share = records.target[possible]
    weight = share / records.probability[possible]
    n = len(records.target)

    def share_of(change_weights: Callable[[Floats, float], Floats], parameter: float) -> float:
        return float(share @ np.abs(1 - change_weights(weight, parameter) / weight)) / n

    return share_of
