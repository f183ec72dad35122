"""The same tasks on a Ray cluster that is started here."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from tests.study.tasks import double

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'kvpolicy[ray]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, of its start and its end


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=1, include_dashboard=False, configure_logging=False, log_to_driver=False)
    yield
    ray.shutdown()


def on_ray(*arguments: Any) -> dict[int, Any]:
    return dict(import_module("kvpolicy.study.on_ray").on_ray(*arguments))


def test_every_task_is_answered(cluster: None) -> None:
    results = on_ray(double, [*range(12), 13], "auto")
    error = results.pop(12)
    assert results == {number: 2 * number for number in range(12)}
    assert isinstance(error, RuntimeError) and "thirteen" in str(error)


def test_a_killed_worker_takes_its_task_along(cluster: None) -> None:
    results = on_ray(double, [1, 99, 2], "auto")
    assert isinstance(results.pop(1), ray.exceptions.RayError)
    assert results == {0: 2, 2: 4}
