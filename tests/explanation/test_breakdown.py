"""The parts of a cost are the model's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpolicy.events import Option
from kvpolicy.explanation import Question, breakdowns_of
from kvpolicy.explanation.question import resolve
from tests.explanation.models import explain
from tests.synthetic import fitted_model


@pytest.mark.parametrize("family", ["boosted", "linear", "analytic"])
def test_costs_are_the_models_and_come_from_their_parts(family: str) -> None:
    explanation = explain(cost_model=family)
    one = explanation.question.situation
    expected = fitted_model(family).predict(one, (Option("recompute"), Option("swap", 500, "host")))
    assert tuple(account.cost for account in explanation.breakdowns) == expected
    for account in explanation.breakdowns:
        base_s = max(account.law_s, account.floor_s)
        assert account.cost.engine_s == pytest.approx(base_s * account.residual_factor, rel=1e-12)
    assert explanation.chosen == min(explanation.breakdowns, key=lambda account: account.cost.engine_s).kind
    assert (one.running_requests, one.batch_tokens, one.held_blocks) == (3, 1500, 16)


def test_a_feature_beyond_its_range_is_reported_with_the_range() -> None:
    inside, outside = explain(), explain(tokens=50_000)
    assert not any(account.beyond for account in inside.breakdowns)
    names = {beyond.feature for account in outside.breakdowns for beyond in account.beyond}
    assert {"recomputed_tokens", "save_bytes"} <= names
    assert "extrapolated: recomputed_tokens is 50000, trained on" in outside.text()
    assert outside.breakdowns[0].cost.extrapolated


def test_the_floor_is_reported() -> None:
    model = replace(fitted_model("analytic"), floor_s={"recompute": 5.0, "swap": 1e-6})
    again, swap = breakdowns_of(model, resolve(model, Question(500)).situation)
    assert again.floored
    assert again.cost.engine_s == 5.0
    assert not swap.floored
