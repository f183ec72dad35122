"""The job of one measuring engine, and the noise it measures. Importing this loads no engine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
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
    """Arguments of :func:`kvpolicy_vllm.bench.engine_flags.start`, the plugin's included."""
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
    end_s: float | None = None
    """Time from which on no further state is measured, by the clock of :func:`time.monotonic`, which all processes of a
    machine share; None: no limit."""
    in_order: bool = False
    """Whether the first repeat goes through the states in their order, so that those that come first are measured if
    time is short, and every repeat after that at random."""
    wanted: Mapping[str, int] | None = None
    """Repeats or pairs by state, 0 of one that is not named; None: ``repeats`` and ``check_pairs`` of each."""

    def repeats_of(self, state: State) -> int:
        """Windows per arm that are wanted of one of the ``states``."""
        return self.repeats if self.wanted is None else self.wanted.get(state.state_id, 0)

    def pairs_of(self, check: State) -> int:
        """Pairs that are wanted of one of the ``checks``."""
        return self.check_pairs if self.wanted is None else self.wanted.get(check.state_id, 0)

    @property
    def requested(self) -> dict[str, int]:
        """Repeats or pairs by state, where there are any."""
        repeats = {state.state_id: self.repeats_of(state) for state in self.states}
        pairs = {check.state_id: self.pairs_of(check) for check in self.checks}
        return {state_id: count for counts in (repeats, pairs) for state_id, count in counts.items() if count}

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
