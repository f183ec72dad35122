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
def test_what_a_policy_of_ones_own_makes_of_it(policy: Any) -> None:
    """It swaps victims that are longer than the others are on average: 1500 tokens in three of them."""
    found = explain(policy=policy, batch_tokens=1500)
    assert found.choice is not None
    assert (found.choice.policy, found.choice.probabilities) == (Longer().label, (1.0, 0.0))
    assert [(turn.tokens, turn.to) for turn in found.choice.turns.turns] == [(501, "swap")]
    told = found.to_dict()["policy"]
    assert told["probabilities"] == {"recompute": 1.0, "swap": 0.0} and json.dumps(told)
    assert f"policy {Longer().label}: recompute 100%, swap 0%\nbreak-even at this load: swap from 501" in found.text()
    assert "policy" not in explain().to_dict()


def test_a_coin_turns_nowhere() -> None:
    found = explain(policy="random:0.25").choice
    assert found is not None and found.probabilities == (0.75, 0.25)
    assert (found.turns.turns, found.turns.first) == ((), "recompute")


def test_the_command_shows_a_policy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["explain", "--cost-model", "boosted", "--tokens", "500", "--policy", OWN])
    assert stopped.value.code == 0
    assert f"policy {Longer().label}: " in capsys.readouterr().out
