"""Threads that read and write files: loads before stores, one thread for loads alone, so that none waits for a store to
end, and one for what may take minutes, for which neither waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

State = TypeVar("State")
Task = Callable[[State], object]


class IoThreads(Generic[State]):
    """Runs tasks in the background, in the order in which they were given, loads before stores, and others aside.

    ``threads``: for loads and stores. ``make_state``: makes what each thread passes to its tasks. Tasks must not raise.
    The threads do not keep a process alive.
    """

    def __init__(self, threads: int, make_state: Callable[[], State]) -> None:
        self._make_state = make_state
        self._changed = threading.Condition()
        self._loads: deque[Task[State]] = deque()
        self._stores: deque[Task[State]] = deque()
        self._aside: deque[Task[State]] = deque()
        self._running = {False: 0, True: 0}
        """Tasks that run, by whether they are aside."""
        self._open = True
        queues = {str(number): (self._loads, self._stores) if number else (self._loads,) for number in range(threads)}
        self._threads = [self._thread(name, of) for name, of in queues.items()]
        self._threads.append(self._thread("aside", (self._aside,), aside=True))

    def _thread(self, name: str, queues: Sequence[deque[Task[State]]], aside: bool = False) -> threading.Thread:
        name = f"kvpolicy-files-{name}"
        return threading.Thread(target=self._work, args=(queues, aside), name=name, daemon=True)

    def start(self) -> None:
        """Raises RuntimeError where there are too many threads, and leaves none behind then."""
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.close()
            raise

    def load(self, task: Task[State]) -> None:
        self._give(self._loads, task)

    def store(self, task: Task[State]) -> None:
        self._give(self._stores, task)

    def aside(self, task: Task[State]) -> None:
        self._give(self._aside, task)

    def _give(self, queue: deque[Task[State]], task: Task[State]) -> None:
        with self._changed:
            queue.append(task)
            self._changed.notify_all()

    def wait_idle(self, limit_s: float | None = None) -> bool:
        """Wait until all loads and stores have ended, for so many seconds at most; whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._loads or self._stores or self._running[False]), limit_s)

    def close(self) -> None:
        """End the tasks that run, and no others. Waits for them."""
        with self._changed:
            self._open = False
            for queue in (self._loads, self._stores, self._aside):
                queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join()

    def _work(self, queues: Sequence[deque[Task[State]]], aside: bool) -> None:
        state = self._make_state()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._open or any(queues))
                if not self._open:
                    return
                task = next(queue for queue in queues if queue).popleft()
                self._running[aside] += 1
            try:
                task(state)
            finally:
                del task  # and with it the memory that it refers to
                with self._changed:
                    self._running[aside] -= 1
                    self._changed.notify_all()
