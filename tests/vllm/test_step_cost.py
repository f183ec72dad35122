"""What a step costs the plugin where nothing is preempted: as much for many running requests as for few."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm import harness


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The benchmark at a tiny scale; whether its bars are met is not asked, the machine may be busy."""
    out = tmp_path_factory.mktemp("cost") / "figures.json"
    command = [sys.executable, "benchmarks/step_cost.py", "--running", "8", "40", "--rounds", "2", "--steps", "2"]
    done = subprocess.run(
        [*command, "--json", str(out)], env=harness.environment(), cwd=harness.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    part: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return part


def test_no_function_of_the_plugin_goes_through_the_running_requests(rows: list[dict[str, Any]]) -> None:
    """Python instructions executed in the plugin, per step: 32 requests more bring not even one each."""
    opcodes: dict[str, list[float]] = {}
    for row in rows:
        opcodes.setdefault(row["mode"], []).append(row["opcodes"])
    assert set(opcodes) == {"metrics only", "trace", "cost model", "cost model, trace"}
    assert all(abs(few - many) < 4 for few, many in opcodes.values()), opcodes


def test_an_observer_that_is_off_costs_nothing(rows: list[dict[str, Any]]) -> None:
    costs = {row["mode"]: row["opcodes"] for row in rows}
    assert costs["metrics only"] < costs["cost model"] < costs["cost model, trace"]
    assert costs["metrics only"] < costs["trace"] < costs["cost model, trace"]


def test_the_benchmark_says_how_long_own_functions_take_and_beside_what(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert 0.0 < row["own_least_us"] <= row["own_us"] and row["stock_us"] > 0.0
        assert row["ratio"]["low"] <= row["ratio"]["value"] <= row["ratio"]["high"]


ORDERS = ("urgent", "mlfq:base=32", "las:quantum=32", "gittins:quantum=32")
"""By priority; by levels that are crossed rarely; by levels that every request crosses again and again."""


@pytest.fixture(scope="module")
def ordered(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("ordered") / "figures.json"
    command = [
        sys.executable,
        "benchmarks/order_cost.py",
        "--running",
        "8",
        "40",
        "--rounds",
        "1",
        "--orders",
        *ORDERS,
    ]
    done = subprocess.run(
        [*command, "--json", str(out)], env=harness.environment(), cwd=harness.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    part: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return part


def test_no_order_goes_through_the_running_requests_where_nobody_is_displaced(ordered: list[dict[str, Any]]) -> None:
    """Whether nobody waits, or somebody who is outranked, does not fit, or is not ready: 32 requests more that run
    bring less than one instruction each where ranks seldom change, and what their changes bring, seldom, elsewhere."""
    opcodes: dict[tuple[str, str], list[float]] = {}
    for row in ordered:
        if row["situation"] != "in prefill":
            opcodes.setdefault((row["order"], row["situation"]), []).append(row["opcodes"])
    assert len(opcodes) == 20
    rarely = [rows for (order, _), rows in opcodes.items() if order.startswith(("urgent", "mlfq"))]
    assert len(rarely) == 8 and all(many - few < 32 for few, many in rarely), opcodes
    assert all(many - few < 32 * 25 for few, many in opcodes.values()), opcodes


def test_a_step_that_computes_a_part_of_a_prompt_asks_little_of_each_request(ordered: list[dict[str, Any]]) -> None:
    """It puts those that decode first, if this step's growth fits: 170 instructions each where all blocks are asked
    for."""
    for order in ORDERS:
        few, many = (row["opcodes"] for row in ordered if (row["order"], row["situation"]) == (order, "in prefill"))
        alone = [row["opcodes"] for row in ordered if (row["order"], row["situation"]) == (order, "alone")]
        assert 32 * 20 < many - few - (alone[1] - alone[0]) < 32 * 130, (order, few, many)


def test_looks_in_vain_are_rare(ordered: list[dict[str, Any]]) -> None:
    """Also where running requests change their ranks in most of the steps, and none that matters to who waits."""
    for order in ORDERS:
        costs = {row["situation"]: row["opcodes"] for row in ordered if row["order"] == order}
        assert costs["in vain"] - costs["alone"] < 650 and costs["not ready"] - costs["alone"] < 450, (order, costs)
