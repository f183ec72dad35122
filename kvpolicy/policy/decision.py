"""Feasible options, and the decision between them: the only place where an option is drawn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from kvpolicy.cost.online import Online
from kvpolicy.events import Cost, Decision, Kind, Option, Preemption, fast_constructor
from kvpolicy.policy.base import (
    Assessment,
    Feedback,
    LearningPolicy,
    Policy,
    PolicyError,
    PolicyState,
    certain_choice,
    first_option_of,
)
from kvpolicy.policy.failures import raise_failure

RECOMPUTE = Option("recompute")
HOST_TIER = "host"
PINNED = "pinned"
"""Recorded in a decision in place of the policy's name while a tool pins the option."""
_draft_decision = fast_constructor(Decision)


def feasible_options(situation: Preemption, swap_possible: bool = True) -> tuple[Option, ...]:
    """Recompute, always and first; swap if the host pool has room for what it would copy and the engine allows it.

    ``swap_possible``: whether the engine would load the blocks back. A victim without computed tokens has nothing to
    swap.
    """
    if swap_possible and situation.computed_tokens > 0 and _has_room(situation):
        return RECOMPUTE, Option("swap", situation.computed_tokens, HOST_TIER)
    return (RECOMPUTE,)


def why_no_swap(situation: Preemption, refused: str = "") -> str:
    """Reason why the victim cannot be swapped, as recorded in the trace; empty if it can.

    ``refused``: reason why the engine would not load the blocks back; empty if it would.
    """
    if situation.cause == "reset":
        return "reset"
    if situation.computed_tokens == 0:
        return "nothing_computed"
    if refused:
        return refused
    return "" if _has_room(situation) else "host_full"


def _has_room(situation: Preemption) -> bool:
    """Whether host memory has room for what a swap is expected to copy."""
    return situation.held_blocks > 0 and situation.save_blocks <= situation.free_host_blocks


def gain_per_block(situation: Preemption, options: Sequence[Option], costs: Sequence[Cost]) -> float | None:
    """Predicted engine seconds that a swap saves over a recompute, per block of host memory that it is expected to
    need, at least one; negative where it costs more. None without predictions of both.

    ``costs``: one per option, or none.
    """
    predicted = {option.kind: cost.engine_s for option, cost in zip(options, costs, strict=False)}
    if "swap" not in predicted:
        return None
    return (predicted["recompute"] - predicted["swap"]) / max(1.0, situation.save_blocks)


def at_resume(
    situation: Preemption,
    total_tokens: int,
    hit_tokens: int,
    free_blocks: int,
    running_requests: int,
    queued_save_bytes: int,
    queued_load_bytes: int,
    load_blocks: int | None = None,
) -> Preemption:
    """The situation when a swapped request is about to come back, made from that at its preemption.

    ``total_tokens``: those that it has if all is loaded, of which ``hit_tokens`` are on the device; the others are in
    host memory. The batch is taken to have grown with the number of its requests. ``load_blocks``: blocks that a load
    brings, over several block tables; None where they follow from the tokens.
    """
    size = situation.block_size
    held_blocks = situation.held_blocks if total_tokens == situation.computed_tokens else -(-total_tokens // size)
    hit_blocks = min(hit_tokens // size, held_blocks) if load_blocks is None else held_blocks - load_blocks
    batch_tokens = situation.batch_tokens * running_requests // max(1, situation.running_requests)
    return replace(
        situation,
        computed_tokens=total_tokens,
        held_blocks=held_blocks,
        shared_blocks=0,
        hashed_blocks=hit_blocks,
        hit_blocks=float(hit_blocks),
        save_blocks=0.0,
        free_blocks=free_blocks,
        short_blocks=0,
        running_requests=running_requests,
        batch_tokens=batch_tokens,
        queued_save_bytes=queued_save_bytes,
        queued_load_bytes=queued_load_bytes,
        absence_tokens=0.0,
        hashed_tokens=None if load_blocks is None else hit_tokens,
        hit_tokens=None if load_blocks is None else float(hit_tokens),
    )


def probabilities_of(
    policy: Policy, situation: Preemption, options: Sequence[Option], state: PolicyState
) -> tuple[float, ...]:
    """The policy's probability of each option. Raises PolicyError for invalid probabilities, and if its code fails."""
    return _assessment(policy, situation, options, state)[0]


def initial_state_of(policy: Policy) -> PolicyState:
    """The policy's initial state. Raises PolicyError, naming the line, if its code fails, and for a state that cannot
    be recorded."""
    try:
        state: object = policy.initial_state()
    except Exception as error:  # noqa: BLE001  # raised again
        raise_failure(policy, "initial_state", error)
    if not callable(getattr(state, "to_json", None)):
        raise PolicyError(f"policy {policy.name}: initial_state() gives {state!r}, should give a value with to_json()")
    text = _recorded(policy, state)  # type: ignore[arg-type]  # it has what a state has
    if not isinstance(text, str):
        raise PolicyError(
            f"policy {policy.name}: to_json() of its initial state gives {text!r}, should give a text of JSON, as "
            "json.dumps makes it"
        )
    return state  # type: ignore[return-value]


def decide(
    policy: Policy, situation: Preemption, options: Sequence[Option], state: PolicyState, rng: random.Random
) -> Decision:
    """Draw an option by the policy's probabilities. Exactly one number is taken from ``rng`` every time.

    Raises PolicyError for invalid probabilities, and if the policy's code fails.
    """
    probabilities, costs = _assessment(policy, situation, options, state)
    chosen = _draw(probabilities, rng.random())
    return _draft_decision(tuple(options), probabilities, chosen, costs, policy.name, _recorded(policy, state))


def _assessment(policy: Policy, situation: Preemption, options: Sequence[Option], state: PolicyState) -> Assessment:
    try:
        assessment = policy.assess(situation, options, state)
    except Exception as error:  # noqa: BLE001  # raised again
        raise_failure(policy, "probabilities", error)
    _check_probabilities(policy.name, assessment[0], options)
    return assessment


def _recorded(policy: Policy, state: PolicyState) -> str:
    try:
        return state.to_json()
    except Exception as error:  # noqa: BLE001  # raised again
        raise_failure(policy, "to_json of its state", error)


class Decider:
    """A policy with its current state: decides preemptions one after the other, and learns from outcomes.

    One per engine core, simulated or not. ``shadow``: decisions are recorded, but every victim is recomputed.
    """

    def __init__(self, policy: Policy, rng: random.Random, shadow: bool = False) -> None:
        self.policy = policy
        self.state = initial_state_of(policy)
        self._rng = rng
        self.shadow = shadow
        """Whether decisions are recorded and every victim is recomputed."""
        self._pinned: Kind | None = None

    def decide(self, situation: Preemption, why_no_swap: str = "") -> Decision:
        """Decide, and set what is executed, with the reason if that differs from the chosen option.

        ``why_no_swap``: reason why the engine cannot swap this victim; empty if it can.
        """
        options = feasible_options(situation, swap_possible=not why_no_swap)
        if self._pinned is None:
            decision = decide(self.policy, situation, options, self.state, self._rng)
            try:
                self.state = self.policy.next_state(self.state, decision)
            except Exception as error:  # noqa: BLE001  # raised again
                raise_failure(self.policy, "next_state", error)
        else:
            chosen = first_option_of(self._pinned, options) or 0
            decision = Decision(options, certain_choice(chosen, len(options)), chosen, (), PINNED, "{}")
        if why_no_swap:
            return replace(decision, executed="recompute", reason=why_no_swap)
        if self.shadow and decision.intended == "swap":
            return replace(decision, executed="recompute", reason="shadow")
        return replace(decision, executed=decision.intended)

    def loads(self, situation: Preemption) -> bool:
        """Whether a swapped request that is about to come back loads what it lacks. ``situation``: see
        :func:`at_resume`.

        Pure: an engine may ask in every step. See :meth:`kvpolicy.policy.Policy.loads`.
        """
        if self._pinned is not None:
            return True
        options = RECOMPUTE, Option("swap", situation.computed_tokens, HOST_TIER)
        try:
            return self.policy.loads(situation, options, self.state)
        except Exception as error:  # noqa: BLE001  # raised again
            raise_failure(self.policy, "loads", error)

    def loads_hit(self, situation: Preemption, read_s: float = 0.0) -> bool:
        """Whether a request loads tokens that it has in host memory and has not computed, or computes them.

        ``situation``: as if the request had been preempted with these tokens, and were about to come back. ``read_s``:
        seconds that it waits first, until they have come to host memory from files; a policy without predictions does
        not go by it. Goes by the option that the policy takes at least half of the time, as nothing is drawn; a policy
        that always recomputes never loads. Pure.
        """
        if self.shadow or self._pinned is not None:
            return False
        options = RECOMPUTE, Option("swap", situation.computed_tokens, HOST_TIER)
        if probabilities_of(self.policy, situation, options, self.state)[1] < 0.5:
            return False
        costs = self.predict(situation, options) if read_s else ()
        return not costs or costs[0].engine_s > costs[1].engine_s + read_s

    def predict(self, situation: Preemption, options: Sequence[Option]) -> tuple[Cost, ...]:
        """The costs by which the policy decides, with what it has learned: one per option, or none at all. Pure."""
        costs = self._costs(situation, options)
        return costs if len(costs) == len(options) else ()

    def gain_per_block(self, situation: Preemption) -> float | None:
        """What a copy of this victim gains: see :func:`gain_per_block`. None while a tool pins the option. Pure."""
        if self._pinned is not None:
            return None
        options = RECOMPUTE, Option("swap", situation.computed_tokens, HOST_TIER)
        return gain_per_block(situation, options, self.predict(situation, options))

    def price(self, situation: Preemption, why_no_swap: str = "") -> float | None:
        """Predicted engine seconds of the cheapest feasible option; None for a policy without predictions. Pure."""
        options = feasible_options(situation, swap_possible=not why_no_swap)
        return min((cost.engine_s for cost in self._costs(situation, options)), default=None)

    def _costs(self, situation: Preemption, options: Sequence[Option]) -> tuple[Cost, ...]:
        try:
            return self.policy.assess(situation, options, self.state)[1]
        except Exception as error:  # noqa: BLE001  # raised again
            raise_failure(self.policy, "probabilities", error)

    def pin(self, kind: Kind | None) -> None:
        """Take ``kind`` whenever it is feasible, recorded as the policy :data:`PINNED`; None to unpin.

        The policy, its state and the random numbers are left unchanged meanwhile.
        """
        self._pinned = kind

    @property
    def learns(self) -> bool:
        """Whether the policy learns from outcomes."""
        return isinstance(self.policy, LearningPolicy)

    def learn(self, feedback: Feedback) -> None:
        """Pass the outcome of a decision to the policy. Does nothing for a policy that does not learn."""
        if isinstance(self.policy, LearningPolicy):
            try:
                self.state = self.policy.observe(self.state, feedback)
            except Exception as error:  # noqa: BLE001  # raised again
                raise_failure(self.policy, "observe", error)

    @property
    def learned(self) -> Online | None:
        """The part of the state to save for a restart; None for nothing."""
        return self.policy.learned(self.state) if isinstance(self.policy, LearningPolicy) else None

    def adopt(self, policy: Policy) -> None:
        """Decide by another policy from now on, from its initial state; the random numbers continue."""
        self.policy, self.state = policy, initial_state_of(policy)


def _draw(probabilities: Sequence[float], position: float) -> int:
    """Index of the option whose part of [0, 1) holds ``position``; never an option of probability 0."""
    cumulative, last = 0.0, 0
    for i, share in enumerate(probabilities):
        if share <= 0.0:
            continue
        cumulative, last = cumulative + share, i
        if position < cumulative:
            return i
    return last


def _check_probabilities(name: str, probabilities: Sequence[float], options: Sequence[Option]) -> None:
    valid = len(probabilities) == len(options) > 0 and min(probabilities) >= 0.0 and max(probabilities) <= 1.0
    if not valid or not -1e-9 <= sum(probabilities) - 1.0 <= 1e-9:
        raise PolicyError(
            f"policy {name}: probabilities {tuple(probabilities)} for {len(options)} options; "
            "there should be one each, from 0 to 1, summing to 1"
        )
