"""The step-time model (d0): how long an engine step of a given composition takes undisturbed, with no preemption.

The fit is in :mod:`kvpolicy.attribution.step_time_fit`, so that a server can price its steps without importing the
code that reads traces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvpolicy.arrays import Floats, Ints
from kvpolicy.errors import InputError
from kvpolicy.stored_values import is_number, list_at, number_at, text_at, value_at, whole_at

PARTS = ("scheduled_tokens", "decode_requests", "kv_read_tokens", "chunk_context")
"""Composition of a step, as far as its duration depends on it: columns of ``steps``."""
AFTERMATH_STEPS = 2
"""Steps slowed down by cold caches after a prefill: on a CPU the first took 50% longer, the second 20%."""
FULL_AFTERMATH_TOKENS = 256
"""A chunk of this many tokens leaves the caches as cold as any longer one."""
NEIGHBOURS = 16
"""Undisturbed steps from which the machine's current speed is estimated, half before and half after a step."""


@dataclass(frozen=True, slots=True)
class HeldOutError:
    """Error of predictions for steps that the model was not fitted on."""

    mean_relative: float
    """Mean of |predicted - measured| / measured."""
    mean_s: float
    """Mean of |predicted - measured|, seconds: the noise floor of every attributed step."""
    bias_s: float
    """Mean of measured - predicted, seconds."""


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Seconds of an undisturbed step, linear in its parts, with no negative coefficient."""

    fixed_s: float
    per_part_s: tuple[float, ...]
    """Seconds per unit of each of :data:`PARTS`, then per full aftermath of the first and second step before."""
    fitted_on: str
    """``core NAME``, or ``N cores`` if one core had too few undisturbed steps."""
    steps: int
    error: HeldOutError

    def predict(self, parts: Floats, numbers: Ints | None = None) -> Floats:
        """Seconds for each row of ``parts``, shape (steps, 4) in the order of :data:`PARTS`; 0 for an empty step.

        Rows are in the order of the steps, because a step's duration depends on the steps right before it.
        ``numbers``: see :func:`with_aftermath`.
        """
        design = with_aftermath(parts, numbers)
        return np.where(parts[:, 0] > 0, self.fixed_s + design @ np.asarray(self.per_part_s), 0.0)

    def price(self, parts: Floats) -> Floats:
        """Seconds that the parts alone add, without the aftermath of earlier steps."""
        return np.asarray(parts @ np.asarray(self.per_part_s[: len(PARTS)]), dtype=np.float64)

    def own_s(self, tokens: Any, decodes: Any, reads: Any, pairs: Any) -> Any:
        """Seconds of steps that compute something, each with the aftermath that it leaves in later ones.

        Arguments are the parts, in the order of :data:`PARTS`: numbers, or columns.
        """
        a, b, c, d, *after = self.per_part_s
        total = self.fixed_s + a * tokens + b * decodes + c * reads + d * pairs
        return total + sum(after) * np.minimum(1.0, (tokens - decodes) / FULL_AFTERMATH_TOKENS)

    def pace(self, undisturbed: Ints, parts: Floats, duration_s: Floats, row: Ints) -> Floats:
        """How many times longer than predicted steps took around each step ``row``; 1 where the prediction held.

        A machine is faster at some times than at others, and a model that is linear in a step's parts is slightly off
        for some compositions. Both show in the undisturbed steps right before and after, which have a similar
        composition. The pace is the median of measured / predicted over the nearest of them.

        ``undisturbed``: rows of the undisturbed steps, ascending.
        """
        return medians(
            duration_s[undisturbed] / self.predict(parts)[undisturbed], np.searchsorted(undisturbed, row), skip=0
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepTimeModel:
        """Raises InputError naming a field that is missing or invalid."""
        seconds = list_at(values, "per_part_s")
        if len(seconds) != len(PARTS) + AFTERMATH_STEPS:
            raise InputError(f"per_part_s holds {len(seconds)} numbers, should hold {len(PARTS) + AFTERMATH_STEPS}")
        for name, value in [("fixed_s", value_at(values, "fixed_s")), *(("per_part_s", value) for value in seconds)]:
            if not (is_number(value) and value >= 0):
                raise InputError(f"{name} holds {value!r}, should be a finite number, 0 or above")
        error = HeldOutError(*(number_at(values, "error", name) for name in HeldOutError.__slots__))
        fitted_on, steps = text_at(values, "fitted_on"), whole_at(values, "steps")
        return cls(float(values["fixed_s"]), tuple(map(float, seconds)), fitted_on, steps, error)


def step_seconds(
    fixed_s: float,
    per_part_s: tuple[float, ...],
    parts: tuple[float, float, float, float],
    before: float,
    second_before: float,
) -> float:
    """Predicted seconds of one undisturbed step; :meth:`StepTimeModel.predict` does the same for a table.

    ``before``, ``second_before``: :func:`aftermath` of the previous step and of the one before that.
    """
    tokens, decodes, reads, pairs = parts
    if tokens <= 0:
        return 0.0
    a, b, c, d, e, f = per_part_s
    return fixed_s + a * tokens + b * decodes + c * reads + d * pairs + e * before + f * second_before


def recompute_prices(
    model: StepTimeModel, parts: Sequence[Any], rest: Sequence[Any], duration_s: Any, pace: Any
) -> tuple[Any, Any]:
    """Seconds that recomputed tokens added to steps that ran, and seconds of what is left with its decodes alone.

    The clock says how long a step took, and the model how that divides: all of its prices of a step are scaled by
    ``pace``. A model that is off for these steps, as one that was fitted where few steps hold prompts, then cannot
    charge more to recomputed tokens than their steps took, with the aftermath of these.

    ``parts``, ``rest``: what the steps compute, and what of it is not recomputed, in the order of :data:`PARTS`:
    numbers, or columns, as the others are. ``pace``: measured over expected, by the model and with the aftermath of
    earlier steps. Where copies made a step longer, no more than in the steps around it: that time is counted with the
    swaps, and is no price of what the step computes. A step of nothing but recomputed tokens would not have been
    executed and counts in full.
    """
    _, decodes, reads, _ = rest
    rest_s = np.where(np.greater(rest[0], 0), model.own_s(*rest), 0.0)
    decodes_s = np.where(np.greater(decodes, 0), model.own_s(decodes, decodes, reads, 0), 0.0)
    return pace * np.maximum(0.0, model.own_s(*parts) - rest_s), np.minimum(pace * decodes_s, duration_s)


def aftermath(tokens: float, decodes: float) -> float:
    """How cold a step leaves the caches: 1 for a chunk of 256 tokens or more, 0 without a prefill."""
    return min(1.0, max(0.0, (tokens - decodes) / FULL_AFTERMATH_TOKENS))


def with_aftermath(parts: Floats, numbers: Ints | None = None) -> Floats:
    """``parts`` with one more column per earlier step, :data:`AFTERMATH_STEPS` in all: its :func:`aftermath`.

    ``numbers``: of the steps, ascending. A step that is not among them leaves 0, as one that computes nothing does. By
    default no step is absent.
    """
    chunk = np.clip((parts[:, 0] - parts[:, 1]) / FULL_AFTERMATH_TOKENS, 0.0, 1.0)
    if numbers is None:
        numbers = np.arange(len(chunk))
    before = []
    for lag in range(1, AFTERMATH_STEPS + 1):
        row = np.minimum(np.searchsorted(numbers, numbers - lag), len(numbers) - 1)
        before.append(np.where(numbers[row] == numbers - lag, chunk[row], 0.0))
    return np.column_stack([parts, *before])


def medians(values: Floats, at: Ints, skip: int) -> Floats:
    """Median of the neighbours on both sides of each position, without ``skip`` values from the position on.

    Near an end of ``values`` the other side supplies the missing neighbours.
    """
    half = min(NEIGHBOURS, len(values) - skip) // 2
    first = np.clip(at - half, 0, len(values) - skip - 2 * half)
    index = first[:, None] + np.arange(2 * half)[None, :]
    index += np.where(index >= at[:, None], skip, 0)
    return np.asarray(np.median(values[index], axis=1), dtype=np.float64)
