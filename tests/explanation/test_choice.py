"""A policy's choice beside the model's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvpolicy import cli
from tests.explanation.models import explain
from tests.policy.ten_line_policy import Longer

OWN = "python:tests.policy.ten_line_policy:Longer"


@pytest.mark.parametrize("policy", [OWN, Longer()])
def test_a_custom_policy_is_explained(policy: Any) -> None:
    """It swaps victims that are longer than the others are on average: 1500 tokens in three of them."""
    explanation = explain(policy=policy, batch_tokens=1500)
    assert explanation.choice is not None
    assert (explanation.choice.policy, explanation.choice.probabilities) == (Longer().label, (1.0, 0.0))
    assert [(turn.tokens, turn.to) for turn in explanation.choice.turns.turns] == [(501, "swap")]
    part = explanation.to_dict()["policy"]
    assert part["probabilities"] == {"recompute": 1.0, "swap": 0.0} and json.dumps(part)
    assert (
        f"policy {Longer().label}: recompute 100%, swap 0%\nbreak-even at this load: swap from 501"
        in explanation.text()
    )
    assert "policy" not in explain().to_dict()


def test_a_coin_turns_nowhere() -> None:
    choice = explain(policy="random:0.25").choice
    assert choice is not None and choice.probabilities == (0.75, 0.25)
    assert (choice.turns.turns, choice.turns.first) == ((), "recompute")


def test_the_command_shows_a_policy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["explain", "--cost-model", "boosted", "--tokens", "500", "--policy", OWN])
    assert stopped.value.code == 0
    assert f"policy {Longer().label}: " in capsys.readouterr().out
