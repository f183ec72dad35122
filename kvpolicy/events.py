"""The central records: the situation at a preemption, the options, the decision, its cost and its outcome.

All other modules use these frozen records. Units are in the names: ``_s`` seconds, ``_bytes`` bytes, ``_tokens``
tokens, ``_blocks`` KV blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Any, Literal, TypeVar, cast

Record = TypeVar("Record")

Kind = Literal["recompute", "swap"]
Cause = Literal["memory", "forced", "reset", "displaced"]
Ending = Literal["resumed", "aborted", "superseded"]
Direction = Literal["save", "load"]

KINDS: tuple[Kind, ...] = ("recompute", "swap")
CAUSES: tuple[Cause, ...] = ("memory", "forced", "reset", "displaced")
ENDINGS: tuple[Ending, ...] = ("resumed", "aborted", "superseded")
DIRECTIONS: tuple[Direction, ...] = ("save", "load")
TOOL_COPY = "tool"
"""``preemption_id`` in table ``transfers`` of copies that a measuring tool makes. They belong to no preemption."""
CACHE_COPY = "cache"
"""The same of copies that the cache of prompts makes: saves of what no preempted request needs, and loads of what a
request finds."""
OTHER_COPIES = (TOOL_COPY, CACHE_COPY)
"""Copies that belong to no preemption."""


def copy_pieces(block_bytes: int, segment_bytes: int) -> int:
    """Contiguous pieces of one block; 1 if segments are not smaller than the block, or have no size."""
    return max(1, block_bytes // max(1, segment_bytes))


@dataclass(frozen=True, slots=True)
class Preemption:
    """A situation: what is known when a request is about to lose its KV blocks.

    Block counts and bytes are those of one rank. ``block_bytes`` is the size of one block over all layers of that rank.
    A victim's blocks are counted over all of its block tables, of which a model has several where its layers keep
    different parts of what a request computed. Tokens do not follow from blocks there: ``hashed_tokens`` and
    ``hit_tokens`` say them. With one block table both are None, and every full block has ``block_size`` tokens.
    """

    time_s: float
    """Monotonic clock of the engine core."""
    computed_tokens: int
    """Tokens whose KV the request holds: the most that a recompute would prefill again."""
    prompt_tokens: int
    output_tokens: int
    block_size: int
    """Tokens per KV block; of several block tables, in the smallest ones."""
    block_bytes: int
    segment_bytes: int
    """Contiguous bytes of one block in device memory, which a single copy moves."""
    held_blocks: int
    """Blocks that a copy of the request needs."""
    shared_blocks: int
    """Held blocks that other requests hold too; they survive the preemption."""
    hashed_blocks: int
    """Held blocks in the prefix cache; they may survive until they are needed. Of several block tables, the held blocks
    that need not be loaded if ``hashed_tokens`` are found."""
    hit_blocks: float
    """Held blocks expected to be found on the device at resume, including those that other requests hold."""
    save_blocks: float
    """Held blocks that a swap is expected to copy out: those that will be lost and are not in host memory."""
    device_blocks: int
    """Total KV blocks of the device."""
    free_blocks: int
    short_blocks: int
    """Blocks that the failed allocation lacked; 0 if no allocation failed."""
    host_blocks: int
    free_host_blocks: int
    """Host blocks that a copy of the request could have: those that are free and, where these are fewer than it needs,
    those that only copies use that save less per block, or, without predictions, those of shorter requests."""
    running_requests: int
    """Running requests other than the victim."""
    waiting_requests: int
    batch_tokens: int
    """Context tokens of the running requests other than the victim."""
    queued_save_bytes: int
    queued_load_bytes: int
    earlier_preemptions: int
    """Earlier preemptions of this request."""
    priority: int
    cause: Cause
    absence_tokens: float | None = None
    """Tokens expected to be written to the device until the request has blocks again, learned by cause; None where
    nothing is expected, as after a reset, in a profile and in older traces. ``hit_blocks`` follows from it."""
    hashed_tokens: int | None = None
    """Tokens for which each of several block tables has, at the preemption, what the request needs; None with one block
    table, and in older traces, in which ``hashed_blocks`` and ``hit_blocks`` of several tables are these tokens and
    ``hit_tokens``, divided by ``block_size``."""
    hit_tokens: float | None = None
    """Tokens expected to be found on the device at resume; None as ``hashed_tokens``."""

    @property
    def cached_tokens(self) -> float:
        """Tokens expected to be found on the device at resume, but for those in shared blocks."""
        return self.hit_blocks * self.block_size if self.hit_tokens is None else self.hit_tokens

    @property
    def copy_bytes(self) -> int:
        """Bytes of all held blocks, including a partial last one: the most that one direction of a swap moves."""
        return self.held_blocks * self.block_bytes

    @property
    def copy_segments(self) -> int:
        """Contiguous pieces of those bytes."""
        return self.held_blocks * copy_pieces(self.block_bytes, self.segment_bytes)


@dataclass(frozen=True, slots=True)
class Option:
    """One thing that can be done with a victim."""

    kind: Kind
    load_tokens: int = 0
    """Tokens to load at resume; 0 for a recompute."""
    tier: str = ""
    """Where the copy is stored; empty for a recompute."""
    synchronous: bool = False
    """Whether the load stalls the batch."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted cost of one option, seconds.

    ``engine_s`` is the total extra engine time: ``save_s + load_s + recompute_s``. ``low_s`` and ``high_s`` bound it
    with the model's stated confidence. ``log_ratio_low`` and ``log_ratio_high`` bound
    ``log(this option's engine_s / the first option's engine_s)``; both are 0 on the first option.
    """

    engine_s: float
    save_s: float
    load_s: float
    recompute_s: float
    stall_s: float
    """Delay of the other running requests, request-seconds."""
    low_s: float
    high_s: float
    log_ratio_low: float = 0.0
    log_ratio_high: float = 0.0
    extrapolated: bool = False
    """Whether the situation lies outside the model's trained range."""
    victim_delay_s: float | None = None
    """Seconds until the victim is back at its token, without its wait for free blocks; None if not predicted."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A policy's choice with its probability and predicted costs, and later the executed option."""

    options: tuple[Option, ...]
    probabilities: tuple[float, ...]
    chosen: int
    """Index into ``options``."""
    costs: tuple[Cost, ...]
    """One per option; empty if the policy uses none."""
    policy: str
    state: str
    """The policy's frozen state at this decision, JSON."""
    executed: Kind | None = None
    reason: str = ""
    """Why ``executed`` differs from the choice, or why there was no choice; empty if the choice was executed."""

    @property
    def intended(self) -> Kind:
        return self.options[self.chosen].kind


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one preemption ended. Times are measured, not predicted.

    ``engine_s`` and ``others_delay_s`` are attributed from the step table (:mod:`kvpolicy.attribution.offline`) and are
    ``None`` until then.
    """

    preemption_id: str
    ended: Ending
    closed_s: float
    victim_delay_s: float
    """From the preemption until the victim was back at the token it had reached, less ``wait_blocks_s``."""
    wait_blocks_s: float
    """Its wait for free blocks, which occurs under either option."""
    local_hit_tokens: int
    loaded_tokens: int
    recomputed_tokens: int
    first_step: int
    last_step: int
    engine_s: float | None = None
    others_delay_s: float | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """One finished direction of a copy on one rank; times on the clock of the engine core's machine."""

    copy_id: int
    """Id of the copy in this direction; never reused. A save in several parts has one for each."""
    direction: Direction
    ok: bool
    bytes: int
    segments: int
    """Contiguous pieces of the bytes."""
    segment_bytes: int
    pinned: bool
    """Whether the host memory is page-locked."""
    queued_bytes: int
    """Bytes of unfinished transfers in the same direction when it was submitted."""
    submit_s: float
    start_s: float
    end_s: float
    error: str = ""


def copy_was_used(executed: Kind, loaded_tokens: int, recomputed_tokens: int) -> bool:
    """Whether the measured cost of a resumed preemption is that of the executed option.

    False for a swap of which nothing was loaded, because the load failed or was refused, and whose tokens were
    recomputed. Its cost is the cost of neither option. A single recomputed token is normal: the last known token is
    always computed, to sample the next.
    """
    return executed != "swap" or loaded_tokens > 0 or recomputed_tokens <= 1


def as_row(record: Any) -> dict[str, Any]:
    """A record's fields by name, without descending into nested records."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def situation_of(row: Mapping[str, Any]) -> Preemption:
    """The situation from a row of the ``decisions`` table."""
    return Preemption(**{name: row[name] for name in SITUATION_FIELDS})


def as_taken_out(situation: Preemption) -> Preemption:
    """The situation of a request that still runs as it will be once it has left the running requests."""
    return replace(
        situation,
        running_requests=situation.running_requests - 1,
        batch_tokens=situation.batch_tokens - situation.computed_tokens,
    )


SITUATION_FIELDS: tuple[str, ...] = tuple(field.name for field in fields(Preemption))


def fast_constructor(record: type[Record]) -> Callable[..., Record]:
    """A faster constructor of ``record``, with the same arguments and result.

    A frozen dataclass sets each field through ``object.__setattr__``, which for a record of ten fields takes longer
    than computing the values. This constructor fills an instance of an unfrozen class with the same slots, and then
    changes its class to the record.

    ``record``: a frozen dataclass with slots, without default factories and without ``__post_init__``.
    """

    def freeze(self: Any) -> None:
        self.__class__ = record

    specifications = [
        (record_field.name, record_field.type, field(default=record_field.default))
        for record_field in fields(cast(Any, record))
    ]
    draft = make_dataclass(record.__name__, specifications, slots=True, namespace={"__post_init__": freeze})
    return cast(Callable[..., Record], draft)
