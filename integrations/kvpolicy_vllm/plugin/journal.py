"""What of an engine core's life becomes rows of a trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import vllm

from kvpolicy.attribution.ledger import OpenPreemption, Repeated, Step
from kvpolicy.events import Outcome
from kvpolicy.hardware import EngineSpec
from kvpolicy.policy.decision import HOST_TIER
from kvpolicy.trace import Header, outcome_row, request_row, step_row, transfer_row
from kvpolicy_vllm.plugin.copies import Settled
from kvpolicy_vllm.plugin.jobs import Transfer
from kvpolicy_vllm.plugin.recording import Recording

if TYPE_CHECKING:
    from kvpolicy_vllm.plugin.settings import Settings


@dataclass(slots=True)
class Life:
    """A request while it is served."""

    arrival_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    output_tokens: int = 0
    recomputed_tokens: int = 0
    loaded_tokens: int = 0


class Journal:
    """Rows for the recorder. ``anonymous`` gives a request its name in the trace."""

    def __init__(self, recorder: Recording, anonymous: Callable[[str], str]) -> None:
        self.recorder = recorder
        self._anonymous = anonymous
        self._lives: dict[Hashable, Life] = {}

    # ---- requests ----

    def arrived(self, request: Any, now: float) -> None:
        self._lives[request.request_id] = Life(now)

    def finished(self, request: Any, now: float) -> None:
        life = self._lives.pop(request.request_id, None)
        if life is None:
            return
        # The last token of a request that stops comes with the very step that ends it.
        if request.num_output_tokens > life.output_tokens:
            life.last_token_s = now
            life.first_token_s = now if life.first_token_s is None else life.first_token_s
        row = request_row(
            request=self._anonymous(request.request_id),
            arrival_s=life.arrival_s,
            first_token_s=life.first_token_s,
            last_token_s=life.last_token_s,
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_output_tokens,
            preemptions=request.num_preemptions,
            recomputed_tokens=life.recomputed_tokens,
            loaded_tokens=life.loaded_tokens,
            finish=str(request.get_finished_reason()),
        )
        self.recorder.add("requests", row)

    def repeated(self, parts: Iterable[Repeated[OpenPreemption]]) -> None:
        for part in parts:
            life = self._lives.get(part.opened.request)
            if life is not None:
                life.recomputed_tokens += part.tokens

    def loaded(self, request_id: str, tokens: int) -> None:
        life = self._lives.get(request_id)
        if life is not None:
            life.loaded_tokens += tokens

    # ---- steps ----

    def occupancy(self, step: Step[OpenPreemption], scheduler: Any) -> None:
        """Enter who runs and waits, and how much memory is taken."""
        step.running_requests = len(scheduler.running)
        step.waiting_requests = max(0, scheduler.get_num_unfinished_requests() - len(scheduler.running))
        pool = scheduler.kv_cache_manager.block_pool
        step.used_blocks = pool.num_gpu_blocks - pool.get_num_free_blocks()

    def step(self, step: Step[OpenPreemption], output: Any, scheduler: Any, began_s: float, now: float) -> None:
        """The step's output is back."""
        self.recorder.add("steps", step_row(step, began_s, now))
        self._note_tokens(output.num_scheduled_tokens, scheduler.requests, now)

    def _note_tokens(self, scheduled: Mapping[str, int], requests: Mapping[str, Any], now: float) -> None:
        for request_id in scheduled:
            life, request = self._lives.get(request_id), requests.get(request_id)
            if life is None or request is None or request.num_output_tokens <= life.output_tokens:
                continue
            life.output_tokens = request.num_output_tokens
            life.last_token_s = now
            if life.first_token_s is None:
                life.first_token_s = now

    # ---- preemptions ----

    def outcome(self, outcome: Outcome) -> None:
        self.recorder.add("outcomes", outcome_row(outcome))

    def transfer(self, settled: Settled, slowest: Transfer, moved: int, step: int) -> None:
        told = replace(slowest, bytes=moved, ok=settled.ok)
        row = transfer_row(told, preemption_id=settled.copy.preemption_id, step=step, tier=HOST_TIER)
        self.recorder.add("transfers", row)


def header_of(
    settings: Settings, engine: EngineSpec, core: str, policy: str, device_blocks: int, host_blocks: int
) -> Header:
    """The header of what this engine core records."""
    header = Header.recorded_on(
        engine,
        run_id=core,
        source=settings.source,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        engine=f"vllm {vllm.__version__}",
        device_blocks=device_blocks,
        host_blocks=host_blocks,
        policy=policy,
    )
    return replace(header, seed=settings.seed)
