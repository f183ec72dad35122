"""What an option costs on average over all situations of a log, told twice: by the model, and doubly robustly.

The direct method answers by the model alone, ``mean m(x, a)``. The doubly robust answer adds what the records of option
``a`` say of the model's misses, each for as many situations as it stands for (Robins, Rotnitzky and Zhao, 1994; Dudik,
Langford and Li, 2011):

    mean of  m(x_i, a) + [a_i = a] / p_i x (y_i - m(x_i, a))

It is right where the logged probabilities are or the model is. ``m`` is fitted without the record's own request. Where
the two answers differ by more than chance, the model is scaled so that it gives the second one. Where an option had no
chance at all the model stands alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import numpy as np
from scipy.stats import t as student

CONFIDENCE = 0.95


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
        raise ValueError(f"terms of {len(names)} requests: at least 2 are needed")
    place = {name: number for number, name in enumerate(names)}
    cluster = np.array([place[term.request] for term in terms])
    values = np.array([term.robust_s for term in terms])
    mean = float(values.mean())
    sums = np.bincount(cluster, values - mean, len(names))
    error = float(np.sqrt(len(names) / (len(names) - 1) * np.sum(sums**2))) / len(terms)
    reach = float(student.ppf((1 + CONFIDENCE) / 2, len(names) - 1)) * error
    direct = float(np.mean([term.predicted_s for term in terms]))
    return Average(direct, mean, mean - reach, mean + reach)
