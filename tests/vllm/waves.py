"""Requests in waves, each served to its end before the next one comes; between them nothing on the device survives."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from kvpolicy_vllm.plugin.file_index import SHARE
from tests.vllm.scenarios import Run

RUBBISH = {torch.int64: 0x447A0000447A0000, torch.uint8: 0x47}
"""Of words that hold several numbers; others get 1000."""
FILLER_BLOCKS = 3
NAP_S = 0.01
PATIENCE_S = 1000.0
"""Less than whoever waits for this engine has."""


def waves(job: dict[str, Any]) -> dict[str, Any]:
    """``waves``: numbers of the requests of each wave; ``overwrite``: whether nearly all of the device's memory is
    given away and written over after each; ``only_files``: whether it is given away so slowly that files take all of
    it, and host memory then gives up everything, so that what is found again is found in files; ``stops``: by the
    number of a wave, as text, what :func:`stop` does before it. That of the number of waves comes after the last one.

    ``begun`` of the result: the counters at the beginning of each wave. ``half_written``: with ``files``, their
    directory, what is being written there once everything has been reported, before the engine ends, which removes it.
    """
    run, stops = Run(job), job.get("stops", {})
    begun: list[dict[str, float]] = []
    for number, wave in enumerate(job["waves"]):
        stop(run, **stops.get(str(number), {}))
        begun.append(run.scheduler.kvpolicy.stats())
        for i in wave:
            run.add(f"r{i}", job["requests"][i])
        run.serve()
        if job.get("overwrite") or job.get("only_files"):
            lost = lose(run, taken_by_files(run) if job.get("only_files") else None)
            if job.get("overwrite"):
                for segment in run.copier.device_segments:
                    segment[torch.tensor(lost, dtype=torch.long)] = RUBBISH.get(segment.dtype, 1000)
        if job.get("only_files"):
            empty_host_memory(run)
    stop(run, **stops.get(str(len(job["waves"])), {}))
    if "files" in job:
        settle(run)
        half_written = [str(path) for path in Path(job["files"]).rglob("writing/*")]
    else:
        half_written = []
    cached = run.scheduler.kvpolicy.copies.pool.cached
    return run.result() | {"cached_slots": cached, "begun": begun, "half_written": half_written}


def stop(run: Run, says: str | None = None, awaits: str | None = None, settles: bool = False) -> None:
    """Make the file ``says``, then wait for the file ``awaits``. ``settles``: whether what was late is awaited then."""
    until = time.monotonic() + PATIENCE_S
    if says is not None:
        Path(says).touch()
    while awaits is not None and not Path(awaits).exists():
        assert time.monotonic() < until, f"{awaits} does not come"
        time.sleep(NAP_S)
    if settles:
        await_late(run)


def await_late(run: Run) -> None:
    """Serve something until workers have reported what was late."""
    until = time.monotonic() + PATIENCE_S
    while run.scheduler.kvpolicy.prompts.files._late:
        assert time.monotonic() < until, "what was late is not reported"
        fill(run)


def settle(run: Run) -> None:
    """Go on until workers have reported everything that goes to files or comes from them."""
    await_late(run)
    while run.scheduler.kvpolicy.prompts.files_under_way:
        run.engine.engine_core.engine_core.step()


def fill(run: Run) -> None:
    """Serve a request that needs nearly no memory, and leave nothing of it."""
    run.add("filler", {"prompt": [5] * 20, "max_tokens": 2})
    run.serve()
    del run.tokens["filler"], run.finish["filler"]


def lose(run: Run, blocks_at_once: int | None = None) -> list[int]:
    """Take the device's free blocks in a step, or so many in each of several, and give them back; return their ids.
    Files have those of one step, as far as they take them, before the next ones go."""
    controller, pool = run.scheduler.kvpolicy, run.scheduler.kv_cache_manager.block_pool
    taken: list[Any] = []
    while (excess := pool.get_num_free_blocks() - FILLER_BLOCKS) > 0:
        some = pool.get_new_blocks(min(excess, blocks_at_once or excess))
        controller._unlisted_blocks += [block.block_id for block in some]
        taken += some
        fill(run)
        while blocks_at_once and (controller.copies.under_way or controller.prompts.files_under_way):
            run.engine.engine_core.engine_core.step()
    pool.free_blocks(taken)
    return [block.block_id for block in taken]


def taken_by_files(run: Run) -> int:
    """Blocks of the device that may be lost in one step and still all go to files, by their share of host memory. What
    is lost at once beyond that is refused: by a step that takes all of the device, most of it."""
    return max(1, int(run.scheduler.kvpolicy.copies.pool.total) // SHARE - FILLER_BLOCKS)


def empty_host_memory(run: Run) -> None:
    """Have the cached contents leave their slots, held back by hints or not, as for a copy that needs them all."""
    pool = run.scheduler.kvpolicy.copies.pool
    pool._make_room(pool.total)
    assert not pool.cached
