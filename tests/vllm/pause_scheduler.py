"""vLLM's own pause over its scheduler alone: the engine core's code, with a made-up worker in the executor's place."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any
from unittest.mock import MagicMock

from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.request import RequestStatus

from tests.vllm.alone import BLOCK, made_requests, scheduler_for
from tests.vllm.symbolic import SymbolicWorker

MAX_STEPS = 5000


class Core:
    """What ``pause_scheduler`` and the idle loop ask of an engine core in a process of its own."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.model_executor = self.output_queue = MagicMock()
        self._idle_state_callbacks: list[Callable[[Any], None]] = []
        self.batch_queue: None = None
        self.engines_running = self.reject_new_requests = False

    def __getattr__(self, name: str) -> Any:
        return MethodType(getattr(EngineCoreProc, name), self)

    def reset_mm_cache(self) -> None:
        """No such inputs here."""

    def reset_encoder_cache(self) -> None:
        """No such inputs here."""


def pause(job: dict[str, Any]) -> dict[str, Any]:
    """Pause by ``job["mode"]`` while a load is under way, change the weights, resume, and serve to the end."""
    scheduler = scheduler_for(job)
    requests = made_requests(job)
    worker = SymbolicWorker(scheduler, requests, BLOCK, job["seed"])
    for request in requests:
        scheduler.add_request(request)
    loading = _load_somebody(scheduler, worker)
    core = Core(scheduler)
    future = core.pause_scheduler(job["mode"], True)
    steps = _run(core, worker)
    core._notify_idle_state_callbacks()
    pool = scheduler.kv_cache_manager.block_pool
    paused = {
        "loading": loading,
        "steps": steps,
        "done": future is None or (future.done() and future.exception() is None),
        "held_blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "host_slots_used": scheduler.kvpolicy.copies.pool.used,
    }
    worker.weights_changed()
    core.resume_scheduler()
    _run(core, worker)
    return worker.found() | {
        "paused": paused,
        "unfinished": len(scheduler.requests),
        "free_blocks": pool.get_num_free_blocks(),
        "device_blocks": pool.num_gpu_blocks,
        "stats": scheduler.connector.stats(),
    }


def _load_somebody(scheduler: Any, worker: SymbolicWorker) -> str:
    """Force requests out until one of them is being loaded; returns its name."""
    for step in range(MAX_STEPS):
        if step % 5 == 4 and scheduler.running:
            scheduler.preempt_at_next_step(scheduler.running[0].request_id)
        _step(scheduler, worker)
        for name, request in scheduler.requests.items():
            under_way = name not in scheduler.finished_recving_kv_req_ids
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS and under_way:
                return str(name)
    raise AssertionError("nobody was loaded")


def _run(core: Core, worker: SymbolicWorker) -> int:
    """Step for as long as the engine core sees work; returns how often."""
    for step in range(MAX_STEPS):
        if not core.has_work():
            return step
        _step(core.scheduler, worker)
    raise AssertionError(f"still at work after {MAX_STEPS} steps")


def _step(scheduler: Any, worker: SymbolicWorker) -> None:
    output = scheduler.schedule()
    sampled = {name: not scheduler.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens}
    scheduler.update_from_output(output, worker.execute(output, sampled))
