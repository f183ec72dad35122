"""Measured cost of preemptions, from a complete trace or while the engine runs.

A server imports this package, so importing it loads nothing heavy. Only :mod:`kvpolicy.attribution.offline` needs
Arrow.
"""

from kvpolicy.attribution.step_time import StepTimeModel
from kvpolicy.attribution.streaming import LiveCost, LiveCosts

__all__ = ["LiveCost", "LiveCosts", "StepTimeModel"]
