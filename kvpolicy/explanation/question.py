"""A question about a victim, and the full situation that it resolves to, with gaps filled from the cost model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpolicy.cost import FittedModel
from kvpolicy.cost.model import Provenance
from kvpolicy.events import Preemption
from kvpolicy.fields import AMOUNT, COUNT, WrongValue, option, validate


@dataclass(frozen=True, slots=True)
class Question:
    """A victim and its surroundings. Fields that are None are filled from the model; see :func:`resolve`."""

    tokens: int = option("Computed tokens of the victim.", rule=COUNT)
    running: int = option("Other running requests.", 0, AMOUNT)
    free: int = option("Free KV blocks of the device.", 0, AMOUNT)
    waiting: int = option("Waiting requests.", 0, AMOUNT)
    block_size: int | None = option("Tokens per block. Default: the first size of the model.", None, COUNT)
    shared: int = option("Blocks that the victim shares with other requests.", 0, AMOUNT)
    hit: float | None = option(
        "Blocks expected on the device when the victim returns. Default: the shared ones.", None, AMOUNT
    )
    save: float | None = option("Blocks that a swap is expected to copy out. Default: all it holds.", None, AMOUNT)
    batch_tokens: int | None = option(
        "Total tokens of the other running requests. Default: each as long as the victim.", None, AMOUNT
    )
    segment_bytes: int | None = option("Contiguous bytes per piece of a copy.", None, COUNT)
    queued_save: int = option("Bytes already queued to be saved.", 0, AMOUNT, metavar="BYTES")
    queued_load: int = option("Bytes already queued to be loaded.", 0, AMOUNT, metavar="BYTES")
    pageable: bool = option("Ask about host memory that is not page-locked.", False)

    def __post_init__(self) -> None:
        validate(self)
        if self.batch_tokens and not self.running:
            raise WrongValue("batch_tokens", f"is {self.batch_tokens} with 0 running, should be 0 then")


@dataclass(frozen=True, slots=True)
class ResolvedQuestion:
    """A full situation."""

    situation: Preemption
    assumed: tuple[str, ...]
    """What was assumed because the question left it open."""


def resolve(model: FittedModel, question: Question) -> ResolvedQuestion:
    """Complete the question to a situation.

    ``block_size`` defaults to the first that the model was measured on; ``batch_tokens`` to others as long as the
    victim, up to the trained maximum; ``segment_bytes`` to that of the model's traces, or one layer's part of a block.
    Raises WrongValue for more shared, surviving or saved blocks than the victim has, for fewer surviving than shared
    ones, and for segments larger than a block.
    """
    sizes, assumed = model.provenance.block_sizes, []
    size = sizes[0] if question.block_size is None else question.block_size
    if question.block_size is None and len(sizes) > 1:
        assumed.append(f"blocks of {size} tokens, the first size the model was measured on")
    tokens, running, shared = question.tokens, question.running, question.shared
    held = model.provenance.held_blocks(tokens, size)
    if shared > held:
        raise WrongValue("shared", f"is {shared}, should be at most the {held} blocks that {tokens} tokens take")
    hit, save = float(shared if question.hit is None else question.hit), question.save
    if not shared <= hit <= held:
        raise WrongValue("hit", f"is {hit:g}, should be from the {shared} shared blocks to the {held} that it holds")
    if save is not None and save > held:
        raise WrongValue("save", f"is {save:g}, should be at most the {held} blocks that {tokens} tokens take")
    block_bytes = round(size * model.provenance.kv_bytes_per_token)
    segment_bytes, batch_tokens = question.segment_bytes, question.batch_tokens
    if segment_bytes is None:
        segment_bytes = _segment_bytes(model, size, block_bytes)
        assumed.append(f"copies in pieces of {segment_bytes} bytes")
    elif segment_bytes > block_bytes:
        raise WrongValue("segment_bytes", f"is {segment_bytes}, should be at most the {block_bytes} bytes of a block")
    if batch_tokens is None:
        batch_tokens = _batch_tokens(model, tokens, running)
        if running:
            assumed.append(f"{batch_tokens} tokens of the other running requests")
    situation = Preemption(
        time_s=0.0, computed_tokens=tokens, prompt_tokens=tokens, output_tokens=0, block_size=size,
        block_bytes=block_bytes, segment_bytes=segment_bytes, held_blocks=held, shared_blocks=shared, hashed_blocks=0,
        hit_blocks=hit, save_blocks=float(held if save is None else save), device_blocks=held + question.free,
        free_blocks=question.free, short_blocks=0 if question.free else 1, host_blocks=held, free_host_blocks=held,
        running_requests=running, waiting_requests=question.waiting, batch_tokens=batch_tokens,
        queued_save_bytes=question.queued_save, queued_load_bytes=question.queued_load,
        earlier_preemptions=0, priority=0, cause="memory",
    )  # fmt: skip
    if not model.provenance.one_table:
        # The same share of the tokens as of the blocks survives: which blocks do is not asked.
        situation = replace(situation, hashed_tokens=0, hit_tokens=tokens * hit / held)
    return ResolvedQuestion(situation, tuple(assumed))


def with_length(situation: Preemption, tokens: int, place: Provenance | None = None) -> Preemption:
    """The same situation with a victim of ``tokens`` tokens. Of its blocks the same share is saved, and of those that
    are not shared the same share survives. ``place``: where the engine has several block tables, which it knows."""
    held_before, shared_before = situation.held_blocks, situation.shared_blocks
    size = situation.block_size
    held = -(-tokens // size) if place is None else place.held_blocks(tokens, size)
    shared = min(shared_before, held)
    survive = max(0.0, situation.hit_blocks - shared_before)
    if survive:
        survive = (held - shared) * survive / (held_before - shared_before)
    hit_tokens = situation.hit_tokens
    if hit_tokens:
        hit_tokens = tokens * hit_tokens / situation.computed_tokens
    return replace(
        situation, computed_tokens=tokens, prompt_tokens=tokens, held_blocks=held, shared_blocks=shared,
        hit_blocks=shared + survive, save_blocks=held * situation.save_blocks / held_before, hit_tokens=hit_tokens,
    )  # fmt: skip


def with_running(situation: Preemption, running: int) -> Preemption:
    """The same situation with ``running`` others of their present mean length, or the victim's where there are none."""
    running_before = situation.running_requests
    each = situation.batch_tokens / running_before if running_before else float(situation.computed_tokens)
    return replace(situation, running_requests=running, batch_tokens=round(each * running))


def _segment_bytes(model: FittedModel, block_size: int, block_bytes: int) -> int:
    """Bytes a copy moves at once: per token as in the traces if that is constant, else one layer's part of a block."""
    low, high = model.ranges["swap"]["segment_bytes"]
    sizes = model.provenance.block_sizes
    per_token = low / min(sizes)
    if per_token > 0 and per_token == high / max(sizes):
        return max(1, round(per_token * block_size))
    return max(1, block_bytes // model.provenance.block_layers)


def _batch_tokens(model: FittedModel, tokens: int, running: int) -> int:
    """Tokens of the other requests: each as long as the victim, at most the trained maximum."""
    max_trained = model.ranges["recompute"]["batch_tokens"][1]
    total = tokens * running
    return min(total, round(max_trained)) if max_trained > 0 else total
