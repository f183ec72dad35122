"""The order of the running requests: one that returns through a load is put back where it was."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any
from weakref import WeakKeyDictionary, WeakSet


class RunningOrder:
    """Puts a request that returns through a load back where it was among the running requests. One per scheduler.

    Under first come, first served the victim is the last of the running requests, and whoever is admitted is put there.
    A request whose blocks were loaded back would lose them again at the next preemption, however long it has run. So
    each request has a number, given when it is admitted. A loaded request keeps its number; a recomputed one gets
    another, as stock vLLM has it. Under priority scheduling victims do not go by places, and nothing is changed.
    """

    def __init__(self, scheduler: Any) -> None:
        self.counts = bool(scheduler.policy.value == "fcfs")
        """Whether victims go by the order of the running requests."""
        self._scheduler = scheduler
        self._given = 0
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Numbers of the running requests, which rise along the list."""
        self._left: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Numbers that requests had when they were last preempted."""
        self._loaded: WeakSet[Any] = WeakSet()
        """Requests that were loaded and are not running yet."""

    def preempted(self, request: Any) -> None:
        number = self._numbers.pop(request, None)
        if number is not None:
            self._left[request] = number

    def loaded(self, request: Any) -> None:
        """The request's load has succeeded."""
        self._loaded.add(request)

    def lost(self, request: Any) -> None:
        """The request has lost what was loaded, before it was admitted."""
        self._loaded.discard(request)

    def put_last(self, request: Any) -> None:
        """Give a running request the last place."""
        self._numbers[request] = self._given
        self._given += 1

    def settle(self, output: Any) -> None:
        """Give places to the requests that this step admitted. vLLM has appended them to the running requests."""
        admitted = len(output.scheduled_new_reqs) + len(output.scheduled_cached_reqs.resumed_req_ids)
        if not (admitted and self.counts):
            return
        running = self._scheduler.running
        last = running[-admitted:]
        del running[-admitted:]
        for request in last:
            running.insert(self._place_of(request), request)

    def _place_of(self, request: Any) -> int:
        """Index of an admitted request among the running ones; its number is set."""
        running, number = self._scheduler.running, self._left.get(request)
        loaded = request in self._loaded
        self._loaded.discard(request)
        if number is None or not loaded:  # or what it was loaded with is of others
            self.put_last(request)
            return len(running)
        self._numbers[request] = number
        return bisect_right(running, number, key=lambda other: self._numbers.get(other, 0))
