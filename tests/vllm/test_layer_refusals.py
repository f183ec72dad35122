"""Layers that are refused on a vLLM older than 0.32, with what to do about it, and latent KV beside states. The others
that no version serves are in `tests/vllm/test_refusals.py`, steps beyond a block of states in
`tests/vllm/test_state_steps.py`."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from kvpolicy_vllm.plugin.layer_refusals import refuse_kv_cache, refuse_layout
from kvpolicy_vllm.plugin.versions import UnsupportedEngine
from tests.vllm.kv_caches import kv_cache, latent_spec, spec_of, unserved_groups

CONFIG: Any = SimpleNamespace(kv_transfer_config=None)


@pytest.mark.parametrize(
    ("layers", "helps"),
    [("two-full", False), ("window", False), ("full-window", True), ("full-chunks", True), ("full-states", False)],
)
def test_windows_and_chunks_stored_whole_are_advised_where_vllm_would_store_them_so(
    monkeypatch: pytest.MonkeyPatch, layers: str, helps: bool
) -> None:
    """It does so with windows and chunks beside full attention only, on every version that is served."""
    monkeypatch.setattr(vllm, "__version__", "0.30.0")
    with pytest.raises(UnsupportedEngine, match=r"KV cache groups \(.* older than 0\.32") as refused:
        refuse_kv_cache(CONFIG, kv_cache(layers, 9, 16, caching=True))
    assert ("--disable-hybrid-kv-cache-manager" in str(refused.value)) == helps


def test_a_build_without_a_version_is_as_old_as_its_kv_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "dev")
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector="KVPolicyConnector", kv_connector_extra_config={"allow_untested_version": True}
        )
    )
    older = kv_cache("full-window", 9, 16, caching=True)
    older.kv_cache_tensors = [SimpleNamespace(size=9, shared_by=["layer"])]
    with pytest.raises(UnsupportedEngine, match=r"older than 0\.32"):
        refuse_kv_cache(config, older)


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.33.0"])
def test_latent_kv_beside_states_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """As Kimi Linear has them: vLLM calls the states of its layers as those of GDN layers, which are served beside full
    attention. Latent KV alone is served, too."""
    monkeypatch.setattr(vllm, "__version__", version)
    states = replace(spec_of("state", 16, True), mamba_type=MambaAttentionBackendEnum.GDN_ATTN)
    latent, kept = KVCacheGroupSpec(["latent"], latent_spec(16)), KVCacheGroupSpec(["states"], states)

    def refuse(*groups: KVCacheGroupSpec) -> None:
        refuse_kv_cache(CONFIG, KVCacheConfig(num_blocks=9, kv_cache_tensors=[], kv_cache_groups=[*groups]))

    with pytest.raises(UnsupportedEngine, match="does not serve latent KV beside states, as the layers of Kimi Linear"):
        refuse(kept, latent)
    refuse(latent)


@pytest.mark.parametrize("drafts", [True, False])
def test_layers_unlike_the_others_are_told_with_the_flag_that_may_bring_them(
    monkeypatch: pytest.MonkeyPatch, drafts: bool
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.32.0")
    unlike = unserved_groups(16)["group indexer"]
    config: Any = SimpleNamespace(kv_transfer_config=None, speculative_config=SimpleNamespace() if drafts else None)
    with pytest.raises(UnsupportedEngine, match="of the kind UniformTypeKVCacheSpecs") as refused:
        refuse_kv_cache(config, KVCacheConfig(num_blocks=9, kv_cache_tensors=[], kv_cache_groups=[unlike]))
    assert ("leave --speculative-config out" in str(refused.value)) == drafts


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "LHBNC", "BHLNC"])
def test_layouts_that_take_a_block_of_a_layer_apart_are_refused_by_their_variable(layout: str) -> None:
    """With the strides that vLLM 0.32 makes of them. Latent KV has one head, so that no layout takes it apart."""
    layouts = pytest.importorskip("vllm.v1.kv_cache_layout", reason="vLLM has these layouts from 0.32 on").KVCacheLayout
    for spec in (spec_of("full", 16, True), latent_spec(16)):
        group = KVCacheGroupSpec([f"layer.{i}" for i in range(4)], spec)
        layer_stride, block_stride, *_ = kv_cache_interface.compute_layout_strides(spec, 9, 4, layouts[layout])
        tensor = kv_cache_interface.KVCacheTensor(
            size=9 * 4 * spec.page_size_bytes, layers=group.layer_names, layer_stride=layer_stride,
            block_stride=block_stride,
        )  # fmt: skip
        cache = KVCacheConfig(num_blocks=9, kv_cache_tensors=[tensor], kv_cache_groups=[group])
        if spec.num_kv_heads == 1 or layout.startswith(("LB", "BL")):
            refuse_layout(cache)
            continue
        with pytest.raises(UnsupportedEngine, match=r"overlap.*; where VLLM_KV_CACHE_LAYOUT .* as LBHNC"):
            refuse_layout(cache)
