"""Importance weights of logged records, and doubly robust means of a model's costs.

A record with logged probability p stands for 1 / p situations (importance weighting). With weights a law is the best
fit over all situations and not only over those in which the logging policy preferred the option; that matters where no
law is quite right. Weights are clipped at :data:`MAX_WEIGHT`, and the report counts the clipped ones.

The direct estimate of an option's mean cost uses the model alone, ``mean m(x, a)``. The doubly robust estimate adds the
model's errors on the records of option ``a``, weighted (Robins, Rotnitzky and Zhao, 1994; Dudik, Langford and Li,
2011):

    mean of  m(x_i, a) + [a_i = a] / p_i x (y_i - m(x_i, a))

It is consistent if the logged probabilities or the model are right. ``m`` is fitted without the record's own request.
Situations in which an option had probability 0 are predicted by the model alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

import numpy as np
from scipy.stats import t as student

from kvpolicy.datasets.examples import Example
from kvpolicy.datasets.logs import Record
from kvpolicy.errors import InputError

MAX_WEIGHT = 10.0
AVERAGE_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Term:
    """One situation of the log, and one option."""

    request: str
    """Terms of one request are not independent."""
    predicted_s: float
    """Prediction of a model fitted without this request."""
    weight: float
    """Number of situations the record stands for, clipped; 0 where another option was taken."""
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
        """Factor to scale the model by; 1 if ``direct_s`` lies within the interval, or a mean is not above 0."""
        if self.low_s <= self.direct_s <= self.high_s or self.robust_s <= 0 or self.direct_s <= 0:
            return 1.0
        return self.robust_s / self.direct_s

    @property
    def log_factor(self) -> float:
        return log(self.factor)


def average(terms: Sequence[Term]) -> Average:
    """Mean over the terms, with Student's t interval of the linearised mean; clusters are requests, of any size.

    Raises InputError for terms of fewer than two requests: one request gives no interval.
    """
    requests = sorted({term.request for term in terms})
    if len(requests) < 2:
        raise InputError(f"terms of {len(requests)} requests: at least 2 are needed")
    request_number = {name: number for number, name in enumerate(requests)}
    cluster = np.array([request_number[term.request] for term in terms])
    values = np.array([term.robust_s for term in terms])
    mean_s = float(values.mean())
    sums = np.bincount(cluster, values - mean_s, len(requests))
    error_s = float(np.sqrt(len(requests) / (len(requests) - 1) * np.sum(sums**2))) / len(terms)
    half_width_s = float(student.ppf((1 + AVERAGE_CONFIDENCE) / 2, len(requests) - 1)) * error_s
    direct_s = float(np.mean([term.predicted_s for term in terms]))
    return Average(direct_s, mean_s, mean_s - half_width_s, mean_s + half_width_s)


def weight_of(record: Record) -> float:
    """Number of situations a record stands for, clipped."""
    return min(1.0 / record.chance, MAX_WEIGHT)


def clipped(records: Sequence[Record]) -> int:
    """Number of records whose weight is clipped."""
    return sum(1.0 / record.chance > MAX_WEIGHT for record in records)


def weighted_example(record: Record) -> Example:
    """The record's example, which counts as the situations that the record stands for."""
    return replace(record.example, weight=weight_of(record))
