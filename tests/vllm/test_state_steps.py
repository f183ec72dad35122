"""Steps that compute a prompt beyond a block of Mamba2 states: refused where vLLM ends then, with what is right."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm

from kvpolicy_vllm.plugin import layer_refusals
from kvpolicy_vllm.plugin.state_steps import beyond_a_block_of_states
from kvpolicy_vllm.plugin.versions import UnsupportedEngine
from tests.feature_record import installed_version
from tests.vllm import families, harness

BLOCK = 128


def group(kind: str, **fields: Any) -> Any:
    return SimpleNamespace(kv_cache_spec=type(kind, (), {"block_size": BLOCK} | fields)(), layer_names=["layer"])


def states(mamba: str = "MAMBA2", mode: str = "align", checkpoints: int = 1) -> Any:
    kept = {"mamba_type": SimpleNamespace(name=mamba), "mamba_cache_mode": mode}
    return group("MambaSpec", **kept, num_prefill_checkpoint_blocks=checkpoints)


def kv_cache(*groups: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=groups, kv_cache_tensors=[SimpleNamespace(layers=["layer"])])


HYBRID = kv_cache(states(), group("FullAttentionSpec"))


def configured(batched: int = 2048, scheduled: int | None = None, longest: int = 4096, **own: Any) -> Any:
    """``own``: the plugin's settings."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=batched, max_num_scheduled_tokens=scheduled),
        model_config=SimpleNamespace(max_model_len=longest),
        kv_transfer_config=SimpleNamespace(kv_connector="KVPolicyConnector", kv_connector_extra_config=own),
    )


def test_a_step_beyond_a_block_is_told_with_both_ways_out() -> None:
    problem = beyond_a_block_of_states(configured(BLOCK + 1), HYBRID)
    assert "\n" not in problem and "128 here, and a step may have 129" in problem
    assert problem.endswith("give --no-enable-prefix-caching, or --max-num-batched-tokens of at most 128")


def test_the_flag_that_limits_is_named() -> None:
    problem = beyond_a_block_of_states(configured(2048, scheduled=512), HYBRID)
    assert "a step may have 512" in problem and problem.endswith("or --max-num-scheduled-tokens of at most 128")


@pytest.mark.parametrize(
    ("config", "cache"),
    [
        (configured(BLOCK), HYBRID),
        (configured(2048, scheduled=BLOCK), HYBRID),
        (configured(BLOCK, scheduled=512), HYBRID),
        (configured(longest=BLOCK), HYBRID),
        (configured(), kv_cache(states(mode="none"), group("FullAttentionSpec"))),
        (configured(), kv_cache(states("GDN_ATTN", checkpoints=0), group("FullAttentionSpec"))),
        (configured(), kv_cache(states(checkpoints=0), group("FullAttentionSpec"))),
        (configured(), kv_cache(group("FullAttentionSpec"), group("SlidingWindowSpec"))),
    ],
    ids=[
        "batch",
        "scheduler",
        "batch below it",
        "short model",
        "no prefix caching",
        "GDN",
        "steps end at blocks",
        "windows",
    ],
)
def test_what_is_never_computed_beyond_a_block(config: Any, cache: Any) -> None:
    assert beyond_a_block_of_states(config, cache) == ""


@pytest.mark.parametrize(
    ("called", "cpu", "refused"),
    [
        ("0.32.0", True, True),
        ("0.32.1+cpu", True, True),
        ("0.33.0+cpu", True, True),
        ("0.34.0", True, True),
        ("dev", True, True),
        ("0.32.0", False, False),
        ("0.33.0", False, False),
    ],
)
def test_a_build_that_ends_or_may_is_refused(
    monkeypatch: pytest.MonkeyPatch, called: str, cpu: bool, refused: bool
) -> None:
    """No CPU build after 0.32 was seen to come through: there may be some from sources, with and without a version."""
    monkeypatch.setattr(vllm, "__version__", called)
    monkeypatch.setattr(layer_refusals, "platform", lambda: SimpleNamespace(is_cpu=lambda: cpu))
    if not refused:
        layer_refusals.refuse_kv_cache(configured(allow_untested_version=True), HYBRID)
        return
    with pytest.raises(UnsupportedEngine, match="ends with an IndexError in mamba_mixer2"):
        layer_refusals.refuse_kv_cache(configured(allow_untested_version=True), HYBRID)
    layer_refusals.refuse_kv_cache(configured(BLOCK, allow_untested_version=True), HYBRID)


@pytest.mark.slow
def test_vllm_itself_ends_there(tmp_path: Path) -> None:
    """Why it is refused: without the plugin, and at one token more than a block has. Should this fail some day, steps
    need no limit."""
    if installed_version() != "0.32":
        pytest.skip("vLLM ends here on 0.32, and no CPU build of another version serves states")
    model, rng = str(families.make("granite-4", tmp_path / "model")), random.Random(5)
    engine = {"max_model_len": 512, "max_num_seqs": 4, "num_gpu_blocks_override": 120, "max_num_batched_tokens": 512}
    prompt = [rng.randrange(10, 2000) for _ in range(BLOCK + 1)]

    def served(tokens: int, **more: Any) -> int:
        requests = [{"prompt": prompt[:tokens], "max_tokens": 4}]
        job = {"scenario": "plain", "model": model, "requests": requests, "engine": engine | more}
        return len(harness.run(job, tmp_path)["tokens"]["r0"])

    assert served(BLOCK, enable_prefix_caching=True) == 4
    assert served(BLOCK + 1, enable_prefix_caching=False) == 4
    assert served(BLOCK + 1, enable_prefix_caching=True, max_num_batched_tokens=BLOCK) == 4
    with pytest.raises(harness.EngineFailed, match=r"IndexError: index [0-9]+ is out of bounds"):
        served(BLOCK + 1, enable_prefix_caching=True)
