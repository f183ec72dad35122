"""Requests that say the same about different pictures, forced out together, and which of them share a content in host
memory."""

from __future__ import annotations

from typing import Any

from tests.vllm import scenarios

EVERY = 12
"""Steps between two times at which everybody is forced out."""


def album(job: dict[str, Any]) -> dict[str, Any]:
    """``shared``: [index of a block in its request, how many copies have it, the seeds of their pictures], of every
    content that several copies had at a time."""
    run = scenarios.Run(job)
    pictures: dict[str, int] = {}
    for i, request in enumerate(job["requests"]):
        run.add(f"r{i}", request)
        pictures[f"r{i}"] = request["picture"]
    shared: dict[str, list[Any]] = {}

    def hook(run: scenarios.Run, step: int) -> None:
        for copy in run.scheduler.kvpolicy.copies.pool._copies:
            for index, block in enumerate(copy.blocks):
                seen = sorted({pictures[holder.request_id.split("-")[0]] for holder in block.holders})
                if len(block.holders) > 1:
                    shared[f"{index} {len(block.holders)} {seen}"] = [index, len(block.holders), seen]
        if step % EVERY == EVERY - 1:
            for request in run.scheduler.running:
                run.scheduler.preempt_at_next_step(request.request_id)

    run.serve(hook)
    return run.result() | {"shared": [*shared.values()]}
