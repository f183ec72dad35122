"""What a server counts of its recomputed tokens, and what is found in the trace of the same steps, are one thing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pyarrow.compute as pc
import pytest

from kvpolicy import cost
from kvpolicy import trace as traces
from kvpolicy.attribution.ledger import OpenPreemption, Repeated, Step
from kvpolicy.attribution.offline import REPEATED_PARTS, price_models
from kvpolicy.attribution.step_time import PARTS, HeldOutError, StepTimeModel
from kvpolicy.attribution.step_work import step_work
from kvpolicy_vllm.plugin.cost_meter import CostMeter
from tests.attribution.step_rows import one_after_another, repeated, step

SHIPPED = "cpu-llama-native"
"""A real engine's steps, with what they recompute."""


class Sums(Counter[str]):
    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        self[name] += value  # type: ignore[assignment]


def step_of(row: dict[str, Any]) -> Step[OpenPreemption]:
    """A step of a trace as the plugin has it when its output is back."""
    repeated = [
        Repeated(
            OpenPreemption(part["preemption_id"], "r", "recompute", 0, 0.0, 0), *map(part.get, REPEATED_PARTS), 0, 0
        )
        for part in row["repeated"]
    ]
    step: Step[OpenPreemption] = Step(row["step"], repeated=repeated)
    step.scheduled_requests = max(1, row["scheduled_requests"])
    step.scheduled_tokens, step.decode_requests, step.kv_read_tokens, step.chunk_context = (row[n] for n in PARTS)
    return step


def counted(steps: Any, model: StepTimeModel) -> Sums:
    sums = Sums()
    meter = CostMeter(model, lambda *event: None, sums)  # type: ignore[arg-type]
    for row in steps.sort_by("start_s").to_pylist():
        meter.done(step_of(row), None, None, row["start_s"], row["start_s"] + row["duration_s"])
    return sums


@pytest.mark.parametrize("factor", [1.0, 2.6])
def test_a_server_counts_what_its_trace_says(factor: float) -> None:
    """By the same step times to the digit, also where these are off for the machine of the run by a factor."""
    shipped = cost.load(SHIPPED).step_time
    assert shipped is not None
    scaled = tuple(factor * s for s in shipped.per_part_s)
    model = replace(shipped, fixed_s=factor * shipped.fixed_s, per_part_s=scaled)
    trace = traces.read(SHIPPED)
    for core in trace.headers:
        steps = trace.table("steps").filter(pc.equal(trace.table("steps")["core"], core))
        found, work = counted(steps, model), step_work(steps, model).work
        assert work.recompute_s and found["recompute_microseconds"] == pytest.approx(1e6 * work.recompute_s)
        assert 0 < found["beside_recompute_tokens"] < work.decoded_tokens
        own = step_work(steps, price_models(trace)[core]).work
        assert own.recompute_s == pytest.approx(work.recompute_s, rel=0.1), "by step times of the trace itself"


def test_a_chunk_before_leaves_its_aftermath_in_a_step_that_recomputes() -> None:
    """Which then took as long for it, and not for its own tokens: the same in a server and in its trace."""
    model = StepTimeModel(2e-3, (3e-5, 1e-4, 1e-7, 2e-9, 4e-3, 2e-3), "core a", 100, HeldOutError(0.0, 0.0, 0.0))
    chunk = step(0, 0.0, (304, 4, 400, 300 * 301 // 2))
    again = step(1, 0.0, (104, 4, 404, 5050), 4e-3, repeated=[repeated("a-1", 100, 0, 5050, 0)])
    later = step(2, 0.0, (54, 4, 408, 1275), 2e-3 + 4e-3 * 100 / 256, repeated=[repeated("a-2", 50, 0, 1275, 0)])
    steps = traces.from_rows("steps", one_after_another([chunk, again, later], 0.0))
    found, work = counted(steps, model), step_work(steps, model).work
    assert work.recompute_s and found["recompute_microseconds"] == pytest.approx(1e6 * work.recompute_s)
    alone_s = 150 * 3e-5 + (5050 + 1275) * 2e-9 + 6e-3 * 150 / 256
    assert work.recompute_s == pytest.approx(alone_s), "steps took what the model expects"
