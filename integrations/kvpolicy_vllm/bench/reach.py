"""How much of the overflow study is measured, and how it is cut into parts, one engine each. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from kvpolicy.errors import InputError
from kvpolicy.overflow import BLOCK_SIZE, EVICTED_TOKENS, MEMORY, SEQUENCE_LENGTH, SERVED, TIMELINE, state_id
from kvpolicy_vllm.bench.profile_parts import PAGEABLE, Extent, Part
from kvpolicy_vllm.bench.states import State, running_for

DECODED = 4
"""Tokens that everybody has emitted, at least, before the overflow is brought about."""
ALIGNING = 20
"""Tokens before the end of a block at which those who are to need the next one together have their prompt's end."""
STUDY_BLOCK_SIZE = 32
"""Of the engines of all figures but block-size; a CPU engine wants a multiple of 32."""
LEARNING = "learning"
"""Begins the names of the parts that the learned policy is trained on."""
ARMS = ("recompute", "swap", "learned")
"""Policies that serve, under these names."""
PAPER_REQUESTS, PAPER_PROMPT, PAPER_OUTPUT = 32, 1500, 1024
TIMELINE_LEVEL = 12


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one size, all at once."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    block_size: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def blocks_each(self) -> int:
        return math.ceil(self.total_tokens / self.block_size)

    @property
    def all_blocks(self) -> int:
        """That hold every request at full length, and one that vLLM keeps for itself."""
        return self.requests * self.blocks_each + 1

    @property
    def all_output_tokens(self) -> int:
        return self.requests * self.output_tokens

    def blocks_at(self, level: int) -> int:
        """Of an engine with ``level`` percent of the memory; one request must fit."""
        wanted = round(level / 100 * self.requests * self.blocks_each)
        return max(wanted, self.blocks_each + 1) + 1

    def scaling(self) -> str:
        """For a figure: what is served here, beside what the paper served."""
        paper = f"{PAPER_REQUESTS} x {PAPER_PROMPT} in / {PAPER_OUTPUT} out"
        here = f"{self.requests} requests x {self.prompt_tokens} in / {self.output_tokens} out, all at once"
        share = self.total_tokens / (PAPER_PROMPT + PAPER_OUTPUT)
        scaled = (
            "as the paper's"
            if share == 1 and self.requests == PAPER_REQUESTS
            else (f"lengths {share:.3g} of the paper's {paper}")
        )
        return f"{here}: {scaled}; {self.all_blocks - 1} blocks of {self.block_size} tokens hold all at full length"


def load_of(scale: float, requests: int = PAPER_REQUESTS) -> Load:
    """The paper's requests, their lengths multiplied by ``scale``."""
    return Load(requests, round(PAPER_PROMPT * scale), round(PAPER_OUTPUT * scale), STUDY_BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Reach:
    """How much of each figure is measured."""

    lengths: tuple[int, ...]
    length_requests: int
    block_sizes: tuple[int, ...]
    block_size_tokens: int
    """Length of both requests."""
    victims: tuple[int, ...]
    """Of one overflow."""
    victim_tokens: int
    """Length of every request beside them, too; whole blocks."""
    passes: int
    repeats: int
    """Of every arm and level, per pass."""
    scale: float
    """What the lengths of the paper's requests are multiplied by."""
    served_requests: int
    levels: tuple[int, ...]
    """Of memory, percent."""
    served_passes: int
    served_repeats: int
    """Of every level and policy, per pass."""
    timeline_repeats: int
    learning: Extent
    """What the learned policy is trained on."""

    @property
    def load(self) -> Load:
        return load_of(self.scale, self.served_requests)


_LEARNING = {"repeats": 1, "check_pairs": 0, "max_extra": 1, "max_others": 20}
QUICK = Reach(
    lengths=(64, 128, 256, 512), length_requests=16, block_sizes=(32, 64, 128), block_size_tokens=384,
    victims=(1, 2, 4, 8), victim_tokens=128, passes=2, repeats=3,
    scale=1 / 8, served_requests=PAPER_REQUESTS, levels=(10, 20, 30, 40, 50, 60),
    served_passes=1, served_repeats=3, timeline_repeats=2,
    learning=Extent((32,), states=48, passes=1, max_tokens=512, max_batch_tokens=4000, model_tokens=2048,
                    **_LEARNING | {"repeats": 2}),
)  # fmt: skip
FULL_CPU = Reach(
    lengths=(64, 128, 256, 512, 1024), length_requests=16, block_sizes=(32, 64, 128, 256), block_size_tokens=768,
    victims=(1, 2, 4, 8, 12), victim_tokens=128, passes=3, repeats=4,
    scale=1 / 4, served_requests=PAPER_REQUESTS, levels=(10, 20, 30, 40, 50, 60),
    served_passes=3, served_repeats=2, timeline_repeats=2,
    learning=Extent((32,), states=64, passes=3, max_tokens=1024, max_batch_tokens=8000, model_tokens=4096,
                    **_LEARNING),
)  # fmt: skip
FULL_DEVICE = Reach(
    lengths=(256, 512, 1024, 2048, 4096, 8192), length_requests=16, block_sizes=(16, 32, 64, 128),
    block_size_tokens=4096,
    victims=(1, 2, 4, 6), victim_tokens=256, passes=3, repeats=4,
    scale=1.0, served_requests=PAPER_REQUESTS, levels=(10, 20, 30, 40, 50, 60),
    served_passes=3, served_repeats=1, timeline_repeats=1,
    learning=Extent((32,), states=64, passes=3, max_tokens=4096, max_batch_tokens=40000, model_tokens=16384,
                    **_LEARNING),
)  # fmt: skip


ENGINE_S = 18.0
"""To start an engine, warm it up and write its trace."""
WINDOW_S = 0.2
SERVED_S_PER_TOKEN = 0.0004
"""Of output, at the memory levels of the study."""


@dataclass(frozen=True, slots=True)
class Step:
    """One engine's share of the study."""

    part: Part
    work_s: Mapping[str, float]
    """By what is measured, a figure or :data:`LEARNING`: very roughly how long it takes on two cores. Only shares of
    the whole are made of it."""

    @property
    def figures(self) -> tuple[str, ...]:
        return tuple(self.work_s)

    @property
    def names(self) -> tuple[str, ...]:
        """Of what is measured, in the study's plan."""
        return tuple(f"{figure}-{self.part.name}" for figure in self.work_s)

    @property
    def title(self) -> str:
        return f"{'+'.join(self.work_s)}-{self.part.name}"

    @property
    def expected_s(self) -> float:
        """0 where there is nothing to do."""
        return ENGINE_S + sum(self.work_s.values()) if self.work_s else 0.0

    def without(self, done: Container[str]) -> Step:
        """What is left of it."""
        left = {f: s for f, s in self.work_s.items() if f"{f}-{self.part.name}" not in done}
        return replace(self, work_s=left)


def steps_of(reach: Reach, figures: Sequence[str], device: bool) -> list[Step]:
    """Single overflows first, passes interleaved over engines, every other one backwards; then what the learned policy
    is trained on; then what is served."""
    single = tuple(figure for figure in (SEQUENCE_LENGTH, EVICTED_TOKENS) if figure in figures)
    kinds: list[tuple[tuple[str, ...], int, bool]] = [(single, STUDY_BLOCK_SIZE, True)] if single else []
    if BLOCK_SIZE in figures:
        kinds += [((BLOCK_SIZE,), size, pin) for size in reach.block_sizes for pin in (True, False)[: 1 + device]]
    found = []
    for number in range(reach.passes):
        for some, size, pinned in kinds if number % 2 == 0 else reversed(kinds):
            work_s = {one: 3 * reach.repeats * WINDOW_S * len(study_states(reach, one, size)) for one in some}
            found.append(_step(number, work_s, size, pinned))
    served = tuple(figure for figure in SERVED if figure in figures)
    if not served:
        return found
    for number in range(reach.learning.passes):
        found.append(_step(number, {LEARNING: 3 * reach.learning.repeats * WINDOW_S * reach.learning.states}))
    for number in range(reach.served_passes):
        tokens = {one: len(runs_of(reach, one, number, 0)) * reach.load.all_output_tokens for one in served}
        found.append(_step(number, {one: SERVED_S_PER_TOKEN * count for one, count in tokens.items()}))
    return found


def _step(number: int, work_s: Mapping[str, float], size: int = STUDY_BLOCK_SIZE, pinned: bool = True) -> Step:
    return Step(Part(f"b{size}-pass{number}" + ("" if pinned else PAGEABLE), number, size, pinned), work_s)


def study_states(reach: Reach, figure: str, block_size: int) -> tuple[State, ...]:
    """Real preemptions, for want of memory: everybody is as long as the victim, which is the last that was admitted.

    Raises ValueError for lengths that no such overflow can be made of.
    """
    if figure == EVICTED_TOKENS:
        return _evicted_states(reach, block_size)
    if figure == SEQUENCE_LENGTH:
        levels = [(tokens, tokens, reach.length_requests) for tokens in reach.lengths]
    else:
        levels = [(block_size, reach.block_size_tokens, 2)]
    return tuple(
        _state(state_id(figure, level), block_size, tokens - DECODED, DECODED, requests)
        for level, tokens, requests in levels
    )


def _evicted_states(reach: Reach, block_size: int) -> tuple[State, ...]:
    """All beside as many requests as the largest overflow wants."""
    blocks = reach.victim_tokens // block_size
    if reach.victim_tokens % block_size or block_size <= ALIGNING:
        raise InputError(f"victim_tokens is {reach.victim_tokens}, should be whole blocks of {block_size} tokens")
    requests = running_for(max(reach.victims), blocks)
    return tuple(
        replace(
            _state(state_id(EVICTED_TOKENS, count), block_size, reach.victim_tokens - ALIGNING, 2, requests),
            victims=count,
        )
        for count in reach.victims
    )


def _state(name: str, block_size: int, prompt_tokens: int, decoded_tokens: int, requests: int) -> State:
    return State(
        state_id=name,
        block_size=block_size,
        cause="memory",
        prompt_tokens=prompt_tokens,
        decoded_tokens=decoded_tokens,
        other_prompts=(prompt_tokens,) * (requests - 1),
        waiting=0,
        spare_blocks=0,
    )


@dataclass(frozen=True, slots=True)
class ServedRun:
    """The load served to its end once."""

    state_id: str
    level: int
    arm: str
    repeat: int


def runs_of(reach: Reach, figure: str, number: int, seed: int) -> list[ServedRun]:
    """What the part of pass ``number`` serves: in each repeat levels in an order of its own, at each level policies."""
    rng = random.Random(f"{seed}/runs/{figure}/{number}")
    levels, repeats = (
        (reach.levels, reach.served_repeats) if figure == MEMORY else ((TIMELINE_LEVEL,), reach.timeline_repeats)
    )
    assert figure in (MEMORY, TIMELINE), figure
    return [
        ServedRun(state_id(figure, level), level, arm, number * 100 + repeat)
        for repeat in range(repeats)
        for level in rng.sample(levels, len(levels))
        for arm in rng.sample(ARMS, len(ARMS))
    ]


def time_left(steps: Sequence[Step], at: int, share: float, elapsed_s: float) -> float | None:
    """Seconds, from how long what was done took beside what was expected; None while nothing is done.

    ``at``: the step at work, ``share`` of it done.
    """
    done = sum(step.expected_s for step in steps[:at]) + share * steps[at].expected_s
    left = sum(step.expected_s for step in steps[at:]) - share * steps[at].expected_s
    return None if done <= 0 else elapsed_s / done * left
