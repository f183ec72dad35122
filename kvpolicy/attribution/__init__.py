"""What a preemption cost the engine: afterwards from a whole trace, or while the engine runs.

Importing the package loads nothing heavy, as a server measures too; :mod:`kvpolicy.attribution.offline` needs Arrow.
"""

from kvpolicy.attribution.step_time import StepTimeModel
from kvpolicy.attribution.streaming import LiveCost, LiveCosts

__all__ = ["LiveCost", "LiveCosts", "StepTimeModel"]
