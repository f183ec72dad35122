"""What of an engine core's life becomes rows of a trace."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import vllm

from kvpolicy.events import Outcome, as_row
from kvpolicy.trace import Header, decision_row, outcome_row
from kvpolicy_vllm.plugin.copies import Settled
from kvpolicy_vllm.plugin.ledger import OpenPreemption, Repeated, Step
from kvpolicy_vllm.plugin.observers import Observer, Pending, Tally
from kvpolicy_vllm.plugin.situation import engine_shape
from kvpolicy_vllm.plugin.step_parts import fill_parts
from kvpolicy_vllm.plugin.token_times import TokenTimes
from kvpolicy_vllm.plugin.trace_writer import RowWriter

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvpolicy_vllm.plugin.settings import Link, Settings


class TraceRecorder(Observer):
    """Rows of a trace. ``anonymous`` gives a request its name there."""

    trouble = "an event could not be recorded (counted as records_dropped)"
    given_up = "recording failed too often in a row: the trace ends here"

    def __init__(self, recorder: RowWriter, anonymous: Callable[[str], str], core: str, tally: Tally) -> None:
        self.recorder = recorder
        self._anonymous = anonymous
        self._core = core
        self._tally = tally
        self._dropped = 0
        self._tokens = TokenTimes()

    def begin_afresh(self) -> bool:
        self._tally.add("records_dropped")
        return super().begin_afresh()

    def close(self) -> None:
        self.recorder.close()
        self._count_dropped()

    def _count_dropped(self) -> None:
        if self.recorder.dropped > self._dropped:
            self._tally.add("records_dropped", self.recorder.dropped - self._dropped)
            self._dropped = self.recorder.dropped

    # ---- requests ----

    def arrived(self, request: Any, now: float) -> None:
        self._tokens.arrived(request.request_id, now)

    def preempted(self, request: Any) -> None:
        self._tokens.preempted.append(request.request_id)

    def ended(self, request: Any, now: float) -> None:
        life = self._tokens.ended(request, now)
        if life is None:
            return
        self.recorder.add(
            "requests",
            {
                "request": self._anonymous(request.request_id),
                "arrival_s": life.arrival_s,
                "first_token_s": life.first_token_s,
                "last_token_s": life.last_token_s,
                "prompt_tokens": request.num_prompt_tokens,
                "output_tokens": request.num_output_tokens,
                "preemptions": request.num_preemptions,
                "recomputed_tokens": life.recomputed_tokens,
                "loaded_tokens": life.loaded_tokens,
                "finish": str(request.get_finished_reason()),
            },
        )

    def repeated(self, step: Step) -> None:
        for part in step.repeated:
            life = self._tokens.of(part.request_id)
            if life is not None:
                life.recomputed_tokens += part.tokens

    def loaded(self, request_id: str, tokens: int) -> None:
        life = self._tokens.of(request_id)
        if life is not None:
            life.loaded_tokens += tokens

    # ---- steps ----

    def scheduled(self, step: Step, output: Any, scheduler: Any) -> None:
        """Enter who runs and waits, and how much memory is taken."""
        step.running_requests = len(scheduler.running)
        step.waiting_requests = max(0, scheduler.get_num_unfinished_requests() - step.running_requests)
        pool = scheduler.kv_cache_manager.block_pool
        step.used_blocks = pool.num_gpu_blocks - pool.get_num_free_blocks()

    def done(self, step: Step, output: Any, scheduler: Any, began_s: float, now: float) -> None:
        fill_parts(step, output)
        self._tokens.step(output, scheduler.requests, now)
        if self.recorder.dropped > self._dropped:
            self._count_dropped()
        if not (step.scheduled_tokens or step.lost or step.saves or scheduler.requests):
            return
        self.failures = 0
        self.recorder.add(
            "steps",
            {
                "step": step.number,
                "start_s": began_s,
                "duration_s": now - began_s,
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
                "repeated": [_repeated_row(part) for part in step.repeated],
            },
        )

    # ---- preemptions ----

    def executed(self, pending: Pending) -> None:
        known = pending.identity
        identity = {
            "preemption_id": known.preemption_id,
            "decision_id": f"{known.preemption_id}-0",
            "request": self._anonymous(known.request_id),
            "generation": known.generation,
            "step": known.step,
            "overflow_id": f"{self._core}-{known.step}",
        } | dict(known.labels)
        self.recorder.add("decisions", decision_row(pending.situation, pending.decision, **identity))

    def closed(self, opened: OpenPreemption, outcome: Outcome) -> None:
        self.recorder.add("outcomes", outcome_row(outcome))

    def copied(self, settled: Settled, step: int) -> None:
        slowest, moved = settled.slowest, settled.moved_bytes
        self.recorder.add(
            "transfers",
            {
                "preemption_id": settled.copy.preemption_id,
                "generation": settled.copy.copy_id,
                "step": step,
                "direction": settled.direction,
                "tier": "host",
                "bytes": moved,
                "segments": slowest.segments,
                "segment_bytes": slowest.segment_bytes,
                "pinned": slowest.pinned,
                "queued_bytes": slowest.queued_bytes,
                "submit_s": slowest.submit_s,
                "start_s": slowest.start_s,
                "end_s": slowest.end_s,
                "ok": settled.ok,
            },
        )


def _repeated_row(part: Repeated) -> dict[str, Any]:
    row = as_row(part)
    del row["request_id"]
    return row


def pseudonym(salt: bytes, request_id: str) -> str:
    """A request's name in traces: a keyed hash, so that nobody can be found out by it."""
    return hashlib.blake2b(request_id.encode(), key=salt, digest_size=8).hexdigest()


def header_link(link: Link | None) -> dict[str, Any]:
    return {"kind": "native"} if link is None else link.to_dict()


def header_of(
    settings: Settings,
    config: VllmConfig,
    kv_cache: KVCacheConfig,
    core: str,
    policy: str,
    slots: int,
    block_bytes: int,
) -> Header:
    """The header of what this engine core records."""
    shape = engine_shape(config, kv_cache, block_bytes)
    return Header(
        run_id=core,
        source=settings.source,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        engine=f"vllm {vllm.__version__}",
        hardware=shape["hardware"],
        geometry=shape["geometry"].to_dict(),
        block_size=shape["block_size"],
        block_bytes=block_bytes,
        device_blocks=kv_cache.num_blocks,
        host_blocks=slots,
        policy=policy,
        link=header_link(settings.link),
        seed=settings.seed,
        token_budget=shape["token_budget"],
    )
