"""Tasks on worker processes, each started once and reused; a worker that dies loses only its current task.

Every worker is an executor with one process. An executor whose process was killed is unusable, so with a single one
for all processes every other task in flight would be lost too.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

Task = TypeVar("Task")
Done = TypeVar("Done")
Finished = tuple[int, Done | BaseException]
"""Number of the task, and its result or error."""


def in_processes(run: Callable[[Task], Done], tasks: Sequence[Task], jobs: int) -> Iterator[Finished[Done]]:
    """Results as tasks finish, an exception for a failed task. ``jobs`` 0: in this process, one by one.

    ``run`` and tasks are pickled. Processes are spawned: a script needs ``if __name__ == "__main__":``.
    """
    new_worker = _process if jobs else _here
    waiting = iter(enumerate(tasks))
    workers = {slot: new_worker() for slot in range(min(max(1, jobs), len(tasks)))}
    busy: dict[Future[Done], tuple[int, int]] = {}
    try:
        for slot, worker in workers.items():
            number, task = next(waiting)
            busy[worker.submit(run, task)] = slot, number
        while busy:
            for future in wait(busy, return_when=FIRST_COMPLETED).done:
                slot, number = busy.pop(future)
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    workers[slot].shutdown()
                    workers[slot] = new_worker()
                    error = ChildProcessError(
                        "its worker process was killed, perhaps for lack of memory; a script needs "
                        "`if __name__ == '__main__':` around what simulates, or jobs=0"
                    )
                next_task = next(waiting, None)
                if next_task is not None:
                    busy[workers[slot].submit(run, next_task[1])] = slot, next_task[0]
                yield number, future.result() if error is None else error
        for worker in workers.values():
            # Wait here: an executor cannot shut down properly while the interpreter exits.
            worker.shutdown()
    finally:
        for worker in workers.values():
            worker.shutdown(wait=False, cancel_futures=True)


def _process() -> Executor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _here() -> Executor:
    return ThreadPoolExecutor(1)
