"""Divides a profile into parts, one engine each, and makes the job of each part's engine."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy.fields import WrongValue
from kvpolicy.hardware import Geometry, available_memory_bytes
from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.settings import GIB
from kvpolicy.shape import ConfigError
from kvpolicy.stored_values import read_json, reason_of
from kvpolicy_vllm.bench.engine_process import device_arguments, plugin_arguments
from kvpolicy_vllm.bench.job import MAX_EXTRA, Job
from kvpolicy_vllm.bench.own_server import OwnServer
from kvpolicy_vllm.bench.states import Span, State, check_states, grid
from kvpolicy_vllm.plugin.settings import Settings

MIN_TOKENS = 64
PASS_REPEATS = 100
"""Numbers of repeats that a pass has to itself."""
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

    def of_server(self, server: OwnServer) -> Extent:
        """The same amount of measurements on the user's server: with its blocks, and no more requests at a time.

        Victims are up to half as long as the length that its flags give, so that another request has room beside them.
        """
        others = min(self.max_others, server.max_requests - 1)
        found = replace(self, block_sizes=(server.block_size,), max_others=others)
        if not server.gives_length:
            return found
        length = server.model_tokens
        batch = max(self.max_batch_tokens, length)
        return replace(found, model_tokens=length, max_tokens=length // 2, max_batch_tokens=batch)


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

    @classmethod
    def of(cls, number: int, block_size: int, pin_memory: bool) -> Part:
        """The part of that pass, with its name."""
        return cls(f"b{block_size}-pass{number}{'' if pin_memory else PAGEABLE}", number, block_size, pin_memory)

    def at(self, number: int) -> Part:
        """The same engine in another pass."""
        return Part.of(number, self.block_size, self.pin_memory)

    def has(self, state_id: str) -> bool:
        """Whether the state, or state of the self-check, is one of this engine's."""
        name = state_id.removesuffix(PAGEABLE)
        is_ours = name.startswith(f"b{self.block_size}-") or name.endswith(f"-b{self.block_size}")
        return is_ours and (name == state_id) == self.pin_memory


def parts_of(extent: Extent, device: bool) -> tuple[Part, ...]:
    """All parts: passes interleaved over block sizes, every other one in reverse; pinned and pageable on a device."""
    kinds = [(size, pinned) for size in extent.block_sizes for pinned in ((True, False) if device else (True,))]
    parts = []
    for number in range(extent.passes):
        for size, pinned in kinds if number % 2 == 0 else reversed(kinds):
            parts.append(Part.of(number, size, pinned))
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class Rig:
    """Settings that all parts of a profile share."""

    llm: Path
    """A model's folder, or its id at a hub."""
    extent: Extent
    link: SimulatedLink | None
    seed: int
    device: bool
    """Whether there is an accelerator."""
    server: OwnServer | None = None
    """The server whose engine is measured; None for an engine of kvpolicy's own choice."""
    is_made: bool = False
    """Whether kvpolicy made the model."""

    @property
    def model_tokens(self) -> int:
        """Tokens that a sequence may have at most."""
        return model_length(self.llm) if self.server is None else self.server.model_tokens

    @property
    def block_tables(self) -> int:
        """Block tables of a request."""
        return tables_of(_config_of(self.llm)) if self.server is None else self.server.block_tables

    @property
    def keeps_states(self) -> bool:
        """Whether layers of the model keep states; False where they are not understood, as the engine will say."""
        if self.server is not None:
            return self.server.keeps_states
        try:
            return Geometry.from_config(_config_of(self.llm)).state_layers > 0
        except ConfigError:
            return False

    def job(self, part: Part, folder: Path) -> Job:
        """The job of the part's engine; its trace goes into ``folder``."""
        span = self.extent.span(self.model_tokens)
        states = grid(part.block_size, self.extent.states, span, random.Random(f"{self.seed}/grid/{part.block_size}"))
        checks: tuple[State, ...] = check_states(part.block_size, span)
        if self.device and not part.pin_memory:
            states = tuple(replace(state, state_id=state.state_id + PAGEABLE) for state in states)
            checks = tuple(replace(state, state_id=state.state_id + PAGEABLE) for state in checks)
        blocks = max(state.device_blocks for state in (*states, *checks))
        if self.server is not None:
            blocks = max(blocks, self.server.min_blocks(span.model_tokens, part.block_size))
        return Job(
            engine=self.engine_arguments(part, folder / "trace", span, blocks),
            states=states,
            checks=checks,
            check_pairs=self.extent.check_pairs,
            repeats=self.extent.repeats,
            first_repeat=part.number * PASS_REPEATS,
            seed=self.seed,
            max_extra=self.extent.max_extra,
        )

    def engine_arguments(self, part: Part, trace: Path, span: Span, blocks: int) -> dict[str, Any]:
        """Arguments of :class:`vllm.LLM` for an engine that records into ``trace``, with ``blocks`` KV blocks for each
        block table of a request."""
        engine = {
            "block_size": part.block_size,
            "num_gpu_blocks_override": blocks * self.block_tables,
            "max_model_len": span.model_tokens,
        }
        host_gib = MAX_HOST_GIB
        if self.server is not None:
            host_gib = self.server.host_gib(blocks * part.block_size, MAX_HOST_GIB)
        settings = Settings(
            policy="always-recompute",  # without effect: every measured decision is pinned
            host_gib=min(host_gib, 0.4 * available_memory_bytes() / GIB),
            link=self.link,
            trace=trace,
            seed=self.seed,
            pin_memory=part.pin_memory,
            source="profile",
        )
        return engine | self._own_arguments() | plugin_arguments(settings)

    def _own_arguments(self) -> dict[str, Any]:
        """What an engine is started with whatever is measured on it."""
        if self.server is not None:
            return self.server.engine_arguments(on_cpu=not self.device)
        return {
            "model": str(self.llm),
            "skip_tokenizer_init": True,
            # The defaults of `vllm serve` on these devices; the LLM class has higher ones.
            "max_num_batched_tokens": 8192 if self.device else 2048,
            "max_num_seqs": 64,
            "seed": self.seed,
        } | device_arguments(on_cpu=not self.device, is_made=self.is_made)


def tables_of(config: Mapping[str, Any], windows_whole: bool = False) -> int:
    """Block tables of a request of a model, by its ``config.json``; 1 where its layers are not understood, as the
    engine will say. ``windows_whole``: whether windows are stored whole, in the table of full attention."""
    try:
        geometry = Geometry.from_config(config)
    except ConfigError:
        return 1
    return 1 if windows_whole and not geometry.state_layers else geometry.block_tables


def model_length(llm: Path) -> int:
    """Maximum number of positions of the model. Raises WrongValue where its configuration does not say."""
    values = _config_of(llm)
    try:
        return int(values.get("text_config", values)["max_position_embeddings"])
    except (KeyError, ValueError, TypeError) as error:
        raise _no_model(llm, f"no max_position_embeddings ({error!r})") from error


def _config_of(llm: Path) -> dict[str, Any]:
    try:
        values = read_json(llm / "config.json")
    except (OSError, InputError) as error:
        raise _no_model(llm, reason_of(error)) from error
    if not isinstance(values, dict):
        raise _no_model(llm, "holds no object")
    return values


def _no_model(llm: Path, problem: str) -> WrongValue:
    return WrongValue("llm", f"is {llm}, should be a model's folder: {llm / 'config.json'}: {problem}")
