"""Prompts computed by one engine and decoded by another, over NIXL. Each engine is a process of its own."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from vllm import SamplingParams

from tests.vllm import scenarios

PATIENCE_S = 600.0
NAP_S = 0.02
ASKED = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
"""What a proxy asks of the engine that computes prompts."""


def prefills(job: dict[str, Any]) -> dict[str, Any]:
    """Compute the prompts, write where their blocks are to ``job["handed"]``, and keep them until ``job["done"]``."""
    run = scenarios.Run(job)
    told: dict[str, Any] = {}
    for i, request in enumerate(job["requests"]):
        _add(run, f"r{i}", request | {"max_tokens": 1}, ASKED)
    while run.engine.has_unfinished_requests():
        for output in run.engine.step():
            if output.finished:
                told[output.request_id] = output.kv_transfer_params
    Path(job["handed"] + ".part").write_text(json.dumps(told))
    Path(job["handed"] + ".part").rename(job["handed"])
    until = time.monotonic() + PATIENCE_S
    while not Path(job["done"]).exists() and time.monotonic() < until:
        run.engine.engine_core.engine_core.step()
        time.sleep(NAP_S)
    return {"handed": len(told)}


def decodes(job: dict[str, Any]) -> dict[str, Any]:
    """Fetch the prompts' blocks from the other engine, and serve the requests to their ends."""
    run = scenarios.Run(job)
    until = time.monotonic() + PATIENCE_S
    while not Path(job["handed"]).exists():
        assert time.monotonic() < until, "the other engine computed no prompts"
        time.sleep(NAP_S)
    told = json.loads(Path(job["handed"]).read_text())
    fetched: set[str] = set()
    for i, request in enumerate(job["requests"]):
        _add(run, f"r{i}", request, told[f"r{i}"])
    asked = run.scheduler.connector.update_state_after_alloc

    def watched(request: Any, blocks: Any, tokens: int) -> None:
        if tokens and not request.num_preemptions:
            fetched.add(request.request_id)
        asked(request, blocks, tokens)

    run.scheduler.connector.update_state_after_alloc = watched
    try:
        run.serve()
    finally:
        Path(job["done"]).write_text("")
    return run.result() | {"fetched": len(fetched)}


def _add(run: scenarios.Run, name: str, request: dict[str, Any], transfer: dict[str, Any]) -> None:
    run._many[name] = False
    parameters = SamplingParams(
        temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False,
        extra_args={"kv_transfer_params": transfer},
    )  # fmt: skip
    run.engine.add_request(name, {"prompt_token_ids": request["prompt"]}, parameters)
