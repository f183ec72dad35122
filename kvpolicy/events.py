"""The nouns: what is known at a preemption, what can be done, what it cost.

Every other module speaks in these frozen records; each field has its home here.
Units are in the names: ``_s`` seconds, ``_bytes`` bytes, ``_tokens`` tokens, ``_blocks`` KV blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, Literal, TypeVar, cast

Record = TypeVar("Record")

Kind = Literal["recompute", "swap"]
Cause = Literal["memory", "forced", "reset"]
Ending = Literal["resumed", "aborted", "superseded"]
Direction = Literal["save", "load"]

KINDS: tuple[Kind, ...] = ("recompute", "swap")
CAUSES: tuple[Cause, ...] = ("memory", "forced", "reset")
ENDINGS: tuple[Ending, ...] = ("resumed", "aborted", "superseded")
DIRECTIONS: tuple[Direction, ...] = ("save", "load")


def copy_pieces(block_bytes: int, segment_bytes: int) -> int:
    """Contiguous pieces that one block comes in; 1 for segments that are not smaller, or of no size."""
    return max(1, block_bytes // max(1, segment_bytes))


@dataclass(frozen=True, slots=True)
class Preemption:
    """A situation: what is known when a request is about to lose its KV blocks.

    Block counts and bytes are those of one rank; ``block_bytes`` is one block over all layers of that rank.
    """

    time_s: float
    """Monotonic clock of the engine core."""
    computed_tokens: int
    """Tokens whose KV the request holds; what a recompute would have to prefill again at most."""
    prompt_tokens: int
    output_tokens: int
    block_size: int
    """Tokens per KV block."""
    block_bytes: int
    segment_bytes: int
    """Bytes of one block that lie contiguous in device memory: what a single copy moves."""
    held_blocks: int
    shared_blocks: int
    """Of the held blocks, those other requests hold too: they survive the preemption."""
    hashed_blocks: int
    """Of the held blocks, those in the prefix cache: they may survive until they are needed."""
    device_blocks: int
    """KV blocks of the device in all."""
    free_blocks: int
    short_blocks: int
    """Blocks the failed allocation lacked; 0 where no allocation failed."""
    host_blocks: int
    free_host_blocks: int
    running_requests: int
    """Requests running besides the victim."""
    waiting_requests: int
    batch_tokens: int
    """Tokens of context of the running requests besides the victim."""
    queued_save_bytes: int
    queued_load_bytes: int
    earlier_preemptions: int
    """How often this request was preempted before."""
    priority: int
    cause: Cause

    @property
    def copy_bytes(self) -> int:
        """Bytes one direction of a swap moves: the held blocks, partial last one included."""
        return self.held_blocks * self.block_bytes

    @property
    def copy_segments(self) -> int:
        """Contiguous pieces those bytes come in."""
        return self.held_blocks * copy_pieces(self.block_bytes, self.segment_bytes)


@dataclass(frozen=True, slots=True)
class Option:
    """One thing that can be done with a victim."""

    kind: Kind
    load_tokens: int = 0
    """Tokens to load at resume; 0 for a recompute."""
    tier: str = ""
    """Where the copy is kept; empty for a recompute."""
    synchronous: bool = False
    """Whether the load stalls the batch."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted cost of one option, seconds.

    ``engine_s`` is extra engine time in all: ``save_s + load_s + recompute_s``. ``low_s`` and ``high_s`` bound it
    with the model's stated confidence. ``log_ratio_low`` and ``log_ratio_high`` bound
    ``log(this option's engine_s / the first option's engine_s)``; both 0 on the first option.
    """

    engine_s: float
    save_s: float
    load_s: float
    recompute_s: float
    stall_s: float
    """Delay put on the other running requests, request-seconds."""
    low_s: float
    high_s: float
    log_ratio_low: float = 0.0
    log_ratio_high: float = 0.0
    extrapolated: bool = False
    """Whether the situation lies outside what the model was trained on."""
    victim_delay_s: float | None = None
    """Until the victim is back at its token, its wait for free blocks left out; None where the model cannot tell."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy chose, with what probability, on which grounds; later what was really executed."""

    options: tuple[Option, ...]
    probabilities: tuple[float, ...]
    chosen: int
    """Index into ``options``."""
    costs: tuple[Cost, ...]
    """One per option; empty where the policy uses none."""
    policy: str
    state: str
    """The policy's frozen state at this decision, JSON."""
    executed: Kind | None = None
    reason: str = ""
    """Why ``executed`` is not what was chosen, or why there was no choice; empty where the policy had its way."""

    @property
    def intended(self) -> Kind:
        return self.options[self.chosen].kind


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one preemption. Times are measured; nothing here is a prediction.

    ``engine_s`` and ``others_delay_s`` come from the step table (:mod:`kvpolicy.attribution.offline`); ``None`` until
    then.
    """

    preemption_id: str
    ended: Ending
    closed_s: float
    victim_delay_s: float
    """From preemption until the victim was back at the token it had reached, less ``wait_blocks_s``."""
    wait_blocks_s: float
    """Its wait for free blocks, which it pays under either option."""
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
    """Of the copy: never given twice, so that a request that comes back is not taken for what it was before."""
    direction: Direction
    ok: bool
    bytes: int
    segments: int
    """Contiguous pieces that the bytes came in."""
    segment_bytes: int
    pinned: bool
    """Whether the host memory is page-locked."""
    queued_bytes: int
    """Of the transfers of its direction that were not through when it was submitted."""
    submit_s: float
    start_s: float
    end_s: float
    error: str = ""


def copy_was_used(executed: Kind, loaded_tokens: int, recomputed_tokens: int) -> bool:
    """Whether a resumed preemption did what was executed: False for a swap of which nothing was loaded, because that
    failed or the engine would not, and tokens were computed again. What it cost is the cost of neither option.

    One recomputed token is no sign of it: the last token known is always computed, to sample the next.
    """
    return executed != "swap" or loaded_tokens > 0 or recomputed_tokens <= 1


def as_row(record: Any) -> dict[str, Any]:
    """A record's own fields by name, not descending into nested records."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def situation_of(row: Mapping[str, Any]) -> Preemption:
    """The situation out of a row of the ``decisions`` table."""
    return Preemption(**{name: row[name] for name in SITUATION_FIELDS})


SITUATION_FIELDS: tuple[str, ...] = tuple(field.name for field in fields(Preemption))


def draft_of(record: type[Record]) -> Callable[..., Record]:
    """What builds a ``record`` from the same arguments; equal in everything but time.

    A frozen dataclass sets each field through ``object.__setattr__``, which for a record of ten fields takes longer
    than computing them. Here a class with the same slots that is not frozen yet takes the values, and then becomes the
    record.

    ``record``: a frozen dataclass with slots, without default factories or code of its own at construction.
    """

    def freeze(self: Any) -> None:
        self.__class__ = record

    given = [(one.name, one.type, field(default=one.default)) for one in fields(cast(Any, record))]
    draft = make_dataclass(record.__name__, given, slots=True, namespace={"__post_init__": freeze})
    return cast(Callable[..., Record], draft)
