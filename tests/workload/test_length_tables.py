"""Tables of lengths: every row once, or rows drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy.workload import (
    Request,
    WorkloadError,
    open_workload,
)
from tests.workload import published_files


def test_lengths_may_be_drawn(tmp_path: Path) -> None:
    path = published_files.put(tmp_path, "lengths.csv", "prompt_tokens,output_tokens\n5,6\n7,8\n")
    assert list(open_workload(str(path))) == [Request(0.0, 5, 6), Request(0.0, 7, 8)]
    drawn = list(open_workload(f"{path}?draw=500&seed=2"))
    assert {(request.prompt_tokens, request.output_tokens) for request in drawn} == {(5, 6), (7, 8)}
    assert drawn == list(open_workload(f"{path}?draw=500&seed=2")) != list(open_workload(f"{path}?draw=500&seed=3"))
    assert 180 < sum(request.prompt_tokens == 5 for request in drawn) < 320


def test_a_table_without_lengths_to_draw_is_refused(tmp_path: Path) -> None:
    path = published_files.put(tmp_path, "lengths.csv", "prompt_tokens,output_tokens\n")
    assert list(open_workload(str(path))) == []
    with pytest.raises(WorkloadError, match="holds no lengths to draw from"):
        list(open_workload(f"{path}?draw=3"))
    with pytest.raises(WorkloadError, match="is empty, should begin with columns"):
        list(open_workload(f"lengths:{published_files.put(tmp_path, 'empty.csv', '')}"))
