"""Times of each request's first and last token, without a cost per request that decodes a token in every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_IN_FLIGHT = 256
"""An output that schedules a request comes back within this many steps after the request ended."""


@dataclass(slots=True)
class Life:
    """Times and counts of a request being served."""

    arrival_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    output_tokens: int = 0
    recomputed_tokens: int = 0
    loaded_tokens: int = 0
    joined: int = 0
    """For a steady request: number of rounds when its tokens were last counted."""


class TokenTimes:
    """Token times of all requests of one engine core.

    A request is *steady*, from one of its tokens on, as long as every step schedules it. Each such step, a *round*,
    gives it one token, so it suffices to count rounds. All other requests are checked in the steps that schedule them.
    """

    def __init__(self) -> None:
        self._lives: dict[str, Life] = {}
        self._steady: dict[str, Life] = {}
        self._watched: dict[str, Life] = {}
        """Requests that are not steady and have been scheduled before."""
        self.preempted: list[str] = []
        """Requests preempted since the last step. A step in flight may still give them a token."""
        self._ended: dict[str, int] = {}
        """Requests that steps in flight may still schedule: number of rounds when each ended, ascending."""
        self.incomplete = False
        """Whether a step may schedule requests that are not followed, because an event of theirs was missed."""
        self._rounds = 0
        self._round_s = 0.0

    def of(self, request_id: str) -> Life | None:
        return self._lives.get(request_id)

    def arrived(self, request_id: str, now: float) -> None:
        self._lives[request_id] = Life(now)

    def step(self, output: Any, requests: Mapping[str, Any], now: float) -> None:
        """Process a step's output. ``requests``: by id, including the tokens of this step."""
        scheduled = output.num_scheduled_tokens
        if self.preempted:
            for request_id in self.preempted:
                self._watch(request_id)
            self.preempted.clear()
        for new in output.scheduled_new_reqs:
            self._watch(new.req_id)
        if not self._schedules_all_steady(scheduled):
            for request_id in self._steady.keys() - scheduled.keys():
                self._watch(request_id)
        self._rounds += 1
        self._round_s = now
        if self._watched:
            for request_id in self._watched.keys() & scheduled.keys():
                self._look_at(request_id, requests.get(request_id), now)

    def _schedules_all_steady(self, scheduled: Mapping[str, int]) -> bool:
        """Whether every steady request is scheduled; told by numbers, as a look-up of each costs more than the rest.

        A scheduled request is steady, watched, or has ended while the step was in flight.
        """
        if self.incomplete:
            return self._steady.keys() <= scheduled.keys()
        others = 0
        if self._watched:
            others += len(self._watched.keys() & scheduled.keys())
        if self._ended:
            others += len(self._ended.keys() & scheduled.keys())
            while self._ended and next(iter(self._ended.values())) < self._rounds - MAX_IN_FLIGHT:
                del self._ended[next(iter(self._ended))]
        return len(scheduled) - others == len(self._steady)

    def ended(self, request: Any, now: float) -> Life | None:
        """Remove a finished request and return its times; None where it never arrived."""
        life = self._lives.pop(request.request_id, None)
        if life is None:
            return None
        self._watched.pop(request.request_id, None)
        if self._steady.pop(request.request_id, None) is not None:
            self._count(life)
        self._ended.pop(request.request_id, None)  # a former request of the same name: keeps the order
        self._ended[request.request_id] = self._rounds
        # The last token of a request comes with the step that ends it.
        if request.num_output_tokens > life.output_tokens:
            _note(life, request, now)
        return life

    def _watch(self, request_id: str) -> None:
        life = self._lives.get(request_id)
        if life is None:
            self.incomplete = True
            return
        if self._steady.pop(request_id, None) is not None:
            self._count(life)
        self._watched[request_id] = life

    def _look_at(self, request_id: str, request: Any, now: float) -> None:
        life = self._watched[request_id]
        if request is None or request.num_output_tokens <= life.output_tokens:
            return
        _note(life, request, now)
        life.joined = self._rounds
        self._steady[request_id] = self._watched.pop(request_id)

    def _count(self, life: Life) -> None:
        """Add the tokens of the rounds since they were last counted."""
        if self._rounds > life.joined:
            life.output_tokens += self._rounds - life.joined
            life.last_token_s = self._round_s
            life.joined = self._rounds


def _note(life: Life, request: Any, now: float) -> None:
    life.output_tokens = request.num_output_tokens
    life.last_token_s = now
    if life.first_token_s is None:
        life.first_token_s = now
