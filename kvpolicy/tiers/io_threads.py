"""Threads that read and write files: loads before stores, and one thread for loads alone, so that none waits for a
store to end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

State = TypeVar("State")
Task = Callable[[State], object]


class IoThreads(Generic[State]):
    """Runs tasks in the background, in the order in which they were given, loads before stores.

    ``make_state``: makes what each thread passes to its tasks. Tasks must not raise. The threads do not keep a process
    alive.
    """

    def __init__(self, threads: int, make_state: Callable[[], State]) -> None:
        self._make_state = make_state
        self._changed = threading.Condition()
        self._loads: deque[Task[State]] = deque()
        self._stores: deque[Task[State]] = deque()
        self._running = 0
        self._open = True
        self._threads = [
            threading.Thread(target=self._work, args=(number > 0,), name=f"kvpolicy-files-{number}", daemon=True)
            for number in range(threads)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def load(self, task: Task[State]) -> None:
        self._give(self._loads, task)

    def store(self, task: Task[State]) -> None:
        self._give(self._stores, task)

    def _give(self, queue: deque[Task[State]], task: Task[State]) -> None:
        with self._changed:
            queue.append(task)
            self._changed.notify_all()

    def wait_idle(self, limit_s: float | None = None) -> bool:
        """Wait until every task has ended, for so many seconds at most; whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._loads or self._stores or self._running), limit_s)

    def close(self) -> None:
        """End the tasks that run, and no others. Waits for them."""
        with self._changed:
            self._open = False
            self._loads.clear()
            self._stores.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self, stores: bool) -> None:
        state = self._make_state()
        queues = (self._loads, self._stores) if stores else (self._loads,)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._open or any(queues))
                if not self._open:
                    return
                task = next(queue for queue in queues if queue).popleft()
                self._running += 1
            try:
                task(state)
            finally:
                del task  # and with it the memory that it refers to
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()
