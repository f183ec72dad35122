"""Policies: from a situation and its options to probabilities, and the one place where chance comes in."""

from kvpolicy.policy.choosing import decide, feasible_options
from kvpolicy.policy.names import COST_MODELS, FORMS, anchored, load, needs_engine
from kvpolicy.policy.objective import Objective
from kvpolicy.policy.protocol import Assessment, Feedback, NoState, Policy, PolicyState

__all__ = [
    "COST_MODELS",
    "FORMS",
    "Assessment",
    "Feedback",
    "NoState",
    "Objective",
    "Policy",
    "PolicyState",
    "anchored",
    "decide",
    "feasible_options",
    "load",
    "needs_engine",
]
