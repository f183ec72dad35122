"""What can be done, and drawing one of it: the only sampler there is."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvpolicy.events import Decision, Option, Preemption, draft_of
from kvpolicy.policy.base import Policy, PolicyState

RECOMPUTE = Option("recompute")
HOST_TIER = "host"
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
