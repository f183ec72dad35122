"""Divides a profile into parts, one engine each, and makes the job of each part's engine."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvpolicy.fields import WrongValue
from kvpolicy.hardware import available_memory_bytes
from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.settings import GIB
from kvpolicy_vllm.bench.engine_process import device_arguments, plugin_arguments
from kvpolicy_vllm.bench.job import MAX_EXTRA, Job
from kvpolicy_vllm.bench.states import Span, State, check_states, grid
from kvpolicy_vllm.plugin.settings import Settings

MIN_TOKENS = 64
MAX_HOST_GIB = 4.0
PAGEABLE = "-pageable"
"""Suffix of the ids of states whose copies use memory that is not page-locked: their costs differ."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How much a profile measures."""

    block_sizes: tuple[int, ...]
    states: int
    """States per block size."""
    passes: int
    repeats: int
    """Windows per arm, state and pass."""
    check_pairs: int
    """Pairs of a window and its control (twin), per option, block size and pass."""
    max_tokens: int
    """Computed tokens of the longest victim."""
    max_others: int
    max_batch_tokens: int
    """Context of all running requests together."""
    model_tokens: int
    """The engine's ``max_model_len``, unless the model's own maximum is lower."""
    max_extra: int = MAX_EXTRA
    """Maximum factor by which repeats are multiplied on a noisy machine; 1 bounds the time a profile takes."""

    def span(self, model_tokens: int) -> Span:
        length = min(self.model_tokens, model_tokens)
        max_tokens = min(self.max_tokens, length // 2)
        return Span(MIN_TOKENS, max_tokens, self.max_others, self.max_batch_tokens, length)


QUICK = Extent((32, 64), 24, 2, 1, 10, 1500, 7, 6000, 4096)
FULL_CPU = Extent((32, 64, 128), 40, 3, 2, 10, 3000, 15, 12000, 8192)
FULL_DEVICE = Extent((16, 32, 64, 128), 48, 3, 2, 10, 12000, 15, 60000, 16384)


def extent_of(quick: bool, device: bool) -> Extent:
    if quick:
        return QUICK
    return FULL_DEVICE if device else FULL_CPU


@dataclass(frozen=True, slots=True)
class Part:
    """One engine's share of a profile."""

    name: str
    number: int
    """Number of the pass, from 0."""
    block_size: int
    pin_memory: bool


def parts_of(extent: Extent, device: bool) -> tuple[Part, ...]:
    """All parts: passes interleaved over block sizes, every other one in reverse; pinned and pageable on a device."""
    kinds = [(size, pinned) for size in extent.block_sizes for pinned in ((True, False) if device else (True,))]
    parts = []
    for number in range(extent.passes):
        for size, pinned in kinds if number % 2 == 0 else reversed(kinds):
            name = f"b{size}-pass{number}" + ("" if pinned else PAGEABLE)
            parts.append(Part(name, number, size, pinned))
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class Rig:
    """Settings that all parts of a profile share."""

    llm: Path
    extent: Extent
    link: SimulatedLink | None
    seed: int
    device: bool
    """Whether there is an accelerator."""

    def job(self, part: Part, folder: Path) -> Job:
        """The job of the part's engine; its trace goes into ``folder``."""
        span = self.extent.span(model_length(self.llm))
        states = grid(part.block_size, self.extent.states, span, random.Random(f"{self.seed}/grid/{part.block_size}"))
        checks: tuple[State, ...] = check_states(part.block_size, span)
        if self.device and not part.pin_memory:
            states = tuple(replace(state, state_id=state.state_id + PAGEABLE) for state in states)
            checks = tuple(replace(state, state_id=state.state_id + PAGEABLE) for state in checks)
        blocks = max(state.device_blocks for state in (*states, *checks))
        return Job(
            engine=self.engine_arguments(part, folder / "trace", span, blocks),
            states=states,
            checks=checks,
            check_pairs=self.extent.check_pairs,
            repeats=self.extent.repeats,
            first_repeat=part.number * 100,
            seed=self.seed,
            max_extra=self.extent.max_extra,
        )

    def engine_arguments(self, part: Part, trace: Path, span: Span, blocks: int) -> dict[str, Any]:
        """Arguments of :class:`vllm.LLM` for an engine with ``blocks`` KV blocks that records into ``trace``."""
        engine = {
            "model": str(self.llm),
            "skip_tokenizer_init": True,
            "block_size": part.block_size,
            "num_gpu_blocks_override": blocks,
            "max_model_len": span.model_tokens,
            # The defaults of `vllm serve` on these devices; the LLM class has higher ones.
            "max_num_batched_tokens": 8192 if self.device else 2048,
            "max_num_seqs": 64,
            "seed": self.seed,
        }
        settings = Settings(
            policy="always-recompute",  # without effect: every measured decision is pinned
            host_gib=min(MAX_HOST_GIB, 0.4 * available_memory_bytes() / GIB),
            link=self.link,
            trace=trace,
            seed=self.seed,
            pin_memory=part.pin_memory,
            source="profile",
        )
        return engine | plugin_arguments(settings) | device_arguments(on_cpu=not self.device)


def model_length(llm: Path) -> int:
    """Maximum number of positions of the model. Raises ValueError where its configuration does not say."""
    path = llm / "config.json"
    try:
        values = json.loads(path.read_text())
        return int(values.get("text_config", values)["max_position_embeddings"])
    except (OSError, ValueError, KeyError) as error:
        raise WrongValue(
            "llm", f"is {llm}, should be a model's folder: {path}: no max_position_embeddings ({error!r})"
        ) from error
