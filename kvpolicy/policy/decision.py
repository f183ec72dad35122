"""What can be done, and drawing one of it: the only sampler there is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from kvpolicy.cost.online import Online
from kvpolicy.events import Decision, Kind, Option, Preemption, draft_of
from kvpolicy.policy.base import Feedback, LearningPolicy, Policy, PolicyState, all_on, first_of

RECOMPUTE = Option("recompute")
HOST_TIER = "host"
PINNED = "pinned"
"""In a decision, in place of a policy's name: a tool has the option pinned."""
_decision = draft_of(Decision)


def feasible_options(situation: Preemption, swap_possible: bool = True) -> tuple[Option, ...]:
    """Recompute, always and first; swap where the host has room for all held blocks and the engine would load them.

    ``swap_possible``: whether it would; only the engine knows. A victim without computed tokens has nothing to swap.
    """
    if swap_possible and 0 < situation.held_blocks <= situation.free_host_blocks and situation.computed_tokens > 0:
        return RECOMPUTE, Option("swap", situation.computed_tokens, HOST_TIER)
    return (RECOMPUTE,)


def why_no_swap(situation: Preemption, refused: str = "") -> str:
    """Why the victim cannot be swapped, in a word for the trace; empty where it can.

    ``refused``: why the engine would not load it back, which only the engine knows; empty where it would.
    """
    if situation.cause == "reset":
        return "reset"
    if situation.computed_tokens == 0:
        return "nothing_computed"
    if refused:
        return refused
    return "host_full" if situation.free_host_blocks < situation.held_blocks else ""


def probabilities_of(
    policy: Policy, situation: Preemption, options: Sequence[Option], state: PolicyState
) -> tuple[float, ...]:
    """What the policy says of the options. Raises ValueError for probabilities that are none."""
    probabilities, _ = policy.assess(situation, options, state)
    _refuse_impossible(policy.name, probabilities, options)
    return probabilities


def decide(
    policy: Policy, situation: Preemption, options: Sequence[Option], state: PolicyState, rng: random.Random
) -> Decision:
    """Ask the policy and draw; exactly one number is taken from ``rng`` every time.

    Raises ValueError for probabilities that are none.
    """
    probabilities, costs = policy.assess(situation, options, state)
    _refuse_impossible(policy.name, probabilities, options)
    chosen = _draw(probabilities, rng.random())
    return _decision(tuple(options), probabilities, chosen, costs, policy.name, state.to_json())


class Decider:
    """The policy in charge and the state it has come to: decides one preemption after the other, and learns.

    One per engine core, simulated or not. ``shadow``: what is intended is recorded, but everything is recomputed.
    """

    def __init__(self, policy: Policy, rng: random.Random, shadow: bool = False) -> None:
        self.policy = policy
        self.state = policy.initial_state()
        self._rng = rng
        self._shadow = shadow
        self._pinned: Kind | None = None

    def decide(self, situation: Preemption, why_no_swap: str = "") -> Decision:
        """The decision, with what is to be executed and why that is not what was chosen.

        ``why_no_swap``: what keeps the engine from swapping this victim; empty where nothing does.
        """
        options = feasible_options(situation, swap_possible=not why_no_swap)
        if self._pinned is None:
            decision = decide(self.policy, situation, options, self.state, self._rng)
            self.state = self.policy.next_state(self.state, decision)
        else:
            chosen = first_of(self._pinned, options) or 0
            decision = Decision(options, all_on(chosen, len(options)), chosen, (), PINNED, "{}")
        if why_no_swap:
            return replace(decision, executed="recompute", reason=why_no_swap)
        if self._shadow and decision.intended == "swap":
            return replace(decision, executed="recompute", reason="shadow")
        return replace(decision, executed=decision.intended)

    def pin(self, kind: Kind | None) -> None:
        """Take ``kind`` wherever it is feasible, recorded as the policy :data:`PINNED`, and leave the policy in charge,
        its state and its chance alone; None: ask that policy again."""
        self._pinned = kind

    @property
    def learns(self) -> bool:
        """Whether the policy is to be told what becomes of its decisions."""
        return isinstance(self.policy, LearningPolicy)

    def learn(self, feedback: Feedback) -> None:
        """What became of a decision is known. Does nothing for a policy that does not learn."""
        if isinstance(self.policy, LearningPolicy):
            self.state = self.policy.observe(self.state, feedback)

    @property
    def learned(self) -> Online | None:
        """What of the state is worth keeping over a restart; None for nothing."""
        return self.policy.learned(self.state) if isinstance(self.policy, LearningPolicy) else None

    def adopt(self, policy: Policy) -> None:
        """Decide by another policy from now on, from its initial state; chance goes on where it was."""
        self.policy, self.state = policy, policy.initial_state()


def _draw(probabilities: Sequence[float], at: float) -> int:
    """The option in whose share of [0, 1) ``at`` falls; never one of probability 0."""
    passed, last = 0.0, 0
    for i, share in enumerate(probabilities):
        if share <= 0.0:
            continue
        passed, last = passed + share, i
        if at < passed:
            return i
    return last


def _refuse_impossible(name: str, probabilities: Sequence[float], options: Sequence[Option]) -> None:
    right = len(probabilities) == len(options) > 0 and min(probabilities) >= 0.0 and max(probabilities) <= 1.0
    if not right or not -1e-9 <= sum(probabilities) - 1.0 <= 1e-9:
        raise ValueError(
            f"policy {name}: probabilities {tuple(probabilities)} for {len(options)} options; "
            "there should be one each, from 0 to 1, summing to 1"
        )
