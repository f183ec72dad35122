"""An explanation as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvpolicy import cli
from kvpolicy.explanation import Question, breakdowns_of
from kvpolicy.explanation.boundary import BreakEven, Turn
from kvpolicy.explanation.breakdown import time_text
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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"), (0.0259, "25.9 ms"), (0.9994, "999 ms"), (0.9996, "1 s"), (46.5, "46.5 s"), (999.6, "1,000 s"),
        (3974.0, "3,974 s"), (float("inf"), "unbounded"),
    ],
)  # fmt: skip
def test_times_are_written_without_exponents(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_long_times_are_in_seconds_everywhere() -> None:
    text = explain(tokens=100_000, running=8).text()
    assert "e+" not in text.split("\n\n")[1].split("extrapolated")[0] and " s against " in text
    assert " request-s" in text


@pytest.mark.parametrize("name", ["analytic", "boosted"])
def test_that_nothing_was_learned_is_said_once(name: str) -> None:
    explanation = explain(cost_model=name)
    learned = any(breakdown.residual_factor != 1 for breakdown in explanation.breakdowns)
    text = explanation.text()
    assert text.count("no learned correction") == (0 if learned else 1)
    assert learned == (name == "boosted")


def test_a_turn_back_at_a_block_says_why_and_the_grid_names_its_axes() -> None:
    one = explain()
    turns = tuple(Turn(tokens, kind, False) for tokens, kind in ((189, "swap"), (193, "recompute"), (200, "recompute")))
    turning = replace(one, break_even=BreakEven("recompute", turns, 2000, 2000, 1)).text()
    assert one.question.situation.block_size == 32
    assert "swap from 189 tokens on\n" in turning and "recompute from 200 tokens on\n" in turning
    assert "recompute from 193 tokens on (one more block to copy)\n" in turning
    assert "across: tokens of the victim" in turning and "upwards: other running requests" in turning
