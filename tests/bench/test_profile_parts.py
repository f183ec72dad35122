"""Parts of a profile: block sizes and pinning take turns."""

from __future__ import annotations

from dataclasses import replace

from kvpolicy_vllm.bench.profile_parts import QUICK, parts_of


def test_passes_are_interleaved_over_block_sizes_and_pinning() -> None:
    assert [part.name for part in parts_of(QUICK, device=False)] == ["b32-pass0", "b64-pass0", "b64-pass1", "b32-pass1"]
    with_device = parts_of(replace(QUICK, block_sizes=(16,)), device=True)
    assert [(part.number, part.pin_memory) for part in with_device] == [(0, True), (0, False), (1, False), (1, True)]
