"""Tasks over worker processes, each of which is started once and stays warm; a worker that dies takes one task along.

Every worker has an executor of its own with one process: an executor whose process was killed is useless from then on,
and with one for all of them every other task in flight would be lost too.
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
"""Number of the task, and what came of it."""


def in_processes(run: Callable[[Task], Done], tasks: Sequence[Task], jobs: int) -> Iterator[Finished[Done]]:
    """Results as they come, an exception in place of one that failed. ``jobs`` 0: in this process, one by one.

    ``run`` and tasks are pickled. Processes are spawned: a script needs ``if __name__ == "__main__":``.
    """
    fresh = _process if jobs else _here
    waiting = iter(enumerate(tasks))
    workers = {slot: fresh() for slot in range(min(max(1, jobs), len(tasks)))}
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
                    workers[slot] = fresh()
                    error = ChildProcessError("its process was killed; was there memory enough?")
                more = next(waiting, None)
                if more is not None:
                    busy[workers[slot].submit(run, more[1])] = slot, more[0]
                yield number, future.result() if error is None else error
        for worker in workers.values():
            # Before the interpreter goes: an executor that ends beside it has nothing left to end with.
            worker.shutdown()
    finally:
        for worker in workers.values():
            worker.shutdown(wait=False, cancel_futures=True)


def _process() -> Executor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _here() -> Executor:
    return ThreadPoolExecutor(1)
