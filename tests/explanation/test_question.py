"""The situation that is asked about; wrong values are refused by field and by flag."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpolicy import cli, cost, explanation
from kvpolicy.explanation.question import Question, resolve, with_length
from kvpolicy.fields import WrongValue
from tests.explanation.models import explain
from tests.simulator.tables import CONFIG
from tests.synthetic import GEOMETRY, fitted_model


def test_blocks_are_counted_over_all_tables_of_a_request() -> None:
    """Two layers of full attention and two with a window of 128 tokens; a block holds the pages of two layers."""
    model = fitted_model("analytic")
    windows = replace(GEOMETRY, window_layers=2, window_tokens=128)
    provenance = replace(model.provenance, geometry=windows, kv_bytes_per_token=GEOMETRY.kv_bytes_per_token / 2)
    of_windows = replace(model, provenance=provenance)
    situation = resolve(of_windows, Question(300, block_size=32)).situation
    assert (situation.held_blocks, situation.save_blocks) == (10 + 5, 15.0)
    assert situation.block_bytes == 32 * GEOMETRY.kv_bytes_per_token // 2
    assert with_length(situation, 3000, provenance).held_blocks == 94 + 5
    assert resolve(model, Question(300, block_size=32)).situation.held_blocks == 10


def test_queued_bytes_are_part_of_the_question() -> None:
    explanation = explain(queued_save=3 * 2**20, queued_load=2**20)
    assert (explanation.question.situation.queued_save_bytes, explanation.question.situation.queued_load_bytes) == (
        3 * 2**20,
        2**20,
    )
    assert "3 MiB queued to be saved, 1 MiB queued to be loaded" in explanation.text()


@pytest.mark.parametrize(
    ("more", "flag"),
    [
        ({"tokens": 0}, "--tokens is 0, should be 1 or more"),
        ({"running": -1}, "--running is -1"),
        ({"free": -1}, "--free is -1"),
        ({"waiting": -2}, "--waiting is -2"),
        ({"block_size": 0}, "--block-size is 0"),
        ({"shared": 17}, "--shared is 17, should be at most the 16 blocks"),
        ({"shared": -1}, "--shared is -1"),
        ({"hit": 16.5}, "--hit is 16.5, should be from the 0 shared blocks to the 16"),
        ({"shared": 3, "hit": 2}, "--hit is 2, should be from the 3 shared blocks"),
        ({"hit": -1}, "--hit is -1"),
        ({"save": 17}, "--save is 17, should be at most the 16 blocks"),
        ({"save": -1}, "--save is -1"),
        ({"queued_save": -1}, "--queued-save is -1"),
        ({"queued_load": -1}, "--queued-load is -1"),
        ({"batch_tokens": -1}, "--batch-tokens is -1"),
        ({"batch_tokens": 10, "running": 0}, "--batch-tokens is 10"),
        ({"segment_bytes": 0}, "--segment-bytes is 0"),
        ({"objective": "speed"}, "--objective 'speed': 'speed' should be one of engine, victim, others"),
        ({"plot": "boundary.gif"}, "--plot is boundary.gif"),
        ({"plot": "no/such/folder/boundary.svg"}, "--plot is no/such/folder/boundary.svg: there is no folder"),
    ],
)
def test_wrong_values_are_refused_by_field_and_by_flag(
    more: dict[str, Any], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = flag.split()[0]
    with pytest.raises(ValueError, match=f"^{flag.replace(name, name[2:].replace('-', '_'), 1)}"):
        explain(**more)
    line = {"cost_model": "boosted", "tokens": 500, "running": 3} | more
    with pytest.raises(SystemExit):
        cli.main(["explain", *(f"--{key.replace('_', '-')}={value}" for key, value in line.items())])
    assert capsys.readouterr().err.startswith(f"kvpolicy: error: {flag}")


def test_pageable_memory_can_be_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model without measurements; a trained one is of the memory that it was measured over."""
    monkeypatch.setattr(explanation, "load", cost.load)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    name = f"analytic:H100-SXM:{config}"
    pinned, pageable = (explain(cost_model=name, tokens=3000, pageable=way) for way in (False, True))
    recompute, swap = zip(pinned.breakdowns, pageable.breakdowns, strict=True)
    assert recompute[0].cost == recompute[1].cost and swap[1].cost.engine_s > swap[0].cost.engine_s
    assert "0.25 of the link (pageable host memory)" in pageable.text() and "pageable host" not in pinned.text()
    model = fitted_model("analytic")
    for measured, words in ((True, "is of page-locked host memory: should"), (None, "does not say over which host")):
        other = replace(model, provenance=replace(model.provenance, pinned=measured))
        with pytest.raises(WrongValue, match=words):
            explain(cost_model=other, pageable=True)
    trained = explain(cost_model=replace(model, provenance=replace(model.provenance, pinned=False)), pageable=True)
    for explanation_of_it, priced in ((pageable, True), (trained, True), (pinned, False)):
        assert ("copies are priced over pageable host memory" in explanation_of_it.text()) is priced
    with suppress(SystemExit):
        cli.main(["explain", "--cost-model", name, "--tokens", "300", "--pageable"])
    assert "(pageable host memory)" in capsys.readouterr().out
