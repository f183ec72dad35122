"""Policies: from a situation and its options to probabilities, and the decision drawn from these."""

from kvpolicy.policy.base import (
    Assessment,
    Feedback,
    LearningPolicy,
    NoState,
    Policy,
    PolicyError,
    PolicyState,
    PricedPolicy,
)
from kvpolicy.policy.decision import (
    Decider,
    decide,
    feasible_options,
    gain_per_block,
    initial_state_of,
    probabilities_of,
    why_no_swap,
)
from kvpolicy.policy.objective import Objective
from kvpolicy.policy.spec import (
    COST_MODELS,
    FORMS,
    HELP,
    anchored,
    load,
    load_policies,
    load_policy,
    needs_engine,
    spec_lines,
    specs_by_label,
)

__all__ = [
    "COST_MODELS",
    "FORMS",
    "HELP",
    "Assessment",
    "Decider",
    "Feedback",
    "LearningPolicy",
    "NoState",
    "Objective",
    "Policy",
    "PolicyError",
    "PolicyState",
    "PricedPolicy",
    "anchored",
    "decide",
    "feasible_options",
    "gain_per_block",
    "initial_state_of",
    "load",
    "load_policies",
    "load_policy",
    "needs_engine",
    "probabilities_of",
    "spec_lines",
    "specs_by_label",
    "why_no_swap",
]
