"""Host memory where no amount is given: a share of what is available, the same in all processes of an engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy_vllm.plugin import host_share
from kvpolicy_vllm.plugin.host_share import left_on_cpu, part_of_gpus, share_of_memory, take_share
from kvpolicy_vllm.plugin.settings import Settings, transfer_config

GIB = 2**30


@pytest.mark.parametrize(
    ("available_gib", "cores", "gpu_part", "share"),
    [
        (64, 1, 1.0, 16.0), (64, 2, 1.0, 8.0), (2048, 1, 1.0, 64.0), (0.1, 1, 1.0, 0.02),
        (64, 1, 1 / 2, 16.0), (64, 1, 1 / 8, 4.0), (64, 2, 1 / 4, 4.0),
    ],
)  # fmt: skip
def test_a_quarter_or_half_of_the_part_of_the_gpus(
    available_gib: float, cores: int, gpu_part: float, share: float
) -> None:
    assert share_of_memory(int(available_gib * GIB), cores, gpu_part) == share


def test_servers_that_start_together_take_half_of_the_memory_at_most() -> None:
    """On GPUs of their own, whatever the split; each sees all of it as available."""
    for gpus in ([1] * 8, [4, 4], [2, 2, 4], [8], [1]):
        parts = [own / max(8, sum(gpus)) for own in gpus]
        assert sum(share_of_memory(100 * GIB, 1, part) for part in parts) <= 50


@pytest.mark.parametrize(("left_gib", "share"), [(64, 8.0), (10, 5.0), (0.1, 0.25), (0, 0.25)])
def test_on_a_cpu_at_most_half_of_what_vllm_leaves(left_gib: float, share: float) -> None:
    """And no more than an eighth of all."""
    assert share_of_memory(64 * GIB, 1, left_by_vllm=left_gib * GIB) == share
    assert share_of_memory(GIB, 1, left_by_vllm=0) == 0.12, "of one GiB an eighth is less"


@pytest.mark.parametrize(("given_gib", "utilization", "left_gib"), [(None, 0.5, 28), (None, 0.92, 1.12), (10, 0.9, 50)])
def test_what_vllm_leaves_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, given_gib: int | None, utilization: float, left_gib: float
) -> None:
    monkeypatch.setattr(host_share, "total_memory_bytes", lambda: 64 * GIB)
    size = None if given_gib is None else given_gib * GIB
    cache = SimpleNamespace(kv_cache_memory_bytes=size, gpu_memory_utilization=utilization)
    assert left_on_cpu(cache, 60 * GIB) == pytest.approx(left_gib * GIB)


def test_the_gpus_of_the_machine_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_share, "GPUS", tmp_path / "gpus")
    assert part_of_gpus(1) == 1.0, "no NVIDIA driver, or none that says"
    for number in range(4):
        (tmp_path / "gpus" / f"0000:0{number}:00.0").mkdir(parents=True)
    assert (part_of_gpus(1), part_of_gpus(4), part_of_gpus(8)) == (0.25, 1.0, 1.0)
    monkeypatch.setattr(host_share, "available_memory_bytes", lambda: 64 * GIB)
    made = config(transfer_config({"policy": "always-swap"}), world_size=1, data_parallel_size_local=1)
    take_share(made, on_cpu=False)
    assert made.kv_transfer_config.kv_connector_extra_config["host_gib"] == 8.0


def test_a_cpu_engine_takes_what_its_cache_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_share, "available_memory_bytes", lambda: 64 * GIB)
    made = config(transfer_config({"policy": "always-swap"}), data_parallel_size_local=1)
    made.cache_config = SimpleNamespace(kv_cache_memory_bytes=60 * GIB, gpu_memory_utilization=0.92)
    take_share(made, on_cpu=True)
    assert made.kv_transfer_config.kv_connector_extra_config["host_gib"] == 2.0


def config(transfer: dict[str, Any], **parallel: Any) -> Any:
    fixed = {
        "nnodes": 1, "distributed_executor_backend": "mp", "data_parallel_size": 2, "data_parallel_size_local": 2,
        "data_parallel_rank_local": None, "data_parallel_external_lb": False, "world_size": 4,
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
