"""Requests in waves, each served to its end before the next one comes; between them nothing on the device survives."""

from __future__ import annotations

from typing import Any

import torch

from tests.vllm.scenarios import Run

RUBBISH = {torch.int64: 0x447A0000447A0000, torch.uint8: 0x47}
"""Of words that hold several numbers; others get 1000."""
FILLER_BLOCKS = 3


def waves(job: dict[str, Any]) -> dict[str, Any]:
    """``waves``: numbers of the requests of each wave; ``overwrite``: whether nearly all of the device's memory is
    given away and written over after each."""
    run = Run(job)
    for wave in job["waves"]:
        for i in wave:
            run.add(f"r{i}", job["requests"][i])
        run.serve()
        if job.get("overwrite"):
            overwrite(run)
    return run.result() | {"cached_slots": run.scheduler.kvpolicy.copies.pool.cached}


def overwrite(run: Run) -> None:
    """Take the device's free blocks in a step of a request that needs nearly none, and write rubbish to them."""
    pool = run.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - FILLER_BLOCKS)
    ids = [block.block_id for block in taken]
    run.scheduler.kvpolicy._unlisted_blocks += ids
    run.add("filler", {"prompt": [5] * 20, "max_tokens": 2})
    run.serve()
    del run.tokens["filler"], run.finish["filler"]
    for segment in run.copier.device_segments:
        segment[torch.tensor(ids)] = RUBBISH.get(segment.dtype, 1000)
    pool.free_blocks(taken)
