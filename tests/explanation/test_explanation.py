"""`kvpolicy explain`: figures that are the model's own, a break-even point that is one, refusals by flag."""

from __future__ import annotations

from dataclasses import replace

import pytest

import kvpolicy
from kvpolicy import cost, explanation
from kvpolicy.explanation import Question
from tests.explanation.models import explain
from tests.synthetic import fitted_model


def test_another_objective_may_choose_another_option() -> None:
    """Weighing the others' delay alone leaves nothing to choose where nobody else runs: ties go to recompute."""
    assert explain(objective="others", running=0).chosen == "recompute"
    assert explain(objective="victim").objective.text == "victim"
    with pytest.raises(ValueError, match="objective"):
        explain(objective="speed")


@pytest.mark.parametrize("name", cost.shipped())
def test_models_that_ship_are_explained(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(explanation, "load", cost.load)
    assert "choice: " in kvpolicy.explain(name, Question(tokens=300, running=2)).text()


def test_a_model_itself_is_explained() -> None:
    model = replace(fitted_model("linear"), name="mine")
    assert explain(cost_model=model).breakdowns == explain(cost_model="linear").breakdowns
    assert explain(cost_model=model).cost_model == "mine"
