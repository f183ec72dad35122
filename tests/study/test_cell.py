"""A cell of a grid: its inputs, its digest, what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpolicy.request_marks import Classes
from kvpolicy.study.cell import Cell
from kvpolicy.study.config import Serving
from tests.study.object_grids import MODEL, NAME, TIGHT


def test_a_cell_of_texts_has_the_inputs_that_it_always_had() -> None:
    cell = Cell(NAME, "always-swap", TIGHT, "native", 0, MODEL)
    names = ["workload", "policy", "kv_blocks", "link", "seed", "hardware", "engine", "serving", "part", "parts"]
    assert list(cell.inputs()) == names
    assert "classes" not in cell.inputs()["serving"]


def test_the_classes_that_are_granted_are_an_input() -> None:
    limited = replace(CELL, serving=Serving(classes=Classes.parse("chat:ttft=1+batch")))
    assert limited.inputs()["serving"]["classes"] == "chat:ttft=1.0+batch"
    assert limited.digest({}) != CELL.digest({})


CELL = Cell("azure-conversation-2023", "always-swap", 200, "native", 0, "cpu-llama-native")


def test_a_digest_follows_inputs_and_contents() -> None:
    digests = {
        CELL.digest({}),
        replace(CELL, seed=1).digest({}),
        CELL.digest({"model": "a"}),
        CELL.digest({"model": "b"}),
        replace(CELL, hardware_digest="ab").digest({}),
    }
    assert len(digests) == 5
    assert CELL.digest({"a": "1", "b": "2"}) == CELL.digest({"b": "2", "a": "1"})


def test_the_part_is_in_the_words_where_there_are_several() -> None:
    assert "part" not in CELL.words()
    assert replace(CELL, part=1, parts=3).words().endswith("engine builtin, part 2/3")
    assert CELL.words().startswith("workload azure-conversation-2023, policy always-swap, order fcfs, kv_blocks 200, ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_blocks": 0}, "kv_blocks is 0, should be 1 or more"),
        ({"part": 2, "parts": 2}, "part 2 of 2: should be from 0 to 1"),
        ({"part": -1}, "part -1 of 1"),
    ],
)
def test_a_cell_that_cannot_be_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CELL, **change)  # type: ignore[arg-type]
