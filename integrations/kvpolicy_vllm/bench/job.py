"""What one engine is told to measure, and what it says of its own noise. Importing this loads no engine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvpolicy_vllm.bench.states import State

NOISE_LIMIT = 0.10
"""Variation of identical windows above which there are more repeats."""
MAX_EXTRA = 3
"""Repeats are multiplied by that at most."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one engine is to measure."""

    engine: dict[str, Any]
    """Arguments of :class:`vllm.LLM`, the plugin's included."""
    states: tuple[State, ...]
    checks: tuple[State, ...]
    """States of the self-check: one for recompute, one for swap."""
    check_pairs: int
    repeats: int
    first_repeat: int
    """Repeats are numbered from here on: passes do not share numbers."""
    seed: int
    max_extra: int = MAX_EXTRA
    """Repeats are multiplied by that at most where the machine is noisy."""
    max_s: float | None = None
    """What is not measured so many seconds after the engine was up is left out; None: nothing is."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Job:
        states, checks = ([State.from_dict(one) for one in values[name]] for name in ("states", "checks"))
        return cls(**values | {"states": tuple(states), "checks": tuple(checks)})


@dataclass(frozen=True, slots=True)
class Noise:
    """How much identical undisturbed windows differed."""

    windows: int
    mean_s: float
    variation: float
    """Standard deviation over mean."""

    @classmethod
    def of(cls, durations_s: Sequence[float]) -> Noise:
        mean_s = statistics.fmean(durations_s)
        return cls(len(durations_s), mean_s, statistics.stdev(durations_s) / mean_s)

    @property
    def factor(self) -> int:
        """By how much to multiply repeats: the variance that is too much, made up for as far as is bearable."""
        return max(1, min(MAX_EXTRA, math.ceil((self.variation / NOISE_LIMIT) ** 2)))
