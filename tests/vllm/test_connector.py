"""The connector's count of engine cores on one machine, and which loads it reports to vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvpolicy_vllm.plugin.connector import KVPolicyConnector, cores_here
from kvpolicy_vllm.plugin.copiers.base import Finished
from kvpolicy_vllm.plugin.messages import NO_REQUEST, Job


@pytest.mark.parametrize(("size_local", "rank_local", "cores"), [(1, None, 1), (4, 0, 4), (1, 3, 4), (0, None, 1)])
def test_cores_are_counted_though_each_is_configured_as_the_only_one(
    size_local: int, rank_local: int | None, cores: int
) -> None:
    """Of a dense model vLLM tells every core that it is the only one, but leaves it its rank."""
    parallel = SimpleNamespace(data_parallel_size_local=size_local, data_parallel_rank_local=rank_local)
    config: Any = SimpleNamespace(parallel_config=parallel)
    assert cores_here(config) == cores


@pytest.mark.parametrize("by_request", [True, False])
def test_a_load_of_no_request_is_not_reported_whether_it_fails_or_not(by_request: bool) -> None:
    """vLLM would look for its request."""
    done = [
        Finished(Job(1, NO_REQUEST, (3,), (0,)), True),
        Finished(Job(2, NO_REQUEST, (4,), (1,)), False),
        Finished(Job(3, "r", (5,), (2,)), False),
    ]
    connector: Any = object.__new__(KVPolicyConnector)
    connector.copier = SimpleNamespace(poll=lambda idle: done)
    connector._connector_metadata = None
    connector._reports_requests = by_request
    connector._failed_requests, connector._failed_blocks = set(), set()
    assert connector.get_finished(set()) == (None, {"r"})
    assert (connector._failed_requests, connector._failed_blocks) == (({"r"}, set()) if by_request else (set(), {5}))
