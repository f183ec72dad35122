"""vLLM's scheduler on a virtual clock for models with windows and states: the groups that vLLM makes of layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvpolicy import policy
from kvpolicy.errors import InputError
from kvpolicy.order import load
from kvpolicy.simulator import Run, Server
from kvpolicy.simulator.hardware.law_times import ConstantTimes
from kvpolicy.simulator.sinks import MemorySink
from kvpolicy.workload import Request, Workload
from kvpolicy_vllm.plugin.versions import OLDEST_WITH_TABLES, engine_version
from kvpolicy_vllm.simulator import model_layers
from kvpolicy_vllm.simulator.deployment import block_bytes_of, scheduler_for
from kvpolicy_vllm.simulator.engine import VllmScheduler
from kvpolicy_vllm.simulator.model_layers import MODELS, Attention, ModelLayers, States, max_blocks

pytestmark = [
    pytest.mark.scheduler,
    pytest.mark.skipif(engine_version() < OLDEST_WITH_TABLES, reason="several block tables are served from 0.32 on"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # vLLM's own
]

HYBRID = ModelLayers("window and full", (Attention(2, 2, 32, window=40), Attention(2, 2, 32)))
STATEFUL = ModelLayers("states and full", (Attention(1, 2, 32),), States(2, 8000))
WORK = Workload("by hand", tuple(Request(0.01 * i, 60 + i, 100 + 3 * i) for i in range(24)), 0)


def server_of(layers: ModelLayers, blocks: int = 100, **more: Any) -> Server:
    return Server(
        layers.block_size, block_bytes_of(layers), blocks, 1000, token_budget=128, max_running=16, max_model_len=1024,
        rules=VllmScheduler().rules, **more,
    )  # fmt: skip


def run(layers: ModelLayers, how: str, server: Server) -> Run:
    return VllmScheduler(layers=layers).run(WORK, policy.load(how), server, ConstantTimes(), 0, MemorySink())


@pytest.mark.parametrize(
    ("name", "kinds", "layers", "size"),
    [
        ("llama-3.1-8b", ["FullAttention"], 32, 16),
        ("mistral-7b-v0.1", ["SlidingWindow"], 32, 16),
        ("gpt-oss-20b", ["FullAttention", "SlidingWindow"], 12, 16),
        ("gemma-3-12b", ["FullAttention", *["SlidingWindow"] * 5], 8, 16),
        ("llama-4-scout", [*["ChunkedLocalAttention"] * 3, "FullAttention"], 12, 16),
        ("deepseek-v3", ["MLAAttention"], 61, 16),
        ("granite-4-h-small", ["FullAttention", *["Mamba"] * 9], 4, 528),
        ("nemotron-h-8b", ["FullAttention", *["Mamba"] * 6], 4, 528),
        ("qwen3-next-80b-a3b", ["FullAttention", *["Mamba"] * 3], 12, 544),
    ],
)
def test_the_groups_are_those_that_vllm_makes(name: str, kinds: list[str], layers: int, size: int) -> None:
    model = MODELS[name]
    scheduler = scheduler_for(server_of(model, blocks=9, prefix_caching=True), model)
    groups = scheduler.kv_cache_config.kv_cache_groups
    assert sorted(type(group.kv_cache_spec).__name__ for group in groups) == [f"{kind}Spec" for kind in kinds]
    assert {len(group.layer_names) for group in groups} == {layers}
    assert {group.kv_cache_spec.block_size for group in groups} == {size}
    assert scheduler.kv_cache_manager.block_pool.num_gpu_blocks == 10
    token_bytes = max(attention.token_bytes for attention in model.attention)
    assert block_bytes_of(model) == layers * size * token_bytes


def test_layers_with_fewer_bytes_of_a_token_have_longer_blocks() -> None:
    model = MODELS["gemma-4-31b"]
    groups = scheduler_for(server_of(model, blocks=9), model).kv_cache_config.kv_cache_groups
    sizes = sorted((type(group.kv_cache_spec).__name__, group.kv_cache_spec.block_size) for group in groups)
    assert sizes == [("FullAttentionSpec", 32), *[("SlidingWindowSpec", 16)] * 5]
    assert {len(group.layer_names) for group in groups} == {10}
    assert block_bytes_of(model) == 10 * 16 * 2 * 16 * 256 * 2 == 10 * 32 * 2 * 4 * 512 * 2


def test_windows_are_stored_whole_without_the_hybrid_manager() -> None:
    whole = replace(MODELS["gpt-oss-20b"], hybrid_manager=False)
    scheduler = scheduler_for(server_of(whole), whole)
    (group,) = scheduler.kv_cache_config.kv_cache_groups
    assert len(group.layer_names) == 24 and scheduler.kvpolicy.tables is None
    assert block_bytes_of(whole) == 2 * block_bytes_of(MODELS["gpt-oss-20b"])


@pytest.mark.parametrize("retention", [0, None, 64])
def test_vllm_is_told_what_to_cache(retention: int | None) -> None:
    layers = replace(HYBRID, retention=retention)
    scheduler = scheduler_for(server_of(layers), layers)
    assert scheduler.kv_cache_manager.coordinator.retention_interval == retention


@pytest.mark.parametrize("caching", [True, False], ids=["prefixes", "no-prefixes"])
@pytest.mark.parametrize("layers", [HYBRID, STATEFUL], ids=["window", "states"])
def test_a_swap_brings_back_what_a_recompute_computes_again(layers: ModelLayers, caching: bool) -> None:
    server = server_of(layers, blocks=60 if layers is HYBRID else 40, prefix_caching=caching)
    swapped, recomputed = run(layers, "always-swap", server), run(layers, "always-recompute", server)
    assert swapped.summary.requests == recomputed.summary.requests == len(WORK.requests)
    assert swapped.summary.preemptions["swap"] > 3 and recomputed.summary.preemptions["recompute"] > 3
    assert recomputed.summary.recomputed_tokens > 500 and recomputed.summary.moved_bytes == 0
    assert swapped.summary.recomputed_tokens < 100 and swapped.summary.moved_bytes > 0
    assert swapped.trace is not None
    loaded = [row["loaded_tokens"] for row in swapped.trace.rows("outcomes")]
    decided = [row["computed_tokens"] for row in swapped.trace.rows("decisions")]
    assert sum(loaded) > 0.8 * sum(decided)


def test_an_order_of_service_displaces_over_several_block_tables() -> None:
    server = server_of(HYBRID, blocks=60, order=load("mlfq:base=8"))
    done = run(HYBRID, "always-swap", server)
    assert done.trace is not None
    causes = [row["cause"] for row in done.trace.rows("decisions")]
    assert causes.count("displaced") > 10 and done.summary.requests == len(WORK.requests)


def test_equal_runs_are_equal_and_others_have_other_names() -> None:
    server = server_of(HYBRID, blocks=60)
    first, again = (run(HYBRID, "always-swap", server) for _ in range(2))
    other = run(replace(HYBRID, retention=None), "always-swap", server)
    assert replace(first.summary, simulator_wall_s=0.0) == replace(again.summary, simulator_wall_s=0.0)
    assert first.trace is not None and again.trace is not None and other.trace is not None
    assert first.trace.headers == again.trace.headers
    assert first.trace.headers.keys().isdisjoint(other.trace.headers)


def test_a_server_with_other_blocks_is_refused() -> None:
    server = server_of(HYBRID)
    with pytest.raises(InputError, match=r"block_bytes is 1, but the layers of window and full have \d+"):
        scheduler_for(replace(server, block_bytes=1), HYBRID)
    with pytest.raises(InputError, match="block_size is 32, but the layers of window and full have 16"):
        scheduler_for(replace(server, block_size=32), HYBRID)


def test_what_vllm_cannot_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="should have one of window, chunk and latent"):
        Attention(1, 2, 32, window=40, chunk=64)
    with pytest.raises(InputError, match="kv_heads should be 1"):
        Attention(1, 2, 32, latent=True)
    with pytest.raises(InputError, match="a: has no attention layers"):
        ModelLayers("a", (), States(1, 8))
    with pytest.raises(InputError, match="leave it True"):
        replace(STATEFUL, hybrid_manager=False)
    server = server_of(HYBRID)
    monkeypatch.setattr(model_layers, "engine_version", lambda: (0, 31))
    with pytest.raises(InputError, match=r"from vLLM 0\.32 on"):
        scheduler_for(replace(server, max_model_len=512), HYBRID)


def test_a_request_that_never_fits_is_refused() -> None:
    """A window's blocks are bounded, those of full attention are not."""
    server = server_of(HYBRID, blocks=40)
    with pytest.raises(InputError, match="request 0 needs"):
        VllmScheduler(layers=HYBRID).run(
            Workload("one", (Request(0.0, 600, 100),), 0), policy.load("always-recompute"), server, ConstantTimes()
        )
    managers = scheduler_for(server, HYBRID).kv_cache_manager.coordinator.single_type_managers
    assert max_blocks(managers, 160) == 10 + 10 and max_blocks(managers, 800) == 50 + (39 + 128 + 15) // 16 + 1
    managers = scheduler_for(server_of(STATEFUL), STATEFUL).kv_cache_manager.coordinator.single_type_managers
    assert max_blocks(managers, 10 * STATEFUL.block_size) == 10 + 2 * (len(managers) - 1)
