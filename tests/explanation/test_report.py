"""An explanation as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvpolicy import cli
from kvpolicy.explanation import Question, breakdowns_of
from kvpolicy.explanation.question import resolve
from tests.explanation.models import explain
from tests.synthetic import fitted_model


def test_text_and_dictionary_tell_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = explain()
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert told["chosen"] == found.chosen
    assert [one["kind"] for one in told["options"]] == ["recompute", "swap"]
    assert told["situation"]["computed_tokens"] == 500
    assert f"choice: {found.chosen}" in found.text()
    assert "copies in pieces of" in found.text()
    file = tmp_path / "why.json"
    cli.app(
        ["explain", "--cost-model", "boosted", "--tokens", "500", "--running", "3", "--json", str(file)],
        standalone_mode=False,
    )
    assert json.loads(file.read_text()) == told
    assert capsys.readouterr().out.strip() == found.text().strip()


def test_an_untrained_model_is_told_as_such() -> None:
    """Its ranges are empty and its intervals infinite: null in JSON, words in text."""
    from kvpolicy.cost.intervals import unbounded

    model = replace(fitted_model("analytic"), intervals=unbounded())
    one = resolve(model, Question(500))
    swap = breakdowns_of(model, one.situation)[1]
    found = replace(explain(cost_model="analytic"), breakdowns=breakdowns_of(model, one.situation))
    assert swap.cost.high_s == float("inf")
    assert "unbounded" in found.text()
    assert found.to_dict()["options"][1]["cost"]["high_s"] is None
