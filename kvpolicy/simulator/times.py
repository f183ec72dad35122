"""Hardware models: what steps and copies take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvpolicy.simulator.protocol import LOAD, Direction, Floats, StepLoad


@dataclass(frozen=True, slots=True)
class ConstantTimes:
    """Linear in what a step computes and a copy moves: for tests, and where somebody knows such constants."""

    fixed_s: float = 5e-3
    per_part_s: tuple[float, ...] = (1e-5, 1e-5, 1e-8, 1e-9, 0.0, 0.0)
    """Seconds per unit of each of :data:`LOAD`."""
    copy_latency_s: float = 1e-4
    copy_bytes_per_s: float = 1e10
    per_segment_s: float = 0.0
    source: str = "constants, made up"

    def __post_init__(self) -> None:
        if len(self.per_part_s) != len(LOAD) or self.copy_bytes_per_s <= 0:
            raise ValueError(f"{self}: per_part_s should hold {len(LOAD)} numbers, copy_bytes_per_s be above 0")

    def step_s(self, load: StepLoad) -> float:
        return linear(self.fixed_s, self.per_part_s, load)

    def steps_s(self, loads: Floats) -> Floats:
        return np.asarray(linear(self.fixed_s, self.per_part_s, loads.T), dtype=np.float64)

    def copy_s(self, direction: Direction, copied_bytes: int, segments: int, segment_bytes: int) -> float:
        return self.copy_latency_s + copied_bytes / self.copy_bytes_per_s + segments * self.per_segment_s


def linear(fixed_s: float, per_part_s: tuple[float, ...], parts: StepLoad | Floats) -> float:
    """Numbers, or rows of numbers, added in one order, so that both come out the same to the last bit."""
    total = fixed_s
    for seconds, part in zip(per_part_s, parts, strict=True):
        total = total + seconds * part
    return total
