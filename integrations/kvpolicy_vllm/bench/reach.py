"""How much of the overflow study is measured (its reach), and its division into parts, one engine each. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from kvpolicy.errors import InputError
from kvpolicy.overflow import BLOCK_SIZE, EVICTED_TOKENS, MEMORY, SEQUENCE_LENGTH, SERVED, TIMELINE, state_id
from kvpolicy_vllm.bench.profile_parts import PASS_REPEATS, Extent, Part
from kvpolicy_vllm.bench.states import State, running_for

DECODED_TOKENS = 4
"""Minimum number of tokens that every request has emitted before the overflow."""
ALIGNMENT_TOKENS = 20
"""Prompts of requests that are to need a block in the same step end this many tokens before the end of a block."""
STUDY_BLOCK_SIZE = 32
"""Block size of the engines of all figures but block-size; CPU engines need a multiple of 32."""
LEARNING = "learning"
"""Prefix of the names of the parts that the learned policy is trained on."""
ARMS = ("recompute", "swap", "learned")
"""Names of the policies in served runs."""
PAPER_REQUESTS, PAPER_PROMPT, PAPER_OUTPUT = 32, 1500, 1024
TIMELINE_LEVEL = 12


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of equal size that arrive together."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    block_size: int
    held_blocks: int | None = None
    """Blocks that a request needs at full length, over several block tables; None with one, which holds every token."""
    max_held_blocks: int | None = None
    """Blocks that it holds meanwhile, at most; None as above."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def blocks_each(self) -> int:
        """Blocks of a request at full length."""
        return math.ceil(self.total_tokens / self.block_size) if self.held_blocks is None else self.held_blocks

    @property
    def all_blocks(self) -> int:
        """Blocks that hold every request at full length, plus the one that vLLM keeps for itself."""
        return self.requests * self.blocks_each + 1

    @property
    def all_output_tokens(self) -> int:
        return self.requests * self.output_tokens

    def blocks_at(self, level: int) -> int:
        """Blocks of an engine with ``level`` percent of the memory, and at least enough for one request."""
        blocks = round(level / 100 * self.requests * self.blocks_each)
        most = self.blocks_each if self.max_held_blocks is None else self.max_held_blocks
        return max(blocks, most + 1) + 1

    def scaling(self) -> str:
        """Comparison of this load with the paper's, to print below a figure."""
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
    """How much is measured for each figure."""

    lengths: tuple[int, ...]
    length_requests: int
    block_sizes: tuple[int, ...]
    block_size_tokens: int
    """Length of both requests."""
    victims: tuple[int, ...]
    """Numbers of victims per overflow."""
    victim_tokens: int
    """Length of the victims and of all other requests; whole blocks."""
    passes: int
    repeats: int
    """Windows per arm and level, per pass."""
    scale: float
    """Factor on the lengths of the paper's requests."""
    served_requests: int
    levels: tuple[int, ...]
    """Memory levels, percent."""
    served_passes: int
    served_repeats: int
    """Runs per level and policy, per pass."""
    timeline_repeats: int
    learning: Extent
    """Extent of the profile that the learned policy is trained on."""

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
"""Expected seconds to start an engine, warm it up and write its trace."""
WINDOW_S = 0.2
SERVED_S_PER_TOKEN = 0.0004
"""Expected seconds per output token, at the memory levels of the study."""


@dataclass(frozen=True, slots=True)
class Step:
    """One engine's share of the study."""

    part: Part
    work_s: Mapping[str, float]
    """Rough duration on two cores, by what is measured: a figure or :data:`LEARNING`. Only its proportions matter."""

    @property
    def figures(self) -> tuple[str, ...]:
        return tuple(self.work_s)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of what is measured, as in the study's plan file."""
        return tuple(f"{figure}-{self.part.name}" for figure in self.work_s)

    @property
    def title(self) -> str:
        return f"{'+'.join(self.work_s)}-{self.part.name}"

    @property
    def expected_s(self) -> float:
        """Expected duration; 0 where nothing is left to measure."""
        return ENGINE_S + sum(self.work_s.values()) if self.work_s else 0.0

    def without(self, done: Container[str]) -> Step:
        """The step without what is done already."""
        remaining = {f: s for f, s in self.work_s.items() if f"{f}-{self.part.name}" not in done}
        return replace(self, work_s=remaining)


def steps_of(reach: Reach, figures: Sequence[str], device: bool) -> list[Step]:
    """Steps of the study: first single overflows, with passes interleaved over engines and every other pass in reverse;
    then the profile for the learned policy; then the served runs."""
    single = tuple(figure for figure in (SEQUENCE_LENGTH, EVICTED_TOKENS) if figure in figures)
    kinds: list[tuple[tuple[str, ...], int, bool]] = [(single, STUDY_BLOCK_SIZE, True)] if single else []
    if BLOCK_SIZE in figures:
        kinds += [((BLOCK_SIZE,), size, pin) for size in reach.block_sizes for pin in (True, False)[: 1 + device]]
    steps = []
    for number in range(reach.passes):
        for measured, size, pinned in kinds if number % 2 == 0 else reversed(kinds):
            work_s = {f: 3 * reach.repeats * WINDOW_S * len(study_states(reach, f, size)) for f in measured}
            steps.append(_step(number, work_s, size, pinned))
    served = tuple(figure for figure in SERVED if figure in figures)
    if not served:
        return steps
    for number in range(reach.learning.passes):
        steps.append(_step(number, {LEARNING: 3 * reach.learning.repeats * WINDOW_S * reach.learning.states}))
    for number in range(reach.served_passes):
        tokens = {figure: len(runs_of(reach, figure, number, 0)) * reach.load.all_output_tokens for figure in served}
        steps.append(_step(number, {figure: SERVED_S_PER_TOKEN * count for figure, count in tokens.items()}))
    return steps


def _step(number: int, work_s: Mapping[str, float], size: int = STUDY_BLOCK_SIZE, pinned: bool = True) -> Step:
    return Step(Part.of(number, size, pinned), work_s)


def study_states(reach: Reach, figure: str, block_size: int) -> tuple[State, ...]:
    """States with natural preemptions: all requests are as long as the victim, which is admitted last.

    Raises InputError for lengths that such an overflow is impossible with.
    """
    if figure == EVICTED_TOKENS:
        return _evicted_states(reach, block_size)
    if figure == SEQUENCE_LENGTH:
        levels = [(tokens, tokens, reach.length_requests) for tokens in reach.lengths]
    else:
        levels = [(block_size, reach.block_size_tokens, 2)]
    return tuple(
        _state(state_id(figure, level), block_size, tokens - DECODED_TOKENS, DECODED_TOKENS, requests)
        for level, tokens, requests in levels
    )


def _evicted_states(reach: Reach, block_size: int) -> tuple[State, ...]:
    """States of figure evicted-tokens. All have as many requests as the largest overflow needs."""
    blocks = reach.victim_tokens // block_size
    if reach.victim_tokens % block_size or block_size <= ALIGNMENT_TOKENS:
        raise InputError(f"victim_tokens is {reach.victim_tokens}, should be whole blocks of {block_size} tokens")
    requests = running_for(max(reach.victims), blocks)
    return tuple(
        replace(
            _state(state_id(EVICTED_TOKENS, count), block_size, reach.victim_tokens - ALIGNMENT_TOKENS, 2, requests),
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
    """One run of the load, served to its end."""

    state_id: str
    level: int
    arm: str
    repeat: int


def runs_of(reach: Reach, figure: str, number: int, seed: int) -> list[ServedRun]:
    """Runs of pass ``number``: per repeat the levels in random order, at each level the policies in random order."""
    rng = random.Random(f"{seed}/runs/{figure}/{number}")
    levels, repeats = (
        (reach.levels, reach.served_repeats) if figure == MEMORY else ((TIMELINE_LEVEL,), reach.timeline_repeats)
    )
    assert figure in (MEMORY, TIMELINE), figure
    return [
        ServedRun(state_id(figure, level), level, arm, number * PASS_REPEATS + repeat)
        for repeat in range(repeats)
        for level in rng.sample(levels, len(levels))
        for arm in rng.sample(ARMS, len(ARMS))
    ]


def time_left(steps: Sequence[Step], current: int, share: float, elapsed_s: float) -> float | None:
    """Estimated seconds left, from the ratio of elapsed to expected time so far; None while nothing is done.

    ``current``: index of the current step, of which ``share`` is done.
    """
    done_s = sum(step.expected_s for step in steps[:current]) + share * steps[current].expected_s
    remaining_s = sum(step.expected_s for step in steps[current:]) - share * steps[current].expected_s
    return None if done_s <= 0 else elapsed_s / done_s * remaining_s
