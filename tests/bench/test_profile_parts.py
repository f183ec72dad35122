"""Parts of a profile: block sizes and pinning take turns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from kvpolicy_vllm.bench.profile_parts import QUICK, Part, Rig, parts_of
from tests.shape.configs import LLAMA_31_8B


def test_passes_are_interleaved_over_block_sizes_and_pinning() -> None:
    assert [part.name for part in parts_of(QUICK, device=False)] == ["b32-pass0", "b64-pass0", "b64-pass1", "b32-pass1"]
    with_device = parts_of(replace(QUICK, block_sizes=(16,)), device=True)
    assert [(part.number, part.pin_memory) for part in with_device] == [(0, True), (0, False), (1, False), (1, True)]


def test_only_a_model_that_kvpolicy_made_is_computed_in_float32(tmp_path: Path) -> None:
    """On a CPU. Of any other vLLM takes the type, as it will for the server."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B | {"max_position_embeddings": 8192}))
    part, rig = Part.of(0, 32, True), Rig(tmp_path, QUICK, None, 0, device=False)
    own, made = (one.job(part, tmp_path).engine for one in (rig, replace(rig, is_made=True)))
    assert "dtype" not in own and made == own | {"dtype": "float32"} and own["enforce_eager"]
    on_device = (replace(rig, device=True, is_made=is_made).job(part, tmp_path).engine for is_made in (False, True))
    assert not any({"dtype", "enforce_eager"} & set(engine) for engine in on_device)
