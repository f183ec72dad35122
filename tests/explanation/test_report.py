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


def test_text_and_dictionary_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    explanation = explain()
    values = json.loads(json.dumps(explanation.to_dict(), allow_nan=False))
    assert values["chosen"] == explanation.chosen
    assert [option["kind"] for option in values["options"]] == ["recompute", "swap"]
    assert values["situation"]["computed_tokens"] == 500
    assert f"choice: {explanation.chosen}" in explanation.text()
    assert "copies in pieces of" in explanation.text()
    file = tmp_path / "why.json"
    cli.app(
        ["explain", "--cost-model", "boosted", "--tokens", "500", "--running", "3", "--json", str(file)],
        standalone_mode=False,
    )
    assert json.loads(file.read_text()) == values
    assert capsys.readouterr().out.strip() == explanation.text().strip()


def test_an_untrained_model_has_unbounded_intervals() -> None:
    """Its ranges are empty and its intervals infinite: null in JSON, words in text."""
    from kvpolicy.cost.intervals import unbounded

    model = replace(fitted_model("analytic"), intervals=unbounded())
    one = resolve(model, Question(500))
    swap = breakdowns_of(model, one.situation)[1]
    result = replace(explain(cost_model="analytic"), breakdowns=breakdowns_of(model, one.situation))
    assert swap.cost.high_s == float("inf")
    assert "unbounded" in result.text()
    assert result.to_dict()["options"][1]["cost"]["high_s"] is None
