"""A policy of ten lines in a real engine, by module path, and an order that is given as an object; a policy that is
one is in `test_own_process`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpolicy import trace
from tests.order.made import ByLevel
from tests.policy.ten_line_policy import Longer
from tests.vllm import harness
from tests.vllm.conftest import SCARCE, job

OWN = "python:tests.policy.ten_line_policy:Longer"


def test_a_module_path_serves(
    model: str, requests: list[dict[str, Any]], references: dict[str, Any], tmp_path: Path
) -> None:
    """It swaps victims that are longer than the others on average and recomputes the rest, and no token is another."""
    folder = tmp_path / "trace"
    plugin = harness.plugin(OWN, allow_python_policies=True, trace=str(folder))
    result = harness.run(job(model, requests, SCARCE, scenario="harried", plugin=plugin), tmp_path)
    harness.assert_exact(references["requests"], result)
    harness.assert_nothing_left(result)
    values = trace.read(folder)
    (header,) = values.headers.values()
    assert header.policy == Longer().label
    rows = [row for row in values.rows("decisions") if len(row["options"]) == 2]
    swapped = [row["computed_tokens"] > row["batch_tokens"] / max(1, row["running_requests"]) for row in rows]
    assert {True, False} == set(swapped)
    for row, swap in zip(rows, swapped, strict=True):
        assert (row["policy"], row["chosen"], row["probabilities"][1]) == ("longer", swap, swap)
    assert harness.total(result["stats"], "fallbacks", reason="error") == 0


@pytest.mark.feature("orders of service")
def test_an_order_that_is_given_itself_serves(
    model: str, requests: list[dict[str, Any]], references: dict[str, Any], tmp_path: Path
) -> None:
    """It needs no switch, as it can come from Python alone; the trace has its name and the digest of its code."""
    folder = tmp_path / "trace"
    plugin = harness.plugin("always-swap", trace=str(folder))
    work = job(
        model, requests, SCARCE, scenario="harried", plugin=plugin, order_object="python:tests.order.made:ByLevel"
    )
    result = harness.run(work, tmp_path)
    harness.assert_exact(references["requests"], result)
    harness.assert_nothing_left(result)
    (header,) = trace.read(folder).headers.values()
    assert (header.order, header.order_digest) == (ByLevel().label, ByLevel().digest)
    assert harness.total(result["stats"], "displaced") > 10
    assert harness.total(result["stats"], "order_failed") == 0
