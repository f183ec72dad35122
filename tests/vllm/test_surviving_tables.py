"""What requests with several block tables find again, beside what was expected at their preemption: vLLM's scheduler
alone, whose prefix cache is the real one."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from kvpolicy import trace as traces
from kvpolicy.survival import PRIOR_TOKENS, Absences
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


def scheduler_of(model: str, folder: Path, layers: str, blocks: int, policy: str) -> Any:
    plugin = harness.plugin(policy, trace=str(folder))
    job = BASE | {"model": model, "plugin": plugin, "layers": layers, "blocks": blocks, "budget": 256}
    return alone.scheduler_for(job | {"prefix_caching": True})


def serve(scheduler: Any, watched: Callable[[Any], None] = lambda output: None) -> None:
    """Requests whose prompts have nothing in common. ``watched``: called with what each step scheduled."""
    rng, arriving = random.Random(3), deque[Any]()
    for number in range(REQUESTS):
        prompt = [rng.randrange(1000) for _ in range(rng.randint(20, 300))]
        parameters = SamplingParams(temperature=0.0, max_tokens=rng.randint(5, 200), ignore_eos=True)
        arriving.append(alone.made_request(number, prompt, parameters))
    for output in alone.drive(scheduler, arriving, alone.Worker(late=0).execute, False):
        watched(output)
    scheduler.kvpolicy.close()


def victims(model: str, folder: Path, layers: str, blocks: int) -> list[Victim]:
    serve(scheduler_of(model, folder, layers, blocks, "always-recompute"))
    trace = traces.read(folder)
    outcomes = {row["preemption_id"]: row for row in trace.rows("outcomes") if row["ended"] == "resumed"}
    return [
        Victim(
            row["hashed_tokens"],
            row["hit_tokens"],
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


@pytest.mark.feature("several KV cache groups")
@pytest.mark.parametrize(("layers", "blocks"), [("full-window", 90), ("full-states", 130)])
def test_absences_are_the_tokens_of_the_steps_between(layers: str, blocks: int, model: str, tmp_path: Path) -> None:
    """From the step that preempts a request, up to the one that computes it again, as vLLM's own outputs have it."""
    scheduler, learned, written = scheduler_of(model, tmp_path, layers, blocks, "always-recompute"), Absences(), 0
    away: dict[str, int] = {}
    ended: list[int] = []

    def watched(output: Any) -> None:
        nonlocal written
        for name in [name for name in output.num_scheduled_tokens if name in away]:
            ended.append(written - away.pop(name))
            learned.add(ended[-1], ended=True)
        away.update(dict.fromkeys(output.preempted_req_ids or (), written))
        written += output.total_num_scheduled_tokens

    serve(scheduler, watched)
    assert len(ended) > 30 and not away and len(set(ended)) > 10
    assert scheduler.kvpolicy.survival.absences["memory"].mean_tokens == pytest.approx(learned.mean_tokens)
    absences = [row["absence_tokens"] for row in traces.read(tmp_path).rows("decisions")]
    assert absences[0] == PRIOR_TOKENS and None not in absences and len(set(absences)) > 10


@pytest.mark.parametrize(("layers", "blocks"), [("two-full", 150), ("full-window", 90), ("full-states", 130)])
def test_blocks_that_are_found_are_those_that_are_not_loaded(
    layers: str, blocks: int, model: str, tmp_path: Path
) -> None:
    """Expected at the preemption, where all that is findable is found; and said to a policy that is asked at resume."""
    scheduler = scheduler_of(model, tmp_path, layers, blocks, "always-swap")
    controller, copies = scheduler.kvpolicy, scheduler.kvpolicy.copies
    asked: dict[str, Any] = {}
    loads, decide, begin_load = controller._loads, controller.decider.loads, copies.begin_load
    loaded: list[tuple[float, int]] = []

    def asks(request: Any, total_tokens: int, local_tokens: int) -> bool:
        def remember(situation: Any) -> bool:
            asked[request.request_id] = situation
            return bool(decide(situation))

        controller.decider.loads = remember
        return bool(loads(request, total_tokens, local_tokens))

    def begins(request_id: str, wanted: Any, block_ids: Any, tokens: int) -> None:
        known = asked[request_id]
        loaded.append((known.held_blocks - known.hit_blocks, len(wanted)))
        begin_load(request_id, wanted, block_ids, tokens)

    controller._loads, copies.begin_load = asks, begins
    serve(scheduler)
    assert len(loaded) > 20 and all(expected == blocks for expected, blocks in loaded)

    trace = traces.read(tmp_path)
    decisions = {row["preemption_id"]: row for row in trace.rows("decisions")}
    outcomes = {row["preemption_id"]: row for row in trace.rows("outcomes")}
    whole = 0
    for row in trace.rows("transfers"):
        decided, found = decisions[row["preemption_id"]], outcomes[row["preemption_id"]]["local_hit_tokens"]
        if row["direction"] == "load" and found in (0, decided["hashed_tokens"]):
            hits = decided["hashed_blocks"] if found else 0
            assert row["bytes"] // alone.COPIED_BLOCK_BYTES == decided["held_blocks"] - hits
            whole += found > 0
        assert 0 <= decided["hit_blocks"] <= decided["hashed_blocks"] <= decided["held_blocks"]
    assert whole > 5
