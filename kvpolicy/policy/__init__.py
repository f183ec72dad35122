"""Policies: from a situation and its options to probabilities, and the one place where chance comes in."""

from kvpolicy.policy.base import Assessment, Feedback, LearningPolicy, NoState, Policy, PolicyState, PricedPolicy
from kvpolicy.policy.decision import decide, feasible_options
from kvpolicy.policy.objective import Objective
from kvpolicy.policy.spec import COST_MODELS, FORMS, HELP, anchored, load, needs_engine

__all__ = [
    "COST_MODELS",
    "FORMS",
    "HELP",
    "Assessment",
    "Feedback",
    "LearningPolicy",
    "NoState",
    "Objective",
    "Policy",
    "PolicyState",
    "PricedPolicy",
    "anchored",
    "decide",
    "feasible_options",
    "load",
    "needs_engine",
]
