"""Host memory where no amount is given: a share of what is available, the same in all processes of an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy_vllm.plugin import host_share
from kvpolicy_vllm.plugin.host_share import share_of_memory, take_share
from kvpolicy_vllm.plugin.settings import Settings, transfer_config


@pytest.mark.parametrize(
    ("available_gib", "cores", "on_cpu", "share"),
    [(64, 1, False, 16.0), (64, 2, False, 8.0), (64, 1, True, 8.0), (2048, 1, False, 64.0), (0.1, 1, True, 0.01)],
)
def test_a_quarter_or_an_eighth(available_gib: float, cores: int, on_cpu: bool, share: float) -> None:
    assert share_of_memory(int(available_gib * 2**30), cores, on_cpu) == share


def config(transfer: dict[str, Any], **parallel: Any) -> Any:
    fixed = {
        "nnodes": 1, "distributed_executor_backend": "mp", "data_parallel_size": 2, "data_parallel_size_local": 2,
        "data_parallel_rank_local": None, "data_parallel_external_lb": False,
    }  # fmt: skip
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(**transfer), parallel_config=SimpleNamespace(**fixed | parallel)
    )


@pytest.mark.parametrize("others", [[], [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}]])
def test_it_stands_in_the_configuration(monkeypatch: pytest.MonkeyPatch, others: list[dict[str, Any]]) -> None:
    monkeypatch.setattr(host_share, "available_memory_bytes", lambda: 32 << 30)
    made = config(transfer_config({"policy": "always-swap"}, others))
    take_share(made, on_cpu=False)
    extra = made.kv_transfer_config.kv_connector_extra_config
    own = extra["connectors"][0]["kv_connector_extra_config"] if others else extra
    assert own == {"policy": "always-swap", "host_gib": 4.0} and Settings.read(own).pool_gib == 4.0


ALONE: dict[str, Any] = {"data_parallel_size": 8, "data_parallel_size_local": 1}
"""A data-parallel rank that was started by itself, and does not know how many of the others are on its machine."""


@pytest.mark.parametrize(
    "parallel",
    [
        {"nnodes": 2},
        {"distributed_executor_backend": "external_launcher"},
        ALONE | {"data_parallel_external_lb": True},
        ALONE | {"data_parallel_rank_local": 0},
    ],
)
def test_where_ranks_configure_themselves_it_is_fixed(parallel: dict[str, Any]) -> None:
    made = config(transfer_config({"policy": "always-swap"}), **parallel)
    take_share(made, on_cpu=False)
    extra = made.kv_transfer_config.kv_connector_extra_config
    assert extra == {"policy": "always-swap"} and Settings.read(extra).pool_gib == 4.0


def test_an_engine_that_is_no_data_parallel_rank_takes_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM then gives it the local rank 0."""
    monkeypatch.setattr(host_share, "available_memory_bytes", lambda: 32 << 30)
    single = {"data_parallel_size": 1, "data_parallel_size_local": 1, "data_parallel_rank_local": 0}
    made = config(transfer_config({"policy": "always-swap"}), **single)
    take_share(made, on_cpu=False)
    assert made.kv_transfer_config.kv_connector_extra_config["host_gib"] == 8.0
