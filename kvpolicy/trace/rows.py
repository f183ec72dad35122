"""Builders of the rows of a trace's tables. The plugin and the simulators write all rows with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvpolicy.events import Decision, Outcome, Preemption, Transfer, as_row
from kvpolicy.order import Choice

Row = dict[str, Any]


class RepeatedParts(Protocol):
    """Recomputed tokens of one preemption in a row of ``steps``; see :mod:`kvpolicy.attribution.ledger`."""

    @property
    def preemption_id(self) -> str: ...

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """Counts in the order of :data:`kvpolicy.attribution.step_time.PARTS`."""
        ...


class StepCounts(Protocol):
    """Counts of a row of ``steps``; see :class:`kvpolicy.attribution.ledger.Step`."""

    number: int
    scheduled_tokens: int
    scheduled_requests: int
    decode_requests: int
    kv_read_tokens: int
    chunk_context: int
    running_requests: int
    waiting_requests: int
    used_blocks: int
    saves: int
    loads: int

    @property
    def lost(self) -> Sequence[str]: ...

    @property
    def repeated(self) -> Sequence[RepeatedParts]: ...

    @property
    def recomputed_tokens(self) -> int: ...


def step_row(step: StepCounts, began_s: float, ended_s: float) -> Row:
    """A row of ``steps``, without the device's own time, which a device reports later, if any does."""
    return {
        "step": step.number,
        "start_s": began_s,
        "duration_s": ended_s - began_s,
        "device_s": None,
        "scheduled_tokens": step.scheduled_tokens,
        "scheduled_requests": step.scheduled_requests,
        "decode_requests": step.decode_requests,
        "kv_read_tokens": step.kv_read_tokens,
        "chunk_context": step.chunk_context,
        "running_requests": step.running_requests,
        "waiting_requests": step.waiting_requests,
        "used_blocks": step.used_blocks,
        "recomputed_tokens": step.recomputed_tokens,
        "preemptions": len(step.lost),
        "saves": step.saves,
        "loads": step.loads,
        "repeated": [_repeated(part) for part in step.repeated] if step.repeated else [],
    }


def _repeated(part: RepeatedParts) -> Row:
    tokens, decodes, kv_read_tokens, chunk_context = part.parts
    return {
        "preemption_id": part.preemption_id,
        "tokens": tokens,
        "kv_read_tokens": kv_read_tokens,
        "chunk_context": chunk_context,
        "decodes": decodes,
    }


def transfer_row(transfer: Transfer, *, preemption_id: str, step: int, tier: str) -> Row:
    """A row of ``transfers``. ``step``: the last step scheduled before its end was reported."""
    return {
        "preemption_id": preemption_id,
        "generation": transfer.copy_id,
        "step": step,
        "direction": transfer.direction,
        "tier": tier,
        "bytes": transfer.bytes,
        "segments": transfer.segments,
        "segment_bytes": transfer.segment_bytes,
        "pinned": transfer.pinned,
        "queued_bytes": transfer.queued_bytes,
        "submit_s": transfer.submit_s,
        "start_s": transfer.start_s,
        "end_s": transfer.end_s,
        "ok": transfer.ok,
    }


def request_row(
    *,
    request: str,
    arrival_s: float,
    first_token_s: float | None,
    last_token_s: float | None,
    prompt_tokens: int,
    output_tokens: int,
    preemptions: int,
    recomputed_tokens: int,
    loaded_tokens: int,
    finish: str,
    class_name: str | None = None,
    priority: int | None = None,
    ttft_deadline_s: float | None = None,
    tpot_deadline_s: float | None = None,
) -> Row:
    """A row of ``requests``. ``request``: its name in the trace, never the client's; ``finish``: how it ended. The last
    four are what the request says of itself; None where it says nothing."""
    return {
        "request": request,
        "arrival_s": arrival_s,
        "first_token_s": first_token_s,
        "last_token_s": last_token_s,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "preemptions": preemptions,
        "recomputed_tokens": recomputed_tokens,
        "loaded_tokens": loaded_tokens,
        "finish": finish,
        "class": class_name,
        "priority": priority,
        "ttft_deadline_s": ttft_deadline_s,
        "tpot_deadline_s": tpot_deadline_s,
    }


def decision_row(
    situation: Preemption,
    decision: Decision,
    *,
    preemption_id: str,
    decision_id: str,
    request: str,
    generation: int,
    step: int,
    overflow_id: str,
    state_id: str | None = None,
    arm: str | None = None,
    repeat: int | None = None,
) -> Row:
    """A row of ``decisions``. The last three parameters are for profiles only."""
    return {
        "preemption_id": preemption_id,
        "decision_id": decision_id,
        "request": request,
        "generation": generation,
        "step": step,
        "overflow_id": overflow_id,
        **as_row(situation),
        **as_row(decision),
        "options": [as_row(option) for option in decision.options],
        "probabilities": list(decision.probabilities),
        "costs": [as_row(cost) for cost in decision.costs],
        "state_id": state_id,
        "arm": arm,
        "repeat": repeat,
    }


def outcome_row(outcome: Outcome) -> Row:
    """A row of ``outcomes``."""
    return as_row(outcome)


def displacement_row(
    choice: Choice, *, displacement_id: str, step: int, time_s: float, order: str, name_of: Callable[[int], str]
) -> Row:
    """A row of ``displacements``. ``order``: the label of the order of service; ``name_of``: a request's name in the
    trace, by its number in the order of arrival."""
    waiting = choice.waiting
    return {
        "displacement_id": displacement_id,
        "step": step,
        "time_s": time_s,
        "order": order,
        "request": name_of(waiting.number),
        "rank": list(waiting.rank),
        "prompt_tokens": waiting.prompt_tokens,
        "output_tokens": waiting.output_tokens,
        "need_blocks": choice.need_blocks,
        "free_blocks": choice.free_blocks,
        "need_places": choice.need_places,
        "free_places": choice.free_places,
        "candidates": [
            {
                "request": name_of(candidate.request.number),
                "number": candidate.request.number,
                "rank": list(candidate.request.rank),
                "output_tokens": candidate.request.output_tokens,
                "computed_tokens": candidate.request.computed_tokens,
                "freed_blocks": candidate.freed_blocks,
                "price_s": candidate.price_s,
            }
            for candidate in choice.candidates
        ],
        "taken": choice.taken,
        "left_out": choice.left_out,
        "probability": choice.probability,
    }


def window_row(
    *,
    state_id: str,
    arm: str,
    repeat: int,
    cause: str,
    first_step: int,
    last_step: int,
    duration_s: float,
    preemption_id: str | None,
    discarded: str,
) -> Row:
    """A row of ``windows``. ``discarded``: the reason, or empty if the window counts."""
    return {
        "state_id": state_id,
        "arm": arm,
        "repeat": repeat,
        "cause": cause,
        "first_step": first_step,
        "last_step": last_step,
        "duration_s": duration_s,
        "preemption_id": preemption_id,
        "discarded": discarded,
    }
