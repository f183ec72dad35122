"""The states that a profile measures: running requests, victims, cause, and free memory.

A state fixes everything but the tokens themselves. Every window gets new random prompts of the same lengths, so that
it finds no other window's blocks in the prefix cache.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from kvpolicy.errors import InputError
from kvpolicy.events import Cause

NATURAL_SHARE = 0.6
"""Share of natural states in a grid. Well over half remain natural even with the self-check's states, which are forced.
"""
SPARE_LEVELS = (0, 2, 8, 32)
SHARED_LEVELS = (0.0, 0.0, 0.25, 0.5, 0.75)
"""Shares of the victim's prompt that another request begins with, too. Such blocks stay on the device: a swap saves and
does not load them, and a recompute finds them, so that the costs of saves and loads can be told apart."""
QUEUED_LEVELS = (0.0, 0.0, 0.0, 0.5, 1.0)
"""Sizes of a copy of the tool's own that is queued before the victim's, per direction: shares of the blocks that the
victim loses. It is there under both options, and in the window without a preemption."""
STORED_LEVELS = (False, False, False, True)
"""Whether the victim's blocks are in host memory before it is preempted, so that a swap loads, and saves nothing."""
VICTIM_LEVELS = (1, 2, 4)
"""Victims of one overflow, in forced states with as many other requests. The one that is measured goes last."""
MIN_DECODED = 2
LONG_WINDOW_TOKENS = 256
"""Tokens that every other request may emit while the victim is loaded back over a slow link."""
Level = TypeVar("Level", int, float, bool)
CHECK_PREFIX = "check-"
"""Prefix of the ids of the self-check's states."""


@dataclass(frozen=True, slots=True)
class State:
    """One situation that can be set up repeatedly."""

    state_id: str
    block_size: int
    cause: Cause
    """``memory``: the next allocation fails; ``forced``: memory to spare."""
    prompt_tokens: int
    """The victim's prompt."""
    decoded_tokens: int
    """Minimum number of tokens the victim has emitted; in a natural state more follow until a block is needed."""
    other_prompts: tuple[int, ...]
    """Prompt lengths of the requests that run beside it."""
    waiting: int
    """Waiting requests, which are too long to be admitted."""
    spare_blocks: int
    """Free blocks beyond what the running requests may need."""
    victims: int = 1
    """Requests evicted in one step: the victim and the last of the others. With several victims by lack of memory all
    requests must have the same length, and there must be as many as :func:`running_for` says."""
    shared_blocks: int = 0
    """Leading blocks of the victim's prompt that the first of the others begins with, too, and holds."""
    queued_save_share: float = 0.0
    """Size of a save of the tool's own that is queued when the victim is preempted: a share of the blocks that it
    loses."""
    queued_load_share: float = 0.0
    """The same for a load."""
    stored: bool = False
    """Whether the victim's blocks, all of them full, are in host memory already."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> State:
        return cls(**values | {"other_prompts": tuple(values["other_prompts"])})

    @property
    def growth_blocks(self) -> int:
        """Blocks that the running requests may need during a window: one each, and one as a reserve."""
        return len(self.other_prompts) + 2

    @property
    def victim_blocks(self) -> int:
        """Maximum number of blocks the victim holds at its preemption; natural states wait up to a block's length."""
        return self._blocks(self.prompt_tokens)

    @property
    def device_blocks(self) -> int:
        """Blocks that an engine needs for this state, including the one that vLLM keeps for itself."""
        running = self.victim_blocks + sum(map(self._blocks, self.other_prompts))
        long_window = len(self.other_prompts) * math.ceil(LONG_WINDOW_TOKENS / self.block_size)
        return running + self.growth_blocks + self.spare_blocks + long_window + self.tool_blocks + 1

    @property
    def tool_blocks(self) -> int:
        """Maximum number of device blocks that the tool's own copies read or write."""
        return math.ceil(max(self.queued_save_share, self.queued_load_share) * self.victim_blocks)

    def _blocks(self, prompt_tokens: int) -> int:
        max_tokens = prompt_tokens + self.decoded_tokens + 2 * self.block_size
        return math.ceil(max_tokens / self.block_size)


def running_for(victims: int, blocks_each: int) -> int:
    """Number of running requests that must each need a block in one step so that ``victims`` of them are preempted."""
    return victims + 1 + (victims - 1) * blocks_each


def free_blocks_for(victims: int, running: int, blocks_each: int, needed_each: int = 1) -> int:
    """Number of free blocks with which exactly ``victims`` requests are preempted, where all need blocks in one step.

    The blocks of victims go to the requests that stay: the free blocks and those of all victims but the last leave
    one request a block short. ``needed_each``: blocks that each request needs, one per block table. Below 0 where too
    few requests run; see :func:`running_for`.
    """
    return (running - victims) * needed_each - 1 - (victims - 1) * blocks_each


@dataclass(frozen=True, slots=True)
class Span:
    """Ranges that a grid of states covers."""

    min_tokens: int
    max_tokens: int
    """Computed tokens of the victim."""
    max_others: int
    max_batch_tokens: int
    """Context of all running requests together."""
    model_tokens: int
    """The engine's ``max_model_len``; prompts of waiting requests are nearly that long."""


def grid(block_size: int, count: int, span: Span, rng: random.Random) -> tuple[State, ...]:
    """``count`` states, spread evenly over the logarithm of the length, the number of others, free memory, the share
    of the victim's prompt that another request has, too, the sizes of copies queued in each direction, whether the
    victim's blocks are in host memory already, and, where it is forced, the number of victims.

    Raises InputError for a count below 4 or an empty span.
    """
    if count < 4 or not 0 < span.min_tokens < span.max_tokens < span.model_tokens:
        raise InputError(f"cannot lay a grid of {count} states over {span}")
    lengths = _log_strata(count, span.min_tokens, span.max_tokens, rng)
    others = _shuffled_levels(range(span.max_others + 1), count, rng)
    spare = _shuffled_levels(SPARE_LEVELS, count, rng)
    waiting = _shuffled_levels((0, 0, 1, 2, 4, 8), count, rng)
    natural = math.ceil(NATURAL_SHARE * count)
    causes: list[Cause] = ["memory" if i < natural else "forced" for i in rng.sample(range(count), count)]
    states = []
    for i in range(count):
        decoded = min(MIN_DECODED + rng.randrange(8), lengths[i] // 4)
        state = State(
            state_id=f"b{block_size}-{i:03d}",
            block_size=block_size,
            cause=causes[i],
            prompt_tokens=lengths[i] - decoded,
            decoded_tokens=decoded,
            other_prompts=_others(others[i], lengths[i], span, rng),
            waiting=waiting[i],
            spare_blocks=spare[i],
        )
        states.append(_without_admissible_waiting(state, span))
    shared = _shuffled_levels(SHARED_LEVELS, count, rng)
    saves, loads = _shuffled_levels(QUEUED_LEVELS, count, rng), _shuffled_levels(QUEUED_LEVELS, count, rng)
    stored = _shuffled_levels(STORED_LEVELS, count, rng)
    victims = iter(_shuffled_levels(VICTIM_LEVELS, causes.count("forced"), rng))
    return tuple(
        replace(
            _sharing(state, level),
            queued_save_share=save,
            queued_load_share=load,
            stored=in_host_memory,
            victims=1 if state.cause == "memory" else max(1, min(next(victims), len(state.other_prompts))),
        )
        for state, level, save, load, in_host_memory in zip(states, shared, saves, loads, stored, strict=True)
    )


def check_states(block_size: int, span: Span) -> tuple[State, State]:
    """The states of the self-check, one per option: forced, with memory to spare and a few other requests."""
    tokens = round(math.sqrt(span.min_tokens * span.max_tokens) * 2)
    prompts = (max(span.min_tokens, tokens // 2),) * min(3, max(1, span.max_others))

    def state(name: str) -> State:
        return State(f"{CHECK_PREFIX}{name}-b{block_size}", block_size, "forced", tokens, 4, prompts, 0, 8)

    return state("recompute"), state("swap")


def _others(count: int, victim_tokens: int, span: Span, rng: random.Random) -> tuple[int, ...]:
    if count == 0:
        return ()
    max_tokens = min(span.max_tokens, (span.max_batch_tokens - victim_tokens) // count)
    high = max(max_tokens, span.min_tokens + 1)
    return tuple(round(math.exp(rng.uniform(math.log(span.min_tokens), math.log(high)))) for _ in range(count))


def _sharing(state: State, level: float) -> State:
    """The state with the longest other request first, which shares ``level`` of the victim's prompt or what it can."""
    others = tuple(sorted(state.other_prompts, reverse=True))
    shared = min(round(level * state.prompt_tokens), *(tokens - 1 for tokens in (state.prompt_tokens, *others[:1])))
    if not others or shared < state.block_size:
        return state
    return replace(state, other_prompts=others, shared_blocks=shared // state.block_size)


def _without_admissible_waiting(state: State, span: Span) -> State:
    """Drop waiting requests that could be admitted during a window."""
    max_free = state.victim_blocks + state.growth_blocks + state.spare_blocks
    if state.waiting and max_free >= waiting_prompt_tokens(span.model_tokens) // state.block_size:
        return State.from_dict(state.to_dict() | {"waiting": 0})
    return state


def waiting_prompt_tokens(model_tokens: int) -> int:
    """Prompt length of waiting requests."""
    return model_tokens - 8


def _log_strata(count: int, low: int, high: int, rng: random.Random) -> list[int]:
    """One length from each of ``count`` equal strata of the logarithm, in random order."""
    step = (math.log(high) - math.log(low)) / count
    lengths = [round(math.exp(math.log(low) + (i + rng.random()) * step)) for i in range(count)]
    rng.shuffle(lengths)
    return lengths


def _shuffled_levels(levels: Sequence[Level], count: int, rng: random.Random) -> list[Level]:
    """``count`` values of the levels, each about equally often, in random order."""
    values = [levels[i % len(levels)] for i in range(count)]
    rng.shuffle(values)
    return values
