"""Tasks over a Ray cluster. Ray is an extra: `pip install 'kvpolicy[ray]'`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import ray

Task = TypeVar("Task")
Done = TypeVar("Done")
AUTO = "auto"
AHEAD = 4
"""Tasks in flight per core: more would only fill the cluster's queue."""


def on_ray(run: Callable[[Task], Done], tasks: Sequence[Task], address: str) -> Iterator[tuple[int, Done | Exception]]:
    """Results as they come, an exception in place of one that failed.

    ``address``: of a running cluster, or ``auto`` for the one this machine belongs to, else a local one that ends with
    the last task. kvpolicy is to be installed wherever the tasks run, and their files under the same paths.
    """
    ours = not ray.is_initialized()
    if ours:
        _connect(address)
    remote = ray.remote(run)
    waiting = iter(enumerate(tasks))
    busy: dict[Any, int] = {}
    room = AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
    try:
        while True:
            while len(busy) < room and (more := next(waiting, None)) is not None:
                busy[remote.remote(more[1])] = more[0]
            if not busy:
                return
            done, _ = ray.wait(list(busy), num_returns=1)
            yield busy.pop(done[0]), _outcome(done[0])
    finally:
        for reference in busy:
            ray.cancel(reference)
        if ours:
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
