"""Policies: from a situation and its options to probabilities, and the one place where chance comes in."""

from kvpolicy.policy.choosing import decide, feasible_options
from kvpolicy.policy.names import COST_MODELS, FORMS, load, needs_engine
from kvpolicy.policy.protocol import Assessment, NoState, Policy, PolicyState

__all__ = [
    "COST_MODELS",
    "FORMS",
    "Assessment",
    "NoState",
    "Policy",
    "PolicyState",
    "decide",
    "feasible_options",
    "load",
    "needs_engine",
]
