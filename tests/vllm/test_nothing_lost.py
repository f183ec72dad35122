"""Many preemptions in a row leave nothing behind."""

from __future__ import annotations

from pathlib import Path

from kvpolicy import trace
from tests.vllm import harness
from tests.vllm.conftest import job


def test_five_hundred_preemptions(model: str, tmp_path: Path) -> None:
    """At the end no host slot is in use, the block pool is full again, every request is done, every decision closed."""
    requests = harness.prompts(64, (20, 60), (150, 250), seed=4)
    folder = tmp_path / "trace"
    work = job(
        model, requests, {"num_gpu_blocks_override": 18, "max_model_len": 512},
        plugin=harness.alternating(trace=str(folder)),
    )  # fmt: skip
    result = harness.run(work | {"scenario": "harried"}, tmp_path)
    harness.assert_nothing_left(result)
    assert len(result["tokens"]) == len(requests)
    stats = result["stats"]
    preempted = harness.total(stats, "preemptions")
    assert preempted >= 500
    assert harness.total(stats, "preemptions", cause="memory") >= 15
    recorded = trace.read(folder)
    decided = {row["preemption_id"] for row in recorded.rows("decisions")}
    closed = {row["preemption_id"] for row in recorded.rows("outcomes")}
    assert len(decided) == preempted and decided == closed
    assert recorded.table("requests").num_rows == len(requests)
    assert {(row["priority"], row["class"]) for row in recorded.rows("requests")} == {(0, "default")}
    repeated = sum(row["recomputed_tokens"] for row in recorded.rows("steps"))
    assert repeated == harness.total(stats, "recomputed_tokens")
    assert repeated == sum(row["recomputed_tokens"] for row in recorded.rows("requests"))
    assert sum(row["loaded_tokens"] for row in recorded.rows("outcomes")) == harness.total(stats, "loaded_tokens")
