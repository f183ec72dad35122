"""What requests with several block tables find again, beside what was expected at their preemption: vLLM's scheduler
alone, whose prefix cache is the real one."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from kvpolicy import trace as traces
from tests.vllm import alone, harness
from tests.vllm.test_same_schedule import BASE
from tests.vllm.versions import before_tables

pytestmark = [
    pytest.mark.scheduler,
    pytest.mark.skipif(before_tables(), reason="several block tables are served from 0.32 on"),
]

REQUESTS = 150


class Victim(NamedTuple):
    """A preemption that ended with its request running again."""

    findable: int
    """Tokens."""
    expected: float
    """Tokens."""
    found: int
    """Tokens."""


def victims(model: str, folder: Path, layers: str, blocks: int) -> list[Victim]:
    """Of requests whose prompts have nothing in common."""
    plugin = harness.plugin("always-recompute", trace=str(folder))
    job = BASE | {"model": model, "plugin": plugin, "layers": layers, "blocks": blocks, "budget": 256}
    scheduler = alone.scheduler_for(job | {"prefix_caching": True})
    rng, arriving = random.Random(3), deque[Any]()
    for number in range(REQUESTS):
        prompt = [rng.randrange(1000) for _ in range(rng.randint(20, 300))]
        parameters = SamplingParams(temperature=0.0, max_tokens=rng.randint(5, 200), ignore_eos=True)
        arriving.append(alone.made_request(number, prompt, parameters))
    for _ in alone.drive(scheduler, arriving, alone.Worker(late=0).execute, False):
        pass
    scheduler.kvpolicy.close()
    trace = traces.read(folder)
    outcomes = {row["preemption_id"]: row for row in trace.rows("outcomes") if row["ended"] == "resumed"}
    return [
        Victim(
            row["hashed_blocks"] * row["block_size"],
            row["hit_blocks"] * row["block_size"],
            outcomes[row["preemption_id"]]["local_hit_tokens"],
        )
        for row in trace.rows("decisions")
        if row["preemption_id"] in outcomes
    ]


@pytest.mark.feature("several KV cache groups")
@pytest.mark.parametrize(("layers", "blocks"), [("full-window", 90), ("full-states", 130)])
def test_what_is_findable_at_a_preemption_is_found_whole_or_not_at_all(
    layers: str, blocks: int, model: str, tmp_path: Path
) -> None:
    """And no victim finds what could not be found at its preemption. The share of those that do is learned."""
    seen = victims(model, tmp_path / "trace", layers, blocks)
    near = [one for one in seen if one.findable]
    assert len(near) >= 30 and all(one.found <= one.findable for one in seen)
    whole = [one for one in near if one.found == one.findable]
    assert len(near) / 10 < len(whole) < 0.9 * len(near), "some do, some do not"
    assert sum(one.found not in (0, one.findable) for one in near) <= 0.1 * len(near)
    assert near[0].expected == 0.0, "nothing is known of the first one"
    found, expected = sum(one.found for one in near), sum(one.expected for one in near)
    assert 0.7 * found < expected < 1.3 * found, (found, expected)
