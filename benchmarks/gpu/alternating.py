"""A policy for runs in which both options must come about: what a coin does on the mean, it does for certain. Of
gpu-check and of the tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from kvpolicy.events import Decision, Option, Preemption
from kvpolicy.policy import Policy
from kvpolicy.policy.base import certain_choice

ALTERNATING = "python:benchmarks.gpu.alternating:Alternating"
"""With ``allow_python_policies`` in the plugin's settings."""


@dataclass(frozen=True, slots=True)
class Turn:
    """How many choices were made so far; where recompute was the only option, there was none."""

    choices: int = 0

    def to_json(self) -> str:
        return json.dumps({"choices": self.choices})


class Alternating(Policy[Turn]):
    """Swap, recompute, swap, and so on, wherever there is a choice."""

    name = "alternating"

    def initial_state(self) -> Turn:
        return Turn()

    def probabilities(self, situation: Preemption, options: Sequence[Option], state: Turn) -> Sequence[float]:
        swap = len(options) > 1 and state.choices % 2 == 0
        return certain_choice(int(swap), len(options))

    def next_state(self, state: Turn, decision: Decision) -> Turn:
        return Turn(state.choices + (len(decision.options) > 1))
