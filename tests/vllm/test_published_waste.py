"""The block arithmetic of the study of KV waste is vLLM's own block manager's."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
pytest.importorskip("vllm")

from vllm import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

from tests.vllm.kv_caches import kv_cache  # noqa: E402

BLOCK, BLOCKS = 16, 400


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("published_kv_waste")


def held_by_vllm(prompt: int, output: int, samples: int) -> int:
    """Blocks that vLLM holds for that many samples of one prompt, each with ``output`` tokens less the last."""
    init_none_hash(sha256)
    manager = KVCacheManager(kv_cache("full", BLOCKS, BLOCK, caching=True), 2048, BLOCK, BLOCK, enable_caching=True)
    free = manager.block_pool.get_num_free_blocks()
    hasher = get_request_block_hasher(BLOCK, sha256)
    requests = []
    for number in range(samples):
        request = Request(
            f"s{number}", list(range(prompt)), SamplingParams(max_tokens=output), None, block_hasher=hasher
        )
        hits, found = manager.get_computed_blocks(request)[:2]
        assert manager.allocate_slots(request, prompt - found, found, hits) is not None
        request.num_computed_tokens = prompt
        requests.append(request)
    for token in range(output - 1):
        for number, request in enumerate(requests):
            request.append_output_token_ids(10_000 * (number + 1) + token)
            assert manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
    return free - manager.block_pool.get_num_free_blocks()


@pytest.mark.parametrize(
    ("prompt", "output", "samples"), [(100, 40, 4), (96, 1, 2), (97, 16, 3), (15, 30, 6), (64, 33, 1)]
)
def test_samples_share_the_blocks_that_the_study_says(study: Any, prompt: int, output: int, samples: int) -> None:
    *_, blocks = study.blocks_over_steps(prompt, output)
    common = study.shared_blocks(prompt)
    assert held_by_vllm(prompt, output, samples) == common + samples * (blocks - common)
