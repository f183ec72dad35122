"""The KV cache as vLLM lays it out: its groups of layers, and the bytes of one block in device memory.

A block of memory belongs to one group at a time and has the same bytes whatever group that is: the groups are laid over
one another. So a block is one page in each of the regions that the groups share.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvpolicy.errors import InputError
from kvpolicy_vllm.plugin.block_tables import BlockTables

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

FULL_ATTENTION = ("FullAttentionSpec", "MLAAttentionSpec")
"""Specifications of layers for which every block of a request is needed, up to its last token."""


class Piece(NamedTuple):
    """Contiguous bytes of each block."""

    offset: int
    """Of block 0, bytes from the start of the device memory for the KV cache."""
    stride: int
    """Bytes from one block to the next."""
    size: int


def kind_of(group: Any) -> str:
    """The name of the group's specification."""
    return type(group.kv_cache_spec).__name__


def state_kind(group: Any) -> str:
    """vLLM's name of the states that the group's layers keep, as MAMBA2; empty where they keep none."""
    if kind_of(group) != "MambaSpec":
        return ""
    mamba_type = group.kv_cache_spec.mamba_type
    return str(getattr(mamba_type, "name", mamba_type))


def is_plain(kv_cache: KVCacheConfig) -> bool:
    """Whether there is one block table, and every block in it is needed."""
    groups = kv_cache.kv_cache_groups
    return len(groups) == 1 and kind_of(groups[0]) in FULL_ATTENTION


def attends_to_everything(kv_cache: KVCacheConfig) -> bool:
    """Whether every layer is one of full attention with keys and values of its own."""
    if not is_plain(kv_cache):
        return False
    spec = kv_cache.kv_cache_groups[0].kv_cache_spec
    limited = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    return type(spec).__name__ == "FullAttentionSpec" and not limited


OTHER_LAYERS = {
    "SlidingWindowSpec": "windows",
    "ChunkedLocalAttentionSpec": "chunks",
    "MAMBA2": "Mamba2 states",
}
"""Layers with groups of their own, by vLLM's specification or kind of states."""
WHOLE_WINDOWS = "windows stored whole"


def other_layers(kv_cache: KVCacheConfig) -> str:
    """What all layers have but those of full attention: a value of :data:`OTHER_LAYERS`, or :data:`WHOLE_WINDOWS` where
    the only group has windows. Empty where that is something else, or several kinds."""
    if is_plain(kv_cache):
        spec = kv_cache.kv_cache_groups[0].kv_cache_spec
        has_windows = type(spec).__name__ == "FullAttentionSpec" and getattr(spec, "sliding_window", None)
        return WHOLE_WINDOWS if has_windows else ""
    kinds = {state_kind(group) or kind_of(group) for group in kv_cache.kv_cache_groups} - {"FullAttentionSpec"}
    return OTHER_LAYERS.get(kinds.pop(), "") if len(kinds) == 1 else ""


def is_replicated(kv_cache: KVCacheConfig) -> bool:
    """Whether every rank keeps the same of every layer. An MLA model may have layers with states beside its latent KV,
    as Kimi Linear has: each rank keeps the states of its own heads."""
    return all(kind_of(group) == "MLAAttentionSpec" for group in kv_cache.kv_cache_groups)


class KeptLayers(NamedTuple):
    """The layers of a KV cache that are not of full attention with keys and values of its own."""

    window_layers: int
    window_tokens: int
    """The widest window; 0 without."""
    state_layers: int
    latent: bool
    """Whether attention is latent."""

    def text(self) -> str:
        windows = f"{self.window_layers} layers with a window of {self.window_tokens} tokens"
        return f"{windows}, {self.state_layers} that keep a state{', latent attention' if self.latent else ''}"


NO_OTHERS = KeptLayers(0, 0, 0, False)


def kept_layers(kv_cache: KVCacheConfig) -> KeptLayers:
    """What vLLM keeps for the layers; one that has a window counts as such although its group stores it whole."""
    windows = states = widest = 0
    for group in kv_cache.kv_cache_groups:
        window = int(getattr(group.kv_cache_spec, "sliding_window", None) or 0)
        widest = max(widest, window)
        windows += len(group.layer_names) if window else 0
        states += len(group.layer_names) if kind_of(group) == "MambaSpec" else 0
    latent = any(kind_of(group) == "MLAAttentionSpec" for group in kv_cache.kv_cache_groups)
    return KeptLayers(windows, widest, states, latent)


def layer_kv_values(kv_cache: KVCacheConfig) -> set[int]:
    """How many values vLLM keeps of a token in a layer that attends, on one rank; several where layers differ."""
    groups = [group.kv_cache_spec for group in kv_cache.kv_cache_groups]
    layers = [one for spec in groups for one in getattr(spec, "kv_cache_specs", {"": spec}).values()]
    return {_kv_values(one) for one in layers if hasattr(one, "head_size")}


def _kv_values(spec: Any) -> int:
    of_values = getattr(spec, "head_size_v", None)
    return int(spec.num_kv_heads * (spec.head_size + (spec.head_size if of_values is None else of_values)))


def block_tables(kv_cache: KVCacheConfig) -> BlockTables | None:
    """What to save and load where there are several block tables, or one with unneeded blocks; else None."""
    if is_plain(kv_cache):
        return None
    return BlockTables(tuple(int(group.kv_cache_spec.block_size) for group in kv_cache.kv_cache_groups))


def block_size(kv_cache: KVCacheConfig) -> int:
    """Tokens in a block. Where groups have blocks of several sizes, the smallest."""
    return min(int(group.kv_cache_spec.block_size) for group in kv_cache.kv_cache_groups)


def block_bytes(kv_cache: KVCacheConfig) -> int:
    """Bytes of one KV block over all layers of one rank."""
    if is_plain(kv_cache):
        group = kv_cache.kv_cache_groups[0]
        return int(group.kv_cache_spec.page_size_bytes * len(group.layer_names))
    return sum(piece.size for piece in pieces(kv_cache))


def page_bytes(kv_cache: KVCacheConfig) -> int:
    """Bytes of one block in one layer, which are contiguous unless a worker reports smaller pieces."""
    if is_plain(kv_cache):
        return int(kv_cache.kv_cache_groups[0].kv_cache_spec.page_size_bytes)
    return pieces(kv_cache)[0].size


def pieces(kv_cache: KVCacheConfig) -> list[Piece]:
    """The contiguous pieces of a block, in the order of their addresses, each region once however many groups share it.

    Raises InputError where blocks are not equally far apart in all regions, or regions overlap in part.
    """
    page_of = {
        name: int(group.kv_cache_spec.page_size_bytes)
        for group in kv_cache.kv_cache_groups
        for name in group.layer_names
    }
    size_at: dict[int, int] = {}
    for tensor in kv_cache.kv_cache_tensors:
        for number, layer in enumerate(tensor.layers):
            offset = int(tensor.offset + number * tensor.layer_stride)
            size_at[offset] = max(size_at.get(offset, 0), page_of[layer])
    strides = {int(tensor.block_stride) for tensor in kv_cache.kv_cache_tensors}
    if len(strides) != 1:
        raise InputError(f"KV blocks are {sorted(strides)} bytes apart; kvpolicy copies those of one distance")
    stride = strides.pop()
    found = _joined([Piece(offset, stride, size) for offset, size in sorted(size_at.items())])
    _refuse_overlaps(found, kv_cache.num_blocks)
    return found


def _joined(regions: list[Piece]) -> list[Piece]:
    """Regions that touch are one piece, where a block holds the pages of several layers one after the other."""
    found = regions[:1]
    for region in regions[1:]:
        last = found[-1]
        if last.offset + last.size == region.offset and last.size + region.size <= last.stride:
            found[-1] = last._replace(size=last.size + region.size)
        else:
            found.append(region)
    return found


def _refuse_overlaps(found: list[Piece], blocks: int) -> None:
    """Neighbours lie apart by all blocks, or side by side within a block's stride."""
    for piece, following in pairwise(found):
        distance = following.offset - piece.offset
        inside = distance >= piece.size and distance + following.size <= piece.stride
        if not inside and distance < (blocks - 1) * piece.stride + piece.size:
            raise InputError(
                f"KV cache regions at bytes {piece.offset} and {following.offset} overlap, with blocks of {piece.size} "
                f"bytes {piece.stride} apart; kvpolicy copies regions that are the same or apart"
            )
    if any(piece.size > piece.stride for piece in found):
        raise InputError("KV blocks overlap one another; kvpolicy copies blocks that lie apart")


def says_where_layers_lie(kv_cache: KVCacheConfig) -> bool:
    """Whether the configuration has the offset of every layer in device memory, as from vLLM 0.31 on."""
    tensors = kv_cache.kv_cache_tensors
    return len(tensors) > 0 and all(hasattr(tensor, "layers") for tensor in tensors)


def segments_of_layers(kv_caches: dict[str, Any], kv_cache: KVCacheConfig) -> list[torch.Tensor]:
    """Views of shape (blocks, words), one per piece, of the device memory that the tensors of all layers lie in.

    However an attention backend shapes or splits the blocks, a piece is the same bytes. A word has eight bytes, or one
    where the pieces are no whole number of eight. ``kv_caches``: a tensor, or several, of each layer. Raises InputError
    where they are of several allocations.
    """
    tensors = [
        tensor for held in kv_caches.values() for tensor in (held if isinstance(held, (list, tuple)) else [held])
    ]
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    if len(storages) != 1:
        raise InputError(f"the KV cache lies in {len(storages)} allocations; kvpolicy copies from one")
    (any_tensor,) = storages.values()
    found = pieces(kv_cache)
    word = torch.int64 if all(number % 8 == 0 for piece in found for number in piece) else torch.uint8
    memory = torch.empty(0, dtype=word, device=any_tensor.device).set_(any_tensor.untyped_storage())
    words = [Piece(*(number // word.itemsize for number in piece)) for piece in found]
    return [
        torch.as_strided(memory, (kv_cache.num_blocks, piece.size), (piece.stride, 1), piece.offset) for piece in words
    ]
