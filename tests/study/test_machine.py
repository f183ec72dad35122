"""The machine of a cell: its times, and the link that copies take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpolicy.fields import WrongValue
from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.simulator.hardware.law_times import ConstantTimes
from kvpolicy.study.machine import Behind, open_machine
from tests.shape.configs import GPT_OSS_20B, GRANITE_4_SMALL
from tests.study.conftest import CONFIG
from tests.study.grids import simulate


def test_a_given_link_takes_the_place_of_the_hardwares() -> None:
    behind = Behind(ConstantTimes(), SimulatedLink.parse("2e9,0.001"))
    assert behind.copy_s("save", 4_000_000_000, 7, 1) == pytest.approx(2.001)
    assert "2e+09 bytes/s" in behind.source and behind.source.startswith(ConstantTimes().source)


def test_a_trained_model_is_hardware_too(tmp_path: Path) -> None:
    """Its own link is what it was measured on; behind another one it does not fit, and says so."""
    model = "cpu-llama-simulated-link"
    report = simulate(
        model,
        tmp_path / "c",
        block_size=32,
        links=["native", "1e9"],
        policies=["always-swap", f"cheapest:{model}", f"minwaste:{model}"],
        workloads=["azure-conversation-2023?n=10&context=512"],
        kv_blocks=[30],
    )
    assert [result["inputs"]["policy"] for result in report.results] == [
        "always-swap",
        f"cheapest:{model}",
        f"minwaste:{model}",
        "always-swap",
    ]
    assert all(sum(result["preemptions"].values()) for result in report.results)
    assert len(report.failed) == 2 and all("it was measured on" in result.error for result in report.failed)
    assert not report.results[0]["unmeasured"]


def test_hardware_that_changed_is_read_again(tmp_path: Path) -> None:
    """Nothing that is open in memory, and nothing that was kept, is of the file that was there before."""
    config = tmp_path / "config.json"
    speeds = []
    for layers in (8, 32, 8):
        config.write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
        report = simulate(f"H100-SXM:{config}", tmp_path / "c", policies=["always-recompute", "cheapest:analytic"])
        speeds.append([result["throughput_tok_s"] for result in report.results])
        taken_up = report.taken_up
    assert speeds[1][0] < 0.95 * speeds[0][0] and speeds[2] == speeds[0]
    assert taken_up == 2


def test_an_llm_whose_requests_have_several_block_tables_is_refused(tmp_path: Path) -> None:
    """Windows count as if they were stored whole, in one table."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(GPT_OSS_20B))
    assert open_machine(f"H100-SXM:{config}").block_bytes(16) == 16 * 24 * 2 * 8 * 64 * 2
    config.write_text(json.dumps(GRANITE_4_SMALL))
    with pytest.raises(WrongValue, match=r"36 that keep a state; a simulated engine has one block table"):
        open_machine(f"H100-SXM:{config}")
