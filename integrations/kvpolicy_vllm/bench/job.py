"""The job of one measuring engine, and the noise it measures. Importing this loads no engine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvpolicy_vllm.bench.states import State

NOISE_LIMIT = 0.10
"""Variation of identical windows above which the number of repeats is raised."""
MAX_EXTRA = 3
"""Maximum factor by which repeats are multiplied."""


@dataclass(frozen=True, slots=True)
class Job:
    """Measurements of one engine."""

    engine: dict[str, Any]
    """Arguments of :class:`vllm.LLM`, the plugin's included."""
    states: tuple[State, ...]
    checks: tuple[State, ...]
    """States of the self-check: one for recompute, one for swap."""
    check_pairs: int
    repeats: int
    first_repeat: int
    """Number of the first repeat; passes use disjoint ranges."""
    seed: int
    max_extra: int = MAX_EXTRA
    """Maximum factor by which repeats are multiplied on a noisy machine."""
    max_s: float | None = None
    """Seconds after the engine's start from which on no further state is measured; None: no limit."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Job:
        states, checks = ([State.from_dict(state) for state in values[name]] for name in ("states", "checks"))
        return cls(**values | {"states": tuple(states), "checks": tuple(checks)})


@dataclass(frozen=True, slots=True)
class Noise:
    """Variation of identical undisturbed windows."""

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
        """Factor for the number of repeats that makes up for excess variance, up to :data:`MAX_EXTRA`."""
        return max(1, min(MAX_EXTRA, math.ceil((self.variation / NOISE_LIMIT) ** 2)))
