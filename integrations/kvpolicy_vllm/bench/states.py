"""The states a profile measures: what is running, who is taken, how, and how much memory is left.

A state fixes everything but the tokens themselves; every window of it gets fresh random prompts of the same lengths,
so that no window finds another's blocks in the prefix cache.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy.events import Cause

NATURAL_SHARE = 0.6
"""Of a grid's states: with those of the self-check, which are forced, well over half stay natural."""
SPARE_LEVELS = (0, 2, 8, 32)
MIN_DECODED = 2
LONG_WINDOW_TOKENS = 256
"""Tokens that every other request can come to emit while a slow link brings the victim back."""
CHECK_PREFIX = "check-"
"""Begins the ids of the self-check's states."""


@dataclass(frozen=True, slots=True)
class State:
    """One situation to bring about, as often as it is asked for."""

    state_id: str
    block_size: int
    cause: Cause
    """``memory``: the next allocation fails; ``forced``: memory to spare."""
    prompt_tokens: int
    """The victim's prompt."""
    decoded_tokens: int
    """Tokens the victim has emitted, at least: a natural state then waits for the next block to be needed."""
    other_prompts: tuple[int, ...]
    """Prompt lengths of the requests that run beside it."""
    waiting: int
    """Requests that wait, too long to be admitted."""
    spare_blocks: int
    """Free blocks beyond what the running requests can come to need."""
    victims: int = 1
    """Evicted in one step: the victim, and the last of those that run beside it. Several want all alike in length, and
    as many requests as :func:`running_for` says."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> State:
        return cls(**values | {"other_prompts": tuple(values["other_prompts"])})

    @property
    def growth_blocks(self) -> int:
        """Blocks the running requests can come to need during a window: one each, and one to be safe."""
        return len(self.other_prompts) + 2

    @property
    def victim_blocks(self) -> int:
        """Blocks the victim holds at most when it is taken: natural states wait up to a block's length."""
        return self._blocks(self.prompt_tokens)

    @property
    def device_blocks(self) -> int:
        """Blocks an engine needs for this state; vLLM keeps one for itself."""
        running = self.victim_blocks + sum(map(self._blocks, self.other_prompts))
        long_window = len(self.other_prompts) * math.ceil(LONG_WINDOW_TOKENS / self.block_size)
        return running + self.growth_blocks + self.spare_blocks + long_window + 1

    def _blocks(self, prompt_tokens: int) -> int:
        most = prompt_tokens + self.decoded_tokens + 2 * self.block_size
        return math.ceil(most / self.block_size)


def running_for(victims: int, blocks_each: int) -> int:
    """Requests that must run and each need a block in one step, so that ``victims`` of them have to go."""
    return victims + 1 + (victims - 1) * blocks_each


def free_blocks_for(victims: int, running: int, blocks_each: int) -> int:
    """With which exactly so many have to go where all running requests need a block in one step.

    Every victim gives its blocks to those that stay: what is free and those of all victims but the last leave one of
    them without. Below 0 where too few run; see :func:`running_for`.
    """
    return running - victims - 1 - (victims - 1) * blocks_each


@dataclass(frozen=True, slots=True)
class Span:
    """What a grid covers."""

    min_tokens: int
    max_tokens: int
    """Computed tokens of the victim."""
    max_others: int
    max_batch_tokens: int
    """Context of all running requests together."""
    model_tokens: int
    """The engine's ``max_model_len``; requests that wait ask for nearly that much."""


def grid(block_size: int, count: int, span: Span, rng: random.Random) -> tuple[State, ...]:
    """``count`` states, spread evenly over (log) length, number of others and free memory.

    Raises ValueError for a count below 4 or a span that holds nothing.
    """
    if count < 4 or not 0 < span.min_tokens < span.max_tokens < span.model_tokens:
        raise InputError(f"cannot lay a grid of {count} states over {span}")
    lengths = _log_strata(count, span.min_tokens, span.max_tokens, rng)
    others = _dealt(range(span.max_others + 1), count, rng)
    spare = _dealt(SPARE_LEVELS, count, rng)
    waiting = _dealt((0, 0, 1, 2, 4, 8), count, rng)
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
        states.append(_without_waiting_that_would_fit(state, span))
    return tuple(states)


def check_states(block_size: int, span: Span) -> tuple[State, State]:
    """The states of the self-check, one per option: forced, memory to spare, a few others to be disturbed."""
    tokens = round(math.sqrt(span.min_tokens * span.max_tokens) * 2)
    prompts = (max(span.min_tokens, tokens // 2),) * min(3, max(1, span.max_others))

    def state(name: str) -> State:
        return State(f"{CHECK_PREFIX}{name}-b{block_size}", block_size, "forced", tokens, 4, prompts, 0, 8)

    return state("recompute"), state("swap")


def _others(count: int, victim_tokens: int, span: Span, rng: random.Random) -> tuple[int, ...]:
    if count == 0:
        return ()
    most = min(span.max_tokens, (span.max_batch_tokens - victim_tokens) // count)
    high = max(most, span.min_tokens + 1)
    return tuple(round(math.exp(rng.uniform(math.log(span.min_tokens), math.log(high)))) for _ in range(count))


def _without_waiting_that_would_fit(state: State, span: Span) -> State:
    """Nobody may be admitted during a window: drop those who wait where there will be room for one."""
    max_free = state.victim_blocks + state.growth_blocks + state.spare_blocks
    if state.waiting and max_free >= waiting_prompt_tokens(span.model_tokens) // state.block_size:
        return State.from_dict(state.to_dict() | {"waiting": 0})
    return state


def waiting_prompt_tokens(model_tokens: int) -> int:
    """Prompt length of those who wait."""
    return model_tokens - 8


def _log_strata(count: int, low: int, high: int, rng: random.Random) -> list[int]:
    """One length from each of ``count`` equal strata of the logarithm, in random order."""
    step = (math.log(high) - math.log(low)) / count
    lengths = [round(math.exp(math.log(low) + (i + rng.random()) * step)) for i in range(count)]
    rng.shuffle(lengths)
    return lengths


def _dealt(levels: Sequence[int], count: int, rng: random.Random) -> list[int]:
    """``count`` of the levels, each about equally often, in random order."""
    dealt = [levels[i % len(levels)] for i in range(count)]
    rng.shuffle(dealt)
    return dealt
