"""Defaults of a server are vLLM's own for its device."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import pytest

from kvpolicy.fields import WrongValue
from kvpolicy.study.config import Serving, usual_limits
from tests.study.grids import simulate


def test_servers_are_vllms_own_for_the_device(hardware: str, tmp_path: Path) -> None:
    report = simulate(hardware, tmp_path / "c", policies=["always-swap"])
    serving = report.results[0]["inputs"]["serving"]
    assert (serving["token_budget"], serving["max_num_seqs"], serving["asynchronous"]) == (8192, 1024, True)
    assert "at most 8192 tokens a step and 1024 requests, scheduling one step ahead" in report.text()
    values = {"policies": ["always-swap"], "token_budget": 512, "max_num_seqs": 7, "asynchronous": False}
    serving = simulate(hardware, tmp_path / "c", **values).results[0]["inputs"]["serving"]
    assert (serving["token_budget"], serving["max_num_seqs"], serving["asynchronous"]) == (512, 7, False)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", (2048, 128, False)),
        ("H200", (8192, 1024, True)),
        ("NVIDIA H100 80GB HBM3", (8192, 1024, True)),
        ("NVIDIA A100-SXM4-80GB", (2048, 256, True)),
        ("A100-SXM-80GB", (2048, 256, True)),
        ("L40S", (2048, 256, True)),
        ("one without a data sheet", (2048, 256, True)),
    ],
)
def test_defaults_go_by_the_device(device: str, expected: tuple[int, int, bool]) -> None:
    assert astuple(usual_limits(device)) == expected


SESSIONS = "sessions:azure-conversation-2023?n=24&turns=5&think=1&rate=8&context=1500"


def test_prompts_are_found_in_host_memory_where_it_caches_them(hardware: str, tmp_path: Path) -> None:
    """What the cache and its files are is part of the inputs only where there are any."""
    values = {"workloads": [SESSIONS], "policies": ["always-swap"], "kv_blocks": [150]}
    plain, cached, small = (
        simulate(hardware, tmp_path / "c", **values, **more)
        for more in ({}, {"host_cache": "cost"}, {"host_cache": "lru", "host_blocks": 60, "file_gib": 1.0})
    )
    serving = [report.results[0]["inputs"]["serving"] for report in (plain, cached, small)]
    assert not {"host_cache", "file_gib", "file_link"} & set(serving[0])
    assert (serving[1]["host_cache"], "file_gib" in serving[1]) == ("cost", False)
    assert (serving[2]["file_gib"], serving[2]["file_link"]) == (1.0, "3e9,0.0001")
    hits = [report.results[0]["prefix_hits"] for report in (plain, cached, small)]
    assert hits[0]["host_tokens"] == 0 < hits[1]["loaded_tokens"] == hits[1]["host_tokens"]
    assert hits[2]["file_tokens"] > 0
    assert "prompts in host memory by lru, 1 GiB of files at 3e9,0.0001" in small.text()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"host_cache": "belady"}, "host_cache 'belady' is no caching policy; they are off, lru"),
        ({"host_cache": "lru", "prefix_caching": False}, "host_cache is given without prefix caching"),
        ({"file_gib": 3.0}, "file_gib is given without a caching policy .*: give --host-cache, too"),
        ({"host_cache": "lru", "file_gib": -1.0}, "file_gib is -1.0, should be 0 or above"),
        ({"host_cache": "lru", "file_link": "fast"}, "file_link 'fast': should be BYTES_PER_S"),
    ],
)
def test_a_cache_that_cannot_be_is_refused_by_its_field(values: dict[str, object], reason: str) -> None:
    with pytest.raises(WrongValue, match=reason):
        Serving(**values)  # type: ignore[arg-type]
