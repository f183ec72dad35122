"""What befalls a scheduler from outside while it serves: aborts, forced preemptions, resets and pauses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

MAX_PAUSE_STEPS = 30


@dataclass(frozen=True, slots=True)
class Shares:
    """Share of the steps before which each comes about."""

    aborts: float = 0.0
    forced: float = 0.0
    resets: float = 0.0
    """Of a change of weights: everything running is preempted, and nothing cached may be used again."""
    resets_when_loaded: float = 0.0
    """The same, of the steps at which a request has been loaded but not admitted; rare, and easily got wrong."""
    clearings: float = 0.0
    """Of the prefix cache, with nobody preempted."""
    pauses: float = 0.0


class Disturbances:
    """Draws from ``seed`` what comes before each step of ``scheduler``, whose steps ``workers`` execute."""

    def __init__(self, scheduler: Any, workers: Sequence[Any], seed: int, shares: Shares) -> None:
        self._scheduler, self._workers, self._shares = scheduler, workers, shares
        self._rng = random.Random(f"disturbances {seed}")
        self._paused_steps = 0
        self.aborted: set[str] = set()

    def before_step(self) -> None:
        shares, drawn = self._shares, self._rng.random
        self._pause_or_resume()
        if drawn() < shares.aborts:
            self._abort()
        if drawn() < shares.forced and self._scheduler.running:
            self._scheduler.preempt_at_next_step(self._rng.choice(self._scheduler.running).request_id)
        if shares.resets and drawn() < max(shares.resets, shares.resets_when_loaded * self._somebody_is_loaded()):
            self._reset()
        if drawn() < shares.clearings:
            self._scheduler.reset_prefix_cache()

    def _pause_or_resume(self) -> None:
        if self._paused_steps:
            self._paused_steps -= 1
            if not self._paused_steps:
                self._scheduler.set_pause_state(PauseState.UNPAUSED)
        elif self._rng.random() < self._shares.pauses:
            self._paused_steps = self._rng.randint(1, MAX_PAUSE_STEPS)
            self._scheduler.set_pause_state(self._rng.choice([PauseState.PAUSED_ALL, PauseState.PAUSED_NEW]))

    def _abort(self) -> None:
        alive = [name for name, request in self._scheduler.requests.items() if not request.is_finished()]
        if alive:
            victim = self._rng.choice(alive)
            self.aborted.add(victim)
            self._scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)

    def _reset(self) -> None:
        waiting = loaded_and_waiting(self._scheduler)
        try:
            self._scheduler.reset_prefix_cache(reset_running_requests=True)
        except RuntimeError:
            # vLLM gives up while somebody is being loaded, and keeps its cache where it has one: whoever asked would
            # ask again before changing the weights.
            if self._scheduler.cache_config.enable_prefix_caching:
                return
        for worker in self._workers:
            worker.weights_changed(waiting)

    def _somebody_is_loaded(self) -> bool:
        return self._shares.resets_when_loaded > 0 and loaded_and_waiting(self._scheduler) > 0


def loaded_and_waiting(scheduler: Any) -> int:
    """How many have been loaded but found no further block, or no place in the batch."""
    return sum(
        request.status in (RequestStatus.PREEMPTED, RequestStatus.WAITING)
        and request.num_computed_tokens > 0
        and not request.resumable
        for request in scheduler.requests.values()
    )
