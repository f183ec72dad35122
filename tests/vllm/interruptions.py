"""One request alone in an engine, forced out at given lengths, with the device's whole KV cache overwritten before it
comes back. What it says is then compared with what it says undisturbed, bit for bit."""

from __future__ import annotations

from typing import Any

import torch

from tests.vllm import scenarios

RUBBISH = 0.37
TOP = 3


def interrupted(job: dict[str, Any]) -> dict[str, Any]:
    """``job["cases"]``: by name, ``tokens`` (the lengths at which the request is forced out, rising), ``kind`` (what is
    done with it), and ``failing`` (whether its loads fail)."""
    run = scenarios.Run(job)
    groups = run.scheduler.kv_cache_config.kv_cache_groups
    found = {name: _case(run, name, job["request"], **case) for name, case in job["cases"].items()}
    return {"cases": found, "groups": sorted(type(group.kv_cache_spec).__name__ for group in groups)} | run.result()


def _case(
    run: scenarios.Run, name: str, request: dict[str, Any], tokens: list[int], kind: str, failing: bool = False
) -> dict[str, Any]:
    scheduler, left, said = run.scheduler, list(tokens), []
    scheduler.kvpolicy.pin(kind)
    copy_in = run.copier.copy_in
    if failing:
        run.copier.copy_in = _fail
    _overwrite(run)
    before = dict(scheduler.connector.stats())
    run.add(name, request, logprobs=TOP)
    out_at: list[int] = []
    while run.engine.has_unfinished_requests():
        (live,) = scheduler.requests.values()
        if left and live in scheduler.running and live.num_computed_tokens >= left[0]:
            left.pop(0)
            out_at.append(live.num_computed_tokens)
            scheduler.preempt_at_next_step(live.request_id)
            said += run.engine.step()
            _overwrite(run)
        said += run.engine.step()
    run.copier.copy_in = copy_in
    for _ in range(3):
        run.engine.engine_core.engine_core.step()
    after = scheduler.connector.stats()
    (completion,) = said[-1].outputs
    return {
        "out_at": out_at,
        "tokens": list(completion.token_ids),
        "logprobs": [sorted((token, one.logprob) for token, one in entry.items()) for entry in completion.logprobs],
        "stats": {key: value - before.get(key, 0) for key, value in after.items()},
    }


def _fail(job: Any) -> None:
    raise RuntimeError("this load was made to fail")


def _overwrite(run: scenarios.Run) -> None:
    """No request holds a block: forget what the prefix cache knows, and fill the device's KV with a constant."""
    assert run.scheduler.kv_cache_manager.reset_prefix_cache()
    tensors = run.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.kv_caches
    for storage in {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}.values():
        torch.empty(0, dtype=storage.dtype).set_(storage.untyped_storage()).fill_(RUBBISH)
