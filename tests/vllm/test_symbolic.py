"""Every context position of every step is right, whatever fails, comes late, is aborted, forced out or reset.

The scheduler alone drives a worker with symbolic KV (`tests.vllm.symbolic`), so that whole runs take seconds.
Versions are those of `test_same_schedule`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm import harness
from tests.vllm.test_same_schedule import BASE, modes, run_alone, versions
from tests.vllm.versions import INSTALLED, before_tables

pytestmark = pytest.mark.scheduler

SEEDS = range(1, 5)
SEEDS_OF_LAYERS = range(1, 3)
RESET_SEEDS = range(1, 25)
"""More, because the moment to be met comes about in one run of five."""


def runs(model: str, folder: Path, version: str, seeds: range, **more: Any) -> list[dict[str, Any]]:
    """One run per seed, all in one process: most of the time of a single one would go into importing vLLM."""
    plugin = harness.plugin("random:0.7")
    size = {"requests": 80, "blocks": 140, "budget": 512}
    job = BASE | size | {"model": model, "plugin": plugin, "symbolic": True, "harry": True, "seeds": [*seeds]}
    return run_alone(job | more, folder, version)["runs"]


def assert_right(found: dict[str, Any]) -> None:
    assert found["wrong"] == []
    assert found["garbled"] == [], "tokens lost or repeated"
    assert found["unfinished"] == 0
    assert found["undecided"] == 0, "decisions never counted"
    harness.assert_nothing_left(found)
    assert harness.total(found["stats"], "fallbacks", reason="error") == 0


def assert_eventful(found: dict[str, Any]) -> None:
    """The run really did what it is there to test."""
    stats = found["stats"]
    assert found["positions_read"] > 100_000
    assert harness.total(stats, "preemptions", executed="swap") > 20
    assert harness.total(stats, "loaded_tokens") > 0
    assert harness.total(stats, "fallbacks", reason="save_failed") > 0
    assert harness.total(stats, "fallbacks", reason="load_failed") > 0


@pytest.mark.feature("full attention")
@pytest.mark.feature("asynchronous scheduling")
@pytest.mark.feature("prefix caching")
@pytest.mark.feature("failed copies")
@pytest.mark.parametrize("prefix_caching", [False, True], ids=["no-prefixes", "prefixes"])
@modes
@versions
def test_every_position_is_right(
    version: str, asynchronous: bool, prefix_caching: bool, model: str, tmp_path: Path
) -> None:
    done = runs(model, tmp_path, version, SEEDS, asynchronous=asynchronous, prefix_caching=prefix_caching, resets=False)
    for result in done:
        assert_right(result)
        assert_eventful(result)
    if prefix_caching:
        assert sum(result["partial_loads"] for result in done), "no resume found part of its tokens on the device"


served = pytest.mark.skipif(before_tables(), reason="several block tables are served from 0.32 on")
with_tables = pytest.mark.parametrize(
    "version",
    [pytest.param(INSTALLED, marks=served), pytest.param("0.33.0", marks=pytest.mark.slow)],
    scope="module",
)
"""Versions that several block tables are served on."""


@pytest.mark.feature("several KV cache groups")
@pytest.mark.parametrize("prefix_caching", [False, True], ids=["no-prefixes", "prefixes"])
@pytest.mark.parametrize(
    ("layers", "blocks"),
    [("two-full", 200), ("window", 60), ("full-window", 130), ("full-states", 180), ("full-chunks", 180)],
)
@modes
@with_tables
def test_every_position_and_state_of_every_group_is_right(
    version: str, layers: str, blocks: int, asynchronous: bool, prefix_caching: bool, model: str, tmp_path: Path
) -> None:
    """Layers that attend to a window, or keep a state, have block tables of their own."""
    more = {"layers": layers, "blocks": blocks, "asynchronous": asynchronous, "prefix_caching": prefix_caching}
    for result in runs(model, tmp_path, version, SEEDS_OF_LAYERS, resets=False, **more):
        assert_right(result)
        assert_eventful(result)


@pytest.mark.feature("states on model runner v2, allowed by its setting")
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="fcfs"),
        pytest.param({"scheduling": "priority"}, id="priority", marks=pytest.mark.slow),
        pytest.param({"resets": True}, id="resets", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("prefix_caching", [False, True], ids=["no-prefixes", "prefixes"])
@modes
@with_tables
def test_no_block_is_given_away_before_it_is_saved_where_a_step_overwrites_it_first(
    version: str, asynchronous: bool, prefix_caching: bool, more: dict[str, Any], model: str, tmp_path: Path
) -> None:
    """On model runner v2 a step clears blocks and copies states before a connector is called: here the whole step
    computes before its saves begin."""
    if prefix_caching and "resets" in more:
        pytest.skip("vLLM itself gives up on such a reset while somebody is being loaded")
    runner = {"model_runner_v2": True, "plugin": harness.plugin("random:0.7", allow_untested_states_v2=True)}
    size = {"layers": "full-states", "blocks": 180, "asynchronous": asynchronous, "prefix_caching": prefix_caching}
    for result in runs(model, tmp_path, version, SEEDS_OF_LAYERS, **{"resets": False} | runner | size | more):
        assert_right(result)
        assert_eventful(result)
        assert result["steps_with_held_blocks"] > 20


@pytest.mark.feature("resets of the prefix cache")
@modes
@versions
def test_nothing_of_old_weights_is_read_after_a_reset(
    version: str, asynchronous: bool, model: str, tmp_path: Path
) -> None:
    """Without prefix caching: with it, vLLM itself gives up on a reset while somebody is being loaded."""
    done = runs(model, tmp_path, version, RESET_SEEDS, asynchronous=asynchronous, prefix_caching=False, resets=True)
    for result in done:
        assert_right(result)
        assert_eventful(result)
        assert result["resets"] > 0
    # That moment is rare and easily got wrong.
    assert sum(result["reset_when_loaded_and_waiting"] for result in done), "no reset met a loaded request that waits"


@pytest.mark.feature("pauses and sleep")
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
@versions
def test_a_pause_that_clears_caches_waits_for_loads(mode: str, version: str, model: str, tmp_path: Path) -> None:
    """vLLM's own pause, as in `sleep`: it must end, leave no block held, and nobody may read what was there before."""
    plugin = harness.plugin("always-swap")
    size = {"requests": 12, "blocks": 140, "budget": 512, "prefix_caching": True}
    job = BASE | size | {"model": model, "plugin": plugin, "mode": mode, "seeds": [*range(1, 9)]}
    for result in run_alone(job, tmp_path, version)["runs"]:
        assert result["paused"]["done"], "the pause failed or never came to its end"
        assert (result["paused"]["held_blocks"], result["paused"]["host_slots_used"]) == (0, 0)
        assert_right(result)
