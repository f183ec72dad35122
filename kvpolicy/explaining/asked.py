"""The situation a question is about: what was said, and what follows from the model where nothing was."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpolicy.cost import FittedModel
from kvpolicy.errors import InputError
from kvpolicy.events import Preemption

MAX_VALUE = 2**53
"""Whole numbers beyond it are not exact as floats."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A situation, and what in it was not said but assumed."""

    situation: Preemption
    assumed: tuple[str, ...]


def asked(
    model: FittedModel,
    tokens: int,
    running: int = 0,
    free: int = 0,
    waiting: int = 0,
    block_size: int | None = None,
    shared: int = 0,
    batch_tokens: int | None = None,
    segment_bytes: int | None = None,
    queued_save: int = 0,
    queued_load: int = 0,
) -> Asked:
    """See :func:`kvpolicy.explaining.explain`. Raises ValueError, naming the flag, for a wrong value."""
    sizes, assumed = model.provenance.block_sizes, []
    size = sizes[0] if block_size is None else block_size
    if block_size is None and len(sizes) > 1:
        assumed.append(f"blocks of {size} tokens, the first size the model was measured on")
    _refuse("--tokens", tokens, 1)
    _refuse("--block-size", size, 1)
    for flag, value in (
        ("--running", running), ("--free", free), ("--waiting", waiting), ("--shared", shared),
        ("--queued-save", queued_save), ("--queued-load", queued_load),
    ):  # fmt: skip
        _refuse(flag, value, 0)
    held = -(-tokens // size)
    if shared > held:
        raise InputError(f"--shared is {shared}, should be at most the {held} blocks that {tokens} tokens take")
    block_bytes = round(size * model.provenance.kv_bytes_per_token)
    if segment_bytes is None:
        segment_bytes = _segment_bytes(model, size, block_bytes)
        assumed.append(f"copies in pieces of {segment_bytes} bytes")
    elif not 1 <= segment_bytes <= block_bytes:
        raise InputError(f"--segment-bytes is {segment_bytes}, should be from 1 to the {block_bytes} bytes of a block")
    if batch_tokens is not None:
        _refuse("--batch-tokens", batch_tokens, 0)
    if batch_tokens is None:
        batch_tokens = _batch_tokens(model, tokens, running)
        if running:
            assumed.append(f"the others hold {batch_tokens} tokens together")
    elif batch_tokens and not running:
        raise InputError(f"--batch-tokens is {batch_tokens} beside {running} running; should be 0 beside 0")
    situation = Preemption(
        time_s=0.0, computed_tokens=tokens, prompt_tokens=tokens, output_tokens=0, block_size=size,
        block_bytes=block_bytes, segment_bytes=segment_bytes, held_blocks=held, shared_blocks=shared, hashed_blocks=0,
        device_blocks=held + free, free_blocks=free, short_blocks=0 if free else 1, host_blocks=held,
        free_host_blocks=held, running_requests=running, waiting_requests=waiting, batch_tokens=batch_tokens,
        queued_save_bytes=queued_save, queued_load_bytes=queued_load, earlier_preemptions=0, priority=0, cause="memory",
    )  # fmt: skip
    return Asked(situation, tuple(assumed))


def as_long_as(situation: Preemption, tokens: int) -> Preemption:
    """The same with a victim of ``tokens`` tokens."""
    held = -(-tokens // situation.block_size)
    shared = min(situation.shared_blocks, held)
    return replace(situation, computed_tokens=tokens, prompt_tokens=tokens, held_blocks=held, shared_blocks=shared)


def beside(situation: Preemption, running: int) -> Preemption:
    """The same beside ``running`` others, each as long as they are there, or as the victim where there are none."""
    before = situation.running_requests
    each = situation.batch_tokens / before if before else float(situation.computed_tokens)
    return replace(situation, running_requests=running, batch_tokens=round(each * running))


def _refuse(flag: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"{flag} is {value}, should be at least {least}")
    if value > MAX_VALUE:
        raise InputError(f"{flag} is {value}, should be at most {MAX_VALUE}")


def _segment_bytes(model: FittedModel, block_size: int, block_bytes: int) -> int:
    """What a copy moves at once: per token as in the traces where that is one number, else one layer's part."""
    low, high = model.ranges["swap"]["segment_bytes"]
    sizes = model.provenance.block_sizes
    per_token = low / min(sizes)
    if per_token > 0 and per_token == high / max(sizes):
        return max(1, round(per_token * block_size))
    return max(1, block_bytes // model.provenance.geometry.layers)


def _batch_tokens(model: FittedModel, tokens: int, running: int) -> int:
    """The others are as long as the victim, within what the model was trained on."""
    most = model.ranges["recompute"]["batch_tokens"][1]
    wanted = tokens * running
    return min(wanted, round(most)) if most > 0 else wanted
