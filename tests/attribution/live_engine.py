"""The step time model that live attribution is tested with."""

from __future__ import annotations

from kvpolicy.attribution.step_time import HeldOutError, StepTimeModel

MODEL = StepTimeModel(2e-3, (3e-5, 1e-4, 1e-7, 2e-9, 1e-3, 4e-4), "core a", 100, HeldOutError(0.0, 0.0, 0.0))
