"""An engine under memory pressure, with requests that are aborted, forced out and reset; what they say is compared with
what each says in the same engine with memory enough."""

from __future__ import annotations

import random
from typing import Any

from tests.vllm import harness, scenarios

ABORTS, FORCED, RESETS = 0.01, 0.06, 0.01
"""Shares of the steps before which each comes about."""
RESET_BY = 60
"""By this step one comes about, whatever is drawn: with good drafts there are few steps."""
SHARE_LEFT = 2.5
"""Memory left under pressure, in requests of the greatest length."""
AT_ONCE = 2
"""Requests that are served together where memory is not scarce."""


def pressed(job: dict[str, Any]) -> dict[str, Any]:
    """``job["requests"]`` in pairs, then all together in a memory that holds two of them and a half."""
    run = scenarios.Run(job)
    reference, needed = _unpressed(run)
    pool = run.scheduler.kv_cache_manager.block_pool
    spare = pool.get_num_free_blocks() - int(SHARE_LEFT * needed)
    pressure = Pressure(run, spare, random.Random(job["seed"]))
    run.tokens, run.gaps, run.finish = {}, {}, {}
    for i, request in enumerate(job["requests"]):
        run.add(f"r{i}", request)
    run.serve(pressure.before_step)
    pressure.give_back()
    return run.result() | {
        "reference": reference, "spare": spare, "aborted": sorted(pressure.aborted), "resets": pressure.resets
    }  # fmt: skip


def _unpressed(run: scenarios.Run) -> tuple[dict[str, Any], int]:
    """What is said, and the blocks that a request of the greatest length takes."""
    requests, pool = run.job["requests"], run.scheduler.kv_cache_manager.block_pool
    before, most = pool.get_num_free_blocks(), 0

    def count(run: scenarios.Run, step: int) -> None:
        nonlocal most
        most = max(most, before - pool.get_num_free_blocks())

    for first in range(0, len(requests), AT_ONCE):
        for i in range(first, min(first + AT_ONCE, len(requests))):
            run.add(f"r{i}", requests[i])
        run.serve(count)
    assert not harness.total(run.scheduler.connector.stats(), "preemptions"), "the reference had too little memory"
    return {"tokens": run.tokens, "gaps": run.gaps}, -(-most // AT_ONCE)


class Pressure:
    """Takes ``spare`` blocks out of play, and draws from ``rng`` what comes before each step."""

    def __init__(self, run: scenarios.Run, spare: int, rng: random.Random) -> None:
        self._run, self._spare, self._rng = run, spare, rng
        self._pool = run.scheduler.kv_cache_manager.block_pool
        self._taken = self._pool.get_new_blocks(spare)
        self.aborted: set[str] = set()
        self.resets = 0

    def give_back(self) -> None:
        self._pool.free_blocks(self._taken)
        self._taken = []

    def before_step(self, run: scenarios.Run, step: int) -> None:
        scheduler, draw = self._run.scheduler, self._rng.random
        if draw() < ABORTS and len(scheduler.requests) > 2:
            victim = self._rng.choice(sorted(scheduler.requests))
            name = scenarios._name(victim)
            self.aborted.add(name)
            run.engine.abort_request([name])
        if draw() < FORCED and scheduler.running:
            scheduler.preempt_at_next_step(self._rng.choice(scheduler.running).request_id)
        if draw() < RESETS or (not self.resets and step >= RESET_BY):
            self._reset()

    def _reset(self) -> None:
        """Of everything that is cached, with the running requests preempted. vLLM gives up while one is loaded."""
        held = len(self._taken)
        self.give_back()
        try:
            self._run.scheduler.reset_prefix_cache(reset_running_requests=True)
            self.resets += 1
        except RuntimeError:
            pass
        self._taken = self._pool.get_new_blocks(min(held, self._pool.get_num_free_blocks()))
