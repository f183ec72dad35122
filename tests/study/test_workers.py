"""Workers: every task is answered, a failure is told and takes nothing along, processes are started once."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from kvpolicy.study.workers import in_processes
from tests.study.tasks import double, process_of


@pytest.mark.parametrize("jobs", [0, 2])
def test_every_task_is_answered(jobs: int) -> None:
    result = dict(in_processes(double, [1, 13, 3, 4, 5], jobs))
    assert {number: result[number] for number in (0, 2, 3, 4)} == {0: 2, 2: 6, 3: 8, 4: 10}
    assert isinstance(result[1], RuntimeError) and str(result[1]) == "thirteen"


def test_a_killed_worker_takes_one_task_along() -> None:
    result = dict(in_processes(double, [1, 99, 2, 3], 1))
    assert isinstance(result.pop(1), ChildProcessError)
    assert result == {0: 2, 2: 4, 3: 6}


def test_processes_stay() -> None:
    assert len({pid for _, pid in in_processes(process_of, list(range(6)), 1)} - {os.getpid()}) == 1
    assert {pid for _, pid in in_processes(process_of, [1, 2], 0)} == {os.getpid()}


def test_processes_have_ended_when_the_last_result_is_read() -> None:
    """One that is still ending beside the interpreter leaves a traceback."""
    assert dict(in_processes(double, [1], 1)) == {0: 2}
    assert not multiprocessing.active_children()


def test_no_tasks_no_workers() -> None:
    assert list(in_processes(double, [], 2)) == []
