"""Bytes and pieces of a KV block in the layouts that vLLM makes: a region per layer, or whole blocks side by side."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.request import Request

from kvpolicy.errors import InputError
from kvpolicy_vllm.plugin import kv_layout
from kvpolicy_vllm.plugin.kv_layout import Piece
from tests.vllm.kv_caches import MODEL_TOKENS, WINDOW, kv_cache, spec_of

PAGE, BLOCKS = 16384, 9


def laid_out(*tensors: dict[str, Any], layers: str = "full-window") -> KVCacheConfig:
    cache = kv_cache(layers, BLOCKS, 16, caching=True)
    cache.kv_cache_tensors = [
        KVCacheTensor(size=8 * PAGE * BLOCKS, layers=group.layer_names, **given)
        for group, given in zip(cache.kv_cache_groups, tensors, strict=True)
    ]
    return cache


APART = {"layer_stride": PAGE * BLOCKS, "block_stride": PAGE}
PACKED = {"layer_stride": PAGE, "block_stride": 4 * PAGE}


def test_a_region_for_each_layer_shared_by_the_groups() -> None:
    cache = laid_out(APART, APART)
    assert kv_layout.pieces(cache) == [Piece(layer * PAGE * BLOCKS, PAGE, PAGE) for layer in range(4)]
    assert (kv_layout.block_bytes(cache), kv_layout.page_bytes(cache)) == (4 * PAGE, PAGE)


def test_whole_blocks_side_by_side_are_one_piece() -> None:
    cache = laid_out(PACKED, PACKED)
    assert kv_layout.pieces(cache) == [Piece(0, 4 * PAGE, 4 * PAGE)]
    assert (kv_layout.block_bytes(cache), kv_layout.page_bytes(cache)) == (4 * PAGE, 4 * PAGE)


def test_groups_with_regions_of_their_own() -> None:
    cache = laid_out(APART, APART | {"offset": 4 * PAGE * BLOCKS})
    assert kv_layout.block_bytes(cache) == 8 * PAGE


@pytest.mark.parametrize(
    ("second", "words"),
    [(APART | {"offset": PAGE}, "overlap"), (PACKED, "apart"), (APART | {"offset": PAGE // 2}, "overlap")],
)
def test_layouts_that_are_not_copied(second: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        kv_layout.pieces(laid_out(APART, second))


def test_segments_are_the_memory_of_the_blocks() -> None:
    cache = laid_out(APART, APART)
    memory = torch.zeros(4 * PAGE * BLOCKS, dtype=torch.uint8)
    layers = {"a": memory[: PAGE * BLOCKS], "b": [memory[PAGE * BLOCKS :]]}
    segments = kv_layout.segments_of_layers(layers, cache)
    segments[2][5] = -1  # every bit, whatever the segment counts in
    assert memory.nonzero().flatten().tolist() == [*range((2 * BLOCKS + 5) * PAGE, (2 * BLOCKS + 6) * PAGE)]
    with pytest.raises(InputError, match="2 allocations"):
        kv_layout.segments_of_layers(layers | {"c": torch.zeros(4)}, cache)


@pytest.mark.parametrize(("offset", "counts_in"), [(0, torch.int64), (16, torch.int64), (4, torch.uint8)])
def test_segments_count_in_the_widest_words_that_fit(offset: int, counts_in: torch.dtype) -> None:
    cache = laid_out(APART | {"offset": offset}, layers="full")
    memory = torch.zeros(4 * PAGE * BLOCKS + offset, dtype=torch.uint8)
    first, *_ = kv_layout.segments_of_layers({"a": memory}, cache)
    first[0] = -1 if counts_in == torch.int64 else 255
    assert first.dtype == counts_in and memory.nonzero().flatten().tolist() == [*range(offset, offset + PAGE)]


def test_where_layers_lie_is_said_by_their_tensors_alone() -> None:
    assert kv_layout.says_where_layers_lie(laid_out(APART, layers="full"))
    assert not kv_layout.says_where_layers_lie(kv_cache("full", BLOCKS, 16, caching=True))


def test_what_a_plain_cache_is() -> None:
    full, window = kv_cache("full", BLOCKS, 16, caching=True), kv_cache("window", BLOCKS, 16, caching=True)
    assert kv_layout.is_plain(full) and kv_layout.block_tables(full) is None and kv_layout.attends_to_everything(full)
    assert not kv_layout.is_plain(window) and not kv_layout.attends_to_everything(window)
    full.kv_cache_groups[0].kv_cache_spec = FullAttentionSpec(
        block_size=16, num_kv_heads=4, head_size=32, dtype=torch.float32, sliding_window=64
    )
    assert kv_layout.is_plain(full) and not kv_layout.attends_to_everything(full), "windows that are stored whole"
    assert kv_layout.kept_layers(full) == kv_layout.KeptLayers(4, 64, 0, False)
    full.kv_cache_groups[0].kv_cache_spec = FullAttentionSpec(
        block_size=16, num_kv_heads=4, head_size=32, dtype=torch.float32, attention_chunk_size=64
    )
    assert kv_layout.is_plain(full) and not kv_layout.attends_to_everything(full), "chunks that are stored whole"
    states = kv_layout.block_tables(kv_cache("full-states", BLOCKS, 16, caching=False))
    assert states is not None and states.block_sizes == (2048, 16, 2048)
    assert kv_layout.block_size(kv_cache("full-states", BLOCKS, 16, caching=False)) == 16


@pytest.mark.parametrize(
    ("layers", "windows", "states"), [("full", 0, 0), ("full-window", 4, 0), ("full-states", 0, 8), ("two-full", 0, 0)]
)
def test_layers_that_do_not_keep_every_token_are_counted(layers: str, windows: int, states: int) -> None:
    kept = kv_layout.kept_layers(kv_cache(layers, BLOCKS, 16, caching=True))
    assert kept == kv_layout.KeptLayers(windows, WINDOW if windows else 0, states, False)


def test_states_alone_never_need_another_block() -> None:
    """Without prefix caching, as vLLM has it for models without attention: whoever is let in has its only block, so
    nobody is preempted for memory. That is why such models are refused."""
    group = KVCacheGroupSpec(["layer.0"], spec_of("state", 16, caching=False))
    cache = KVCacheConfig(num_blocks=3, kv_cache_tensors=[], kv_cache_groups=[group])
    manager = KVCacheManager(cache, MODEL_TOKENS, MODEL_TOKENS, MODEL_TOKENS, enable_caching=False)
    first, second, third = (Request(str(i), [5], SamplingParams(max_tokens=MODEL_TOKENS), None) for i in range(3))
    for request in (first, second):
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens = 1
    assert manager.block_pool.get_num_free_blocks() == 0
    for request in (first, second):
        request.append_output_token_ids(list(range(MODEL_TOKENS - 1)))
        assert manager.allocate_slots(request, MODEL_TOKENS - 1) is not None
    assert manager.allocate_slots(third, 1) is None
