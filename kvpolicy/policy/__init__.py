"""Policies: from a situation and its options to probabilities, and the one place where chance comes in."""

from kvpolicy.policy.base import Assessment, Feedback, NoState, Policy, PolicyState
from kvpolicy.policy.decision import decide, feasible_options, why_no_swap
from kvpolicy.policy.objective import Objective
from kvpolicy.policy.spec import COST_MODELS, FORMS, anchored, load, needs_engine

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
    "why_no_swap",
]
