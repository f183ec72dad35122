"""Routed experts over the scheduler alone: a made-up router whose choice names the token and its position.

``python -m tests.vllm.experts JOB RESULT`` runs schedules with ``--enable-return-routed-experts`` over vLLM's own
auxiliary output connector, its worker side included. Whatever reaches the client is compared, position by position,
with what was routed. Of vLLM 0.31 and later: before, vLLM itself refuses routed experts beside a KV connector.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import defaultdict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.vllm import alone, harness
from tests.vllm.fuzz import UnusedSwaps, drawn_requests
from tests.vllm.models import write_mixtral
from tests.vllm.setups import BLOCK, Setup
from tests.vllm.symbolic import NO_FAULTS, SymbolicWorker

# isort: split
import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector import worker
from vllm.v1.outputs import ModelRunnerOutput

MAX_STEPS = 20_000


class Router(SymbolicWorker):
    """Routes every token to two experts: those with the numbers of the token and of its position."""

    def __init__(self, scheduler: Any, requests: list[Any], seed: int) -> None:
        super().__init__(scheduler, requests, BLOCK, seed, faults=NO_FAULTS)
        self.returned: dict[str, list[Any]] = defaultdict(list)
        self._connector = _worker_connector(scheduler)
        self._pending: dict[int, Any] = {}
        self._update = scheduler.update_from_output
        scheduler.update_from_output = self._returned_to_clients

    def execute(self, output: Any, sampled: dict[str, bool]) -> ModelRunnerOutput:
        self._connector.begin_step(output.aux_output_connector_metadata)
        result = super().execute(output, sampled)
        if output.num_scheduled_tokens:
            spans = [self._span(name, count) for name, count in output.num_scheduled_tokens.items()]
            self._pending[id(result)] = self._snapshot(spans, sampled)
        return result

    def wrong_rows(self) -> list[str]:
        """Finished requests whose rows differ from what was routed."""
        return [
            request.request_id
            for request in self._requests
            if not np.array_equal(
                np.concatenate([np.empty((0, 1, 2)), *self.returned[request.request_id]]),
                self._rows(request.request_id, 0, request.num_tokens - 1),
            )
        ]

    def _returned_to_clients(self, output: Any, result: ModelRunnerOutput) -> Any:
        pending = self._pending.pop(id(result), None)
        if pending is not None:
            result.aux_output_connector_output = pending.process_output()
        outcome = self._update(output, result)
        for client in outcome.values():
            for one in client.outputs:
                if one.routed_experts is not None:
                    self.returned[one.request_id].append(np.asarray(one.routed_experts))
        return outcome

    def _span(self, name: str, count: int) -> tuple[str, int, int]:
        end = self._scheduler.requests[name].num_computed_tokens
        return name, end - count, end

    def _rows(self, name: str, start: int, end: int) -> Any:
        both = np.stack([self._texts[name][start:end], np.arange(start, end)], axis=-1)
        return both[:, None, :].astype(np.uint16)

    def _snapshot(self, spans: list[tuple[str, int, int]], sampled: dict[str, bool]) -> Any:
        rows = np.concatenate([self._rows(name, start, end) for name, start, end in spans])
        self._connector._capturer.snapshot_routing_data.return_value = torch.from_numpy(rows)
        counts = [end - start for _, start, end in spans]
        pending = self._connector.prepare_output(
            SimpleNamespace(
                req_ids=[name for name, _, _ in spans],
                query_start_loc_np=np.cumsum([0, *counts]),
                num_computed_tokens_np=np.array([start for _, start, _ in spans]),
            )
        )
        pending.enqueue_cpu_copy(np.array([int(sampled[name]) for name, _, _ in spans]), np.zeros(len(spans), int))
        return pending


def _worker_connector(scheduler: Any) -> Any:
    """vLLM's worker side, over a capturer that is told what was routed."""
    capturer = mock.MagicMock(shape_per_token=(1, 2), output_dtype_name="uint16")
    with (
        mock.patch.object(worker, "RoutedExpertsCapturer", return_value=capturer),
        mock.patch.object(worker, "bind_routed_experts_capturer"),
        mock.patch.object(worker, "get_tp_group", return_value=SimpleNamespace(is_first_rank=True)),
    ):
        return worker.AuxOutputWorkerConnector(
            vllm_config=scheduler.vllm_config, model=None, kv_cache_config=scheduler.kv_cache_config
        )


def run(setup: Setup, model: Path) -> dict[str, Any]:
    """One schedule to its end. Where the plugin refuses it, ``refused`` says how."""
    job = {
        "model": str(write_mixtral(model)),
        "sequences": setup.max_running,
        "budget": setup.token_budget,
        "prefix_caching": True,  # vLLM returns routed experts with nothing else
        "scheduling": setup.scheduling,
        "blocks": setup.blocks,
        "asynchronous": setup.asynchronous,
        "engine": {"enable_return_routed_experts": True},
        "plugin": harness.plugin(setup.policy, seed=setup.seed),
    }
    try:
        # Only model runner v2 returns them, and vLLM will not have it without an accelerator.
        with (
            mock.patch.object(VllmConfig, "use_v2_model_runner", True),
            mock.patch.object(VllmConfig, "_validate_v2_model_runner"),
        ):
            scheduler = alone.scheduler_for(job)
    except ValueError as error:
        return {"refused": str(error)}
    swaps = UnusedSwaps()
    scheduler.kvpolicy.observers.add(swaps)
    requests = drawn_requests(setup)
    router = Router(scheduler, requests, setup.seed)
    raised = ""
    try:
        for steps, _ in enumerate(alone.drive(scheduler, deque(requests), router.execute, setup.asynchronous)):
            assert steps < MAX_STEPS, "no end"
    except Exception as error:  # noqa: BLE001  # in an engine it would be the end of it
        raised = f"{type(error).__name__}: {error}"
    return {
        "refused": "",
        "raised": raised,
        "wrong_rows": [] if raised else router.wrong_rows(),
        "wrong": router.found()["wrong"],
        "unfinished": len(scheduler.requests),
        "not_swapped": swaps.found,
        "stats": scheduler.connector.stats(),
    }


def main(job_path: str, result_path: str) -> None:
    logging.disable(logging.ERROR)
    job = json.loads(Path(job_path).read_text())
    model = Path(result_path).parent / "mixtral"
    runs = [run(Setup.parse(text), model) for text in job["setups"]]
    Path(result_path).write_text(json.dumps({"runs": runs}))


if __name__ == "__main__":
    main(*sys.argv[1:])
