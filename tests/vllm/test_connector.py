"""The connector's count of engine cores on one machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvpolicy_vllm.plugin.connector import cores_here


@pytest.mark.parametrize(("size_local", "rank_local", "cores"), [(1, None, 1), (4, 0, 4), (1, 3, 4), (0, None, 1)])
def test_cores_are_counted_though_each_is_configured_as_the_only_one(
    size_local: int, rank_local: int | None, cores: int
) -> None:
    """Of a dense model vLLM tells every core that it is the only one, but leaves it its rank."""
    parallel = SimpleNamespace(data_parallel_size_local=size_local, data_parallel_rank_local=rank_local)
    config: Any = SimpleNamespace(parallel_config=parallel)
    assert cores_here(config) == cores
