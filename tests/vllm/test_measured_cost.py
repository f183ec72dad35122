"""What preemptions cost, measured while the engine serves, beside the same measured afterwards from its trace."""

from __future__ import annotations

import json
from dataclasses import replace
from math import isfinite
from pathlib import Path

import pytest

from kvpolicy import cost, trace
from kvpolicy.attribution.offline import attribute, common_step_time
from kvpolicy.attribution.step_work import step_work
from kvpolicy.cost import online
from kvpolicy.cost.intervals import unbounded
from kvpolicy.cost.online import Online
from kvpolicy.cost.store import save
from kvpolicy.hardware import Geometry
from tests.vllm import harness
from tests.vllm.conftest import job

SCARCE = {"num_gpu_blocks_override": 24, "max_model_len": 512}
REQUESTS = harness.prompts(32, (20, 60), (100, 200), seed=4)


@pytest.fixture(scope="module")
def recorded(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    harness.run(job(model, REQUESTS, SCARCE, plugin=harness.alternating(trace=str(folder / "trace"))), folder)
    return folder / "trace"


def fitting_model(recorded: Path, folder: Path) -> Path:
    """A shipped model made to fit the tests' engine: d0 is of this engine's own trace, the prices are another's.

    It promises nothing about them, so that ``explore`` leaves every decision to chance.
    """
    values = trace.read(recorded)
    (header,) = values.headers.values()
    shipped = cost.load("cpu-llama-native")
    provenance = replace(
        shipped.provenance,
        hardware=header.hardware,
        geometry=Geometry(**header.geometry),
        block_sizes=(header.block_size,),
        kv_bytes_per_token=header.block_bytes / header.block_size,
    )
    result = replace(
        shipped, provenance=provenance, residuals={}, intervals=unbounded(), step_time=common_step_time([values])
    )
    save(result, {}, folder)
    return folder


def test_costs_are_measured_while_serving(model: str, recorded: Path, tmp_path: Path) -> None:
    learned = fitting_model(recorded, tmp_path / "model")
    plugin = harness.plugin(f"explore:{learned}", trace=str(tmp_path / "trace"))
    stats = harness.run(job(model, REQUESTS, SCARCE, plugin=plugin), tmp_path)["stats"]
    afterwards = attribute(trace.read(tmp_path / "trace"))
    executed = {row["preemption_id"]: row["executed"] for row in afterwards.rows("decisions")}
    costs = {row["preemption_id"]: row["engine_s"] for row in afterwards.rows("outcomes")}
    assert len(executed) > 20
    for kind in ("recompute", "swap"):
        mine = [costs[name] for name, done in executed.items() if done == kind and costs[name] is not None]
        # The last ones may still wait for their aftermath when the engine falls idle.
        result = harness.total(stats, "measured_preemptions", executed=kind)
        assert len(mine) - 3 <= result <= len(mine)
        # How much is compared over recorded traces, in tests/cost/test_live.py: here it would be the clock's say.
        assert isfinite(live := stats[f"measured_cost_microseconds|executed={kind}"]) and live != 0
        assert harness.total(stats, "predicted_cost_microseconds", executed=kind) > 0
        assert harness.total(stats, "priced_preemptions", executed=kind) > 0
    assert harness.total(stats, "avoidable_cost_microseconds") > 0, "chance chose the dearer option, too"


def test_what_is_counted_while_serving_is_what_the_steps_of_the_trace_say(
    model: str, recorded: Path, tmp_path: Path
) -> None:
    """By the same step times, where nothing is copied: beside copies, a server knows the steps before them alone."""
    learned = fitting_model(recorded, tmp_path / "model")
    plugin = harness.plugin(f"explore:{learned}", shadow=True, trace=str(tmp_path / "trace"))
    stats = harness.run(job(model, REQUESTS, SCARCE, plugin=plugin), tmp_path)["stats"]
    work = step_work(trace.read(tmp_path / "trace").table("steps"), cost.load(learned).step_time).work
    assert stats["recomputed_tokens"] == work.recomputed_tokens > 0 and work.recompute_s is not None
    assert stats["recompute_microseconds"] == pytest.approx(1e6 * work.recompute_s, rel=1e-4), (
        "of times in microseconds"
    )
    assert 0 < stats["beside_recompute_tokens"] < work.decoded_tokens
    assert stats["beside_recompute_microseconds"] > 0


def test_what_is_learned_is_kept_over_a_restart(model: str, recorded: Path, tmp_path: Path) -> None:
    """A second engine begins with what the first one learned; every decision tells its state."""
    learned, state = fitting_model(recorded, tmp_path / "model"), tmp_path / "state.json"
    policy = f"explore:{learned},online=on"
    events = []
    for number in ("first", "second"):
        plugin = harness.plugin(policy, trace=str(tmp_path / number), online_state=str(state))
        harness.run(job(model, REQUESTS, SCARCE, plugin=plugin), tmp_path)
        rows = trace.read(tmp_path / number).rows("decisions")
        events.append([json.loads(row["state"]) for row in sorted(rows, key=lambda row: row["time_s"])])
    loaded = online.load(state, cost.load(learned).digest)
    assert json.dumps(events[0][0]) != json.dumps(events[0][-1]), "something was learned"
    outcomes = [[one["online"]["outcomes"] for one in states] for states in events]
    assert outcomes[0][0] == 0 and 0 < outcomes[0][-1] <= outcomes[1][0]
    assert loaded.events >= outcomes[1][-1] > outcomes[1][0]


def test_a_state_of_another_model_is_set_aside(model: str, recorded: Path, tmp_path: Path) -> None:
    learned, state = fitting_model(recorded, tmp_path / "model"), tmp_path / "state.json"
    online.save(Online(), "0" * 64, state)
    plugin = harness.plugin(f"cheapest:{learned},online=on", online_state=str(state))
    harness.run(job(model, REQUESTS[:1], SCARCE, plugin=plugin), tmp_path)
    assert online.load(state.with_name("state.json.other-000000000000"), "0" * 64) == Online()


def test_without_a_model_nothing_is_claimed(model: str, tmp_path: Path) -> None:
    """No d0, no measured cost: the metric is absent rather than 0."""
    stats = harness.run(job(model, REQUESTS, SCARCE, plugin=harness.plugin("always-swap")), tmp_path)["stats"]
    assert harness.total(stats, "preemptions") > 10
    assert not [name for name in stats if name.startswith("measured")]
