"""How many steps of a run lay beyond what the hardware model was measured at."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvpolicy.simulator.base import Floats, StepLoad, Times

WAITING = 4096
"""Steps that are kept before they are looked at, which is cheaper than one by one."""


@runtime_checkable
class Bounded(Protocol):
    """Times that know where they were measured; ``beyond``: rows of :data:`~kvpolicy.simulator.base.LOAD` columns
    in, whether each lies outside."""

    def beyond(self, loads: Floats) -> NDArray[np.bool_]: ...


class Beyond:
    """Counts them."""

    def __init__(self, bounded: Bounded) -> None:
        self._bounded = bounded
        self._loads: list[StepLoad] = []
        self._steps = 0

    def add(self, load: StepLoad) -> None:
        """A step was executed."""
        self._loads.append(load)
        if len(self._loads) >= WAITING:
            self._look()

    @property
    def steps(self) -> int:
        self._look()
        return self._steps

    def _look(self) -> None:
        if self._loads:
            self._steps += int(self._bounded.beyond(np.array(self._loads, np.float64)).sum())
            self._loads = []


def beyond_of(times: Times) -> Beyond | None:
    """None for times that do not know where they were measured."""
    within = getattr(times, "steps_of", times)
    return Beyond(within) if isinstance(within, Bounded) else None
