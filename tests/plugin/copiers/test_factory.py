"""Which copier a worker gets, by the device of its KV cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from kvpolicy_vllm.plugin.copiers import factory
from kvpolicy_vllm.plugin.copiers.indexing import IndexingCopier


def test_host_memory_is_copied_by_indexing() -> None:
    copier = factory.copier_for([torch.zeros(4, 8)], 2, False, None)
    assert isinstance(copier, IndexingCopier)


@pytest.mark.parametrize(("pin_memory", "name"), [(True, "CudaCopier"), (False, "StagedCudaCopier")])
def test_a_gpu_is_copied_directly_only_where_host_memory_is_pinned(
    pin_memory: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("CudaCopier", "StagedCudaCopier"):
        monkeypatch.setattr(factory, each, lambda *arguments, each=each: (each, *arguments))
    segments: list[Any] = [SimpleNamespace(device=SimpleNamespace(type="cuda"))]
    assert factory.copier_for(segments, 2, pin_memory, None) == (name, segments, 2, pin_memory, None)
