"""Drafted tokens over the scheduler alone: the worker of :mod:`tests.vllm.symbolic`, with drafts some of which are
wrong.

``python -m tests.vllm.drafting JOB RESULT`` runs schedules and reports every step that reads what a rejected draft left
behind. Scheduling is synchronous: the plugin serves drafts with no other.
"""

from __future__ import annotations

import json
import logging
import random
import sys
from collections import deque
from pathlib import Path
from typing import Any

from tests.vllm import alone, harness
from tests.vllm.disturbances import Disturbances, Shares
from tests.vllm.symbolic import HALF_COPIED, SymbolicWorker

# isort: split
import numpy as np
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

DRAFTED = 3
RIGHT = 0.7
"""Share of the drafted tokens that are right."""
MAX_STEPS = 20_000
SHARES = Shares(aborts=0.02, forced=0.08)


class DraftingWorker(SymbolicWorker):
    """Drafts after each step; accepts of what it drafted as much as is right."""

    def __init__(self, scheduler: Any, requests: list[Any], seed: int) -> None:
        super().__init__(scheduler, requests, alone.BLOCK, seed)
        more = np.full(2 * (DRAFTED + 1), 1)  # drafts may go beyond the last token
        self._texts = {name: np.concatenate([text, more]) for name, text in self._texts.items()}
        self._drafts_rng = random.Random(f"drafts {seed}")
        self._drafted: dict[str, list[int]] = {}
        self._accepted: dict[str, int] = {}
        self._counts |= {"accepted": 0, "rejected": 0}
        self._update = scheduler.update_from_output
        scheduler.update_from_output = self._updated

    def execute(self, output: Any, sampled: dict[str, bool]) -> ModelRunnerOutput:
        self._drafted = output.scheduled_spec_decode_tokens
        result = super().execute(output, sampled)
        for i, name in enumerate(result.req_ids):
            if name in self._drafted and sampled[name]:
                start = self._scheduler.requests[name].num_computed_tokens - len(self._drafted[name])
                said = self._texts[name][start : start + self._accepted[name] + 1]
                result.sampled_token_ids[i] = [int(token) for token in said]
        return result

    def _compute(self, name: str, count: int) -> int:
        end = super()._compute(name, count)
        drafts = self._drafted.get(name, [])
        first = end - len(drafts)
        wrong = [i for i, token in enumerate(drafts) if token != self._texts[name][first + i]]
        accepted = self._accepted[name] = wrong[0] if wrong else len(drafts)
        self._counts["accepted"] += accepted
        self._counts["rejected"] += len(drafts) - accepted
        for table in self._scheduler.kv_cache_manager.get_block_ids(name):
            for position in range(first + accepted, end):
                self._device[table[position // self._sizes[0]], position % self._sizes[0]] = HALF_COPIED
        return end

    def _updated(self, output: Any, result: ModelRunnerOutput) -> Any:
        answers = self._update(output, result)
        drafted = {
            name: self._draft(self._scheduler.requests[name])
            for name in result.req_ids
            if name in self._scheduler.requests
        }
        self._scheduler.update_draft_token_ids(DraftTokenIds([*drafted], [*drafted.values()]))
        return answers

    def _draft(self, request: Any) -> list[int]:
        rng, there = self._drafts_rng, request.num_tokens
        text = self._texts[request.request_id][there : there + rng.randint(0, DRAFTED)]
        return [int(token) if rng.random() < RIGHT else int(token) % 1000 + 1 for token in text]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One schedule to its end."""
    scheduler, requests = alone.scheduler_for(job), alone.made_requests(job)
    scheduler.kvpolicy.decider._rng = random.Random(job["seed"])
    steps = 0
    scheduler.kvpolicy.clock = lambda: float(steps)
    worker = DraftingWorker(scheduler, requests, job["seed"])
    disturb = Disturbances(scheduler, [worker], job["seed"], SHARES).before_step
    for _ in alone.drive(scheduler, deque(requests), worker.execute, False, disturb):
        steps += 1
        assert steps < MAX_STEPS, "no end"
    pool = scheduler.kv_cache_manager.block_pool
    return {
        "free_blocks": pool.get_num_free_blocks(),
        "device_blocks": pool.num_gpu_blocks,
        "stats": scheduler.connector.stats(),
        "unfinished": len(scheduler.requests),
    } | worker.found()


def main(job_path: str, result_path: str) -> None:
    logging.disable(logging.ERROR)
    job = json.loads(Path(job_path).read_text())
    drafter = {"num_speculative_tokens": DRAFTED} | (
        {"method": "ngram", "prompt_lookup_max": 2}
        if job["drafter"] == "ngram"
        else {"method": "draft_model", "model": job["model"]}
    )
    job |= {"engine": {"speculative_config": drafter}, "plugin": harness.plugin("random:0.7"), "asynchronous": False}
    runs = [run(job | {"seed": seed}) for seed in job["seeds"]]
    Path(result_path).write_text(json.dumps({"runs": runs}))


if __name__ == "__main__":
    main(*sys.argv[1:])
