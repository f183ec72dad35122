"""Costs of models with windows and states: measured, learned, explained, and served by. Real engines.

A profile's windows are those of ``kvpolicy_vllm.bench.measured_window``.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from kvpolicy import cost, explain, training
from kvpolicy import trace as traces
from kvpolicy.cost.laws import RecomputeRoofline
from kvpolicy.explanation import Question
from kvpolicy.hardware import Geometry
from kvpolicy.settings import Measurement
from kvpolicy.shape import ModelShape
from kvpolicy.trace import Trace
from kvpolicy_vllm.bench.profile_parts import Extent, Rig
from kvpolicy_vllm.bench.run_profile import profile
from tests.vllm import families, harness
from tests.vllm.conftest import job

SMALL = Extent((32,), 20, 1, 1, 0, 400, 3, 1200, 1024, max_extra=1)
KEPT: dict[str, tuple[int, int, int]] = {
    "gpt-oss": (2, 128, 0),
    "gemma-3": (5, 128, 0),
    "mistral": (4, 128, 0),
    "granite-4": (0, 0, 3),
    "nemotron-h": (0, 0, 2),
    "qwen3-next": (0, 0, 3),
    "deepseek-v2": (0, 0, 0),
}
"""Layers with a window, its tokens, and layers with a state, by family."""
NO_CACHING = {"enable_prefix_caching": False}
OWN_ENGINE: dict[str, dict[str, Any]] = {
    "granite-4": NO_CACHING, "nemotron-h": NO_CACHING, "deepseek-v2": NO_CACHING
}  # fmt: skip
"""With prefix caching vLLM's CPU build ends with an IndexError in ``mamba_mixer2`` once a step computes a prompt beyond
a block of Mamba2 states, and the plugin refuses such steps (:mod:`kvpolicy_vllm.plugin.state_steps`). Of MLA a prefix
cache would have a victim's whole blocks saved later than the others."""
REQUESTS = harness.prompts(14, (60, 320), (60, 200), seed=6)
SCARCE_BLOCKS = {
    "gpt-oss": 44, "gemma-3": 110, "mistral": 26, "granite-4": 34, "nemotron-h": 28, "qwen3-next": 30,
    "deepseek-v2": 40,
}  # fmt: skip
"""Blocks in which these requests are preempted, some of them twice."""


def marked(name: str) -> Any:
    feature = pytest.mark.feature(f"a profile of {families.FAMILIES[name].feature}")
    return pytest.param(name, marks=[feature, pytest.mark.slow])


@pytest.fixture(scope="module", params=[*map(marked, KEPT)])
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """A family's name, its model, and a small profile of it."""
    name, folder = request.param, tmp_path_factory.mktemp("measured")
    families.skip_unless_served(families.FAMILIES[name])
    llm = families.make(name, folder / "model")
    arguments = Rig.engine_arguments

    def with_own(rig: Rig, *others: Any) -> dict[str, Any]:
        exact = {"dtype": "float32"} if families.FAMILIES[name].dtype == "float32" else {}  # vLLM would round it
        return arguments(rig, *others) | exact | OWN_ENGINE.get(name, {})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rig, "engine_arguments", with_own)
        profile(folder / "trace", Measurement(llm), extent=SMALL, progress=lambda part, done, of: None)
    return name, llm, folder / "trace"


@pytest.fixture(scope="module")
def learned(measured: tuple[str, Path, Path]) -> Path:
    _, llm, trace = measured
    training.train([trace], llm.parent / "learned", "analytic", force=True)
    return llm.parent / "learned"


def by_state(trace: Trace) -> dict[str, list[dict[str, Any]]]:
    named = {row["preemption_id"] for row in trace.rows("windows") if not row["discarded"]}
    result = defaultdict(list)
    for row in trace.rows("decisions"):
        if row["preemption_id"] in named:
            result[row["state_id"]].append(row)
    return result


def test_a_profile_says_what_the_layers_are(measured: tuple[str, Path, Path]) -> None:
    name, llm, folder = measured
    (header,) = traces.read(folder).headers.values()
    geometry = Geometry.from_dict(header.geometry)
    assert (geometry.window_layers, geometry.window_tokens, geometry.state_layers) == KEPT[name]
    assert geometry == Geometry.of_shape(ModelShape.read(llm))


def test_states_are_reached_by_lack_of_memory_and_by_force(measured: tuple[str, Path, Path]) -> None:
    states = by_state(traces.read(measured[2]))
    assert len(states) >= 0.8 * SMALL.states
    causes = [rows[0]["cause"] for rows in states.values()]
    assert causes.count("memory") * 2 >= len(causes) > causes.count("memory")
    for rows in states.values():
        for row in rows:
            assert (row["short_blocks"] >= 1) if row["cause"] == "memory" else (row["free_blocks"] > 0)


def test_all_that_a_victim_needs_is_lost_and_moved(measured: tuple[str, Path, Path]) -> None:
    """The blocks of all tables: as the geometry counts them, saved and loaded whole, or computed again."""
    trace = traces.read(measured[2])
    (header,) = trace.headers.values()
    geometry, size = Geometry.from_dict(header.geometry), header.block_size
    block_layers = round(header.block_bytes / size / geometry.layer_kv_bytes_per_token)
    outcomes = {row["preemption_id"]: row for row in trace.rows("outcomes")}
    moved: dict[tuple[str, str], int] = defaultdict(int)
    for row in trace.rows("transfers"):
        moved[row["preemption_id"], row["direction"]] += row["bytes"]
    for rows in by_state(trace).values():
        for row in rows:
            held = geometry.held_blocks(row["computed_tokens"], size, block_layers)
            assert (row["held_blocks"], row["save_blocks"], row["hit_blocks"]) == (held, held, 0.0)
            outcome, name = outcomes[row["preemption_id"]], row["preemption_id"]
            tokens = (row["computed_tokens"], 0) if row["arm"] == "recompute" else (0, row["computed_tokens"])
            assert (outcome["recomputed_tokens"], outcome["loaded_tokens"], outcome["local_hit_tokens"]) == (*tokens, 0)
            copied = held * header.block_bytes if row["arm"] == "swap" else 0
            assert (moved[name, "save"], moved[name, "load"]) == (copied, copied)


def test_a_model_is_learned_and_explains_itself(measured: tuple[str, Path, Path], learned: Path) -> None:
    model = cost.load(learned)
    geometry, law = model.provenance.geometry, model.laws["recompute"]
    assert isinstance(law, RecomputeRoofline) and law.window_tokens == KEPT[measured[0]][1]
    full, windows = geometry.full_layers, geometry.window_layers
    assert law.s_per_window_pair * full == pytest.approx(law.s_per_pair * windows)
    explanation = explain(model, Question(300, running=2))
    size = model.provenance.block_sizes[0]
    assert explanation.question.situation.held_blocks == model.provenance.held_blocks(300, size)


@pytest.mark.slow
def test_a_server_chooses_by_it_and_changes_no_token(
    measured: tuple[str, Path, Path], learned: Path, tmp_path: Path
) -> None:
    name, llm, folder = measured
    (header,) = traces.read(folder).headers.values()
    engine: dict[str, Any] = {"block_size": 32, "max_model_len": 544, "dtype": families.FAMILIES[name].dtype}
    engine |= {"enable_prefix_caching": True} | OWN_ENGINE.get(name, {})
    plenty = engine | {"num_gpu_blocks_override": 900}
    workloads = {"requests": REQUESTS}
    outcome = harness.run(job(str(llm), [], plenty, scenario="several", workloads=workloads, gaps=True), tmp_path)
    assert not outcome["preempted"]
    reference = outcome["requests"]
    few = engine | {"num_gpu_blocks_override": SCARCE_BLOCKS[name]}
    plugin = harness.plugin(f"cheapest:{learned}", trace=str(tmp_path / "trace"))
    result = harness.run(job(str(llm), REQUESTS, few, plugin=plugin), tmp_path)
    if families.FAMILIES[name].dtype == "float32":  # in bfloat16 what is said depends on the batch
        harness.assert_exact(reference, result)
    assert {one: len(tokens) for one, tokens in result["tokens"].items()} == {
        one: len(tokens) for one, tokens in reference["tokens"].items()
    }
    harness.assert_nothing_left(result)
    assert harness.total(result["stats"], "preemptions") >= 3
    assert harness.total(result["stats"], "fallbacks", reason="error") == 0
    decisions = traces.read(tmp_path / "trace").rows("decisions")
    assert {row["block_size"] for row in decisions} == {header.block_size}
    assert all(len(row["costs"]) == len(row["options"]) for row in decisions), "predicted for every option"


@pytest.mark.slow
def test_a_model_of_another_kind_of_layers_is_refused(
    measured: tuple[str, Path, Path], learned: Path, model: str, tmp_path: Path
) -> None:
    engine = {"num_gpu_blocks_override": 400, "dtype": families.FAMILIES[measured[0]].dtype}
    for llm, other in ((model, str(learned)), (str(measured[1]), "cpu-llama-native")):
        work = job(llm, [], engine, plugin=harness.plugin(f"cheapest:{other}"))
        with pytest.raises(harness.EngineFailed, match=r"geometry\.\w+ is .* here, it was measured on"):
            harness.run(work, tmp_path)
