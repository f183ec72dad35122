"""Tasks on a Ray cluster. Ray is an extra: `pip install 'kvpolicy[ray]'`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import ray

Task = TypeVar("Task")
Done = TypeVar("Done")
AUTO = "auto"
IN_FLIGHT_PER_CORE = 4
"""Tasks in flight per core: more would only fill the cluster's queue."""


def on_ray(run: Callable[[Task], Done], tasks: Sequence[Task], address: str) -> Iterator[tuple[int, Done | Exception]]:
    """Results as tasks finish, an exception for a failed task.

    ``address``: of a running cluster; or ``auto`` for the cluster that this machine belongs to, else a local one that
    is shut down after the last task. kvpolicy must be installed wherever tasks run, and files have the same paths.
    """
    connected_here = not ray.is_initialized()
    if connected_here:
        _connect(address)
    remote = ray.remote(run)
    waiting = iter(enumerate(tasks))
    busy: dict[Any, int] = {}
    max_in_flight = IN_FLIGHT_PER_CORE * max(1, int(ray.cluster_resources().get("CPU", 1)))
    try:
        while True:
            while len(busy) < max_in_flight and (next_task := next(waiting, None)) is not None:
                busy[remote.remote(next_task[1])] = next_task[0]
            if not busy:
                return
            done, _ = ray.wait(list(busy), num_returns=1)
            yield busy.pop(done[0]), _outcome(done[0])
    finally:
        for reference in busy:
            ray.cancel(reference)
        if connected_here:
            ray.shutdown()


def _connect(address: str) -> None:
    quiet: dict[str, Any] = {"include_dashboard": False, "configure_logging": False, "log_to_driver": False}
    if address != AUTO:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
        return
    try:
        ray.init(address=AUTO, log_to_driver=False, configure_logging=False)
    except ConnectionError:
        ray.init(**quiet)


def _outcome(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        return error.as_instanceof_cause()
    except ray.exceptions.RayError as error:
        return error
