"""Defaults of a server are vLLM's own for its device."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import pytest

from kvpolicy.study.config import usual_limits
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
