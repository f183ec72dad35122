"""What an explanation says that drove the choice."""

from __future__ import annotations

from dataclasses import replace

from kvpolicy.explanation import Question, breakdowns_of
from kvpolicy.explanation.question import resolve
from tests.explanation.models import explain
from tests.synthetic import fitted_model


def test_drivers_of_a_choice_are_listed() -> None:
    explanation = explain()
    part = explanation.to_dict()["drivers"]
    assert part == list(explanation.drivers)
    assert all(line in explanation.text() for line in part)
    assert part[0].startswith(f"{explanation.chosen} by ")
    assert any("learned: recompute times" in line for line in part)
    assert "no learned correction" in "; ".join(explain(cost_model="analytic").drivers)
    assert any(line.startswith("extrapolated, in ") for line in explain(tokens=50_000).drivers)
    model = replace(fitted_model("analytic"), floor_s={"recompute": 5.0, "swap": 1e-6})
    floored = replace(
        explain(cost_model="analytic", tokens=20),
        breakdowns=breakdowns_of(model, resolve(model, Question(20)).situation),
    )
    floor = "noise floor used for recompute; without it"
    assert any(floor in line for line in floored.drivers)
    assert any("would choose recompute, this changes it to swap" in line for line in floored.drivers)
