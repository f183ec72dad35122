"""`kvpolicy explain`: figures that are the model's own, a break-even point that is one, refusals by flag."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy import cli, cost, explanation
from kvpolicy.cost import FittedModel
from kvpolicy.events import Option
from kvpolicy.explanation import Explanation, Question, breakdowns_of
from kvpolicy.explanation.boundary import break_even, grid, longest
from kvpolicy.explanation.question import resolve, with_length, with_running
from kvpolicy.policy import Objective
from tests.policy.ten_line_policy import Longer
from tests.synthetic import CostLaw, fitted_model

WITH_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


@pytest.fixture(autouse=True)
def _made(monkeypatch: pytest.MonkeyPatch) -> None:
    """``boosted``, ``linear`` and ``analytic`` are models by name."""
    monkeypatch.setattr(explanation, "load", lambda name: replace(fitted_model(str(name)), name=str(name)))


def explain(**more: Any) -> Explanation:
    given = {"tokens": 500, "running": 3} | more
    asked = {one.name: given.pop(one.name) for one in fields(Question) if one.name in given}
    return kvpolicy.explain(**({"cost_model": "boosted", "question": Question(**asked)} | given))


@pytest.mark.parametrize("family", ["boosted", "linear", "analytic"])
def test_costs_are_the_models_and_come_from_their_parts(family: str) -> None:
    found = explain(cost_model=family)
    one = found.question.situation
    wanted = fitted_model(family).predict(one, (Option("recompute"), Option("swap", 500, "host")))
    assert tuple(account.cost for account in found.breakdowns) == wanted
    for account in found.breakdowns:
        base_s = max(account.law_s, account.floor_s)
        assert account.cost.engine_s == pytest.approx(base_s * account.residual_factor, rel=1e-12)
    assert found.chosen == min(found.breakdowns, key=lambda account: account.cost.engine_s).kind
    assert (one.running_requests, one.batch_tokens, one.held_blocks) == (3, 1500, 16)


def test_what_is_beyond_the_range_is_told_with_the_range() -> None:
    inside, outside = explain(), explain(tokens=50_000)
    assert not any(account.beyond for account in inside.breakdowns)
    names = {beyond.feature for account in outside.breakdowns for beyond in account.beyond}
    assert {"recomputed_tokens", "save_bytes"} <= names
    assert "extrapolated: recomputed_tokens is 50000, trained on" in outside.text()
    assert outside.breakdowns[0].cost.extrapolated


def test_the_floor_is_told() -> None:
    model = replace(fitted_model("analytic"), floor_s={"recompute": 5.0, "swap": 1e-6})
    again, swap = breakdowns_of(model, resolve(model, Question(500)).situation)
    assert again.floored
    assert again.cost.engine_s == 5.0
    assert not swap.floored


def turning_model() -> FittedModel:
    return fitted_model("analytic")


def test_the_choice_turns_exactly_at_the_break_even_length() -> None:
    model = turning_model()
    one = resolve(model, Question(500, running=3)).situation
    even = break_even(model, one, Objective())
    assert even.first == "recompute"
    assert [turn.to for turn in even.turns] == ["swap", "recompute"] * (len(even.turns) // 2) + ["swap"]
    for turn in even.turns:
        costs = [breakdowns_of(model, with_length(one, tokens)) for tokens in (turn.tokens - 1, turn.tokens)]
        swaps = [swap.cost.engine_s < again.cost.engine_s for again, swap in costs]
        assert swaps == [turn.to != "swap", turn.to == "swap"]
    law = CostLaw()
    assert law.copy_latency_s > 0  # what makes a swap of a short victim the dearer one
    assert f"swap from {turn.tokens} tokens on" in explain(cost_model="analytic").text()


@pytest.mark.parametrize(("name", "block_size"), [("cpu-llama-simulated-link", 64), ("cpu-llama-native", 32)])
def test_every_turn_of_the_staircase_is_listed(name: str, block_size: int) -> None:
    model = cost.load(name)
    one = resolve(model, Question(500, running=1, block_size=block_size)).situation
    even = break_even(model, one, Objective())
    assert even.every_up_to == even.up_to_tokens
    breakdowns = [breakdowns_of(model, with_length(one, tokens)) for tokens in range(1, even.up_to_tokens + 1)]
    swaps = [swap.cost.engine_s < again.cost.engine_s for again, swap in breakdowns]
    real = [tokens for tokens, (before, after) in enumerate(pairwise(swaps), 2) if before != after]
    assert [turn.tokens for turn in even.turns] == real


def test_far_lengths_are_looked_at_by_edges_of_blocks_and_that_is_said() -> None:
    found = explain(cost_model="analytic", tokens=100_000, block_size=64)
    assert found.break_even.every_up_to < found.break_even.up_to_tokens == 400_000
    assert 64 < found.break_even.widest_gap < 4096
    assert f"up to {found.break_even.widest_gap} tokens apart, between which the choice may change" in found.text()


def test_what_drove_the_choice_is_told() -> None:
    found = explain()
    told = found.to_dict()["drivers"]
    assert told == list(found.drivers)
    assert all(line in found.text() for line in told)
    assert told[0].startswith(f"{found.chosen} by ")
    assert any("learned: recompute times" in line for line in told)
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


def test_bytes_that_wait_can_be_asked_for() -> None:
    found = explain(queued_save=3 * 2**20, queued_load=2**20)
    assert (found.question.situation.queued_save_bytes, found.question.situation.queued_load_bytes) == (
        3 * 2**20,
        2**20,
    )
    assert "3 MiB queued to be saved, 1 MiB queued to be loaded" in found.text()


def test_where_nothing_turns_that_is_said() -> None:
    model = turning_model()
    free = replace(model, laws={"recompute": model.laws["recompute"], "swap": model.laws["recompute"]})
    cheap = replace(free, floor_s={"recompute": 1.0, "swap": 1e-9})
    even = break_even(cheap, resolve(cheap, Question(500)).situation, Objective())
    assert (even.first, even.turns) == ("swap", ())


def test_the_grid_is_what_the_model_chooses() -> None:
    model = turning_model()
    one = resolve(model, Question(500, running=3)).situation
    found = grid(model, one, Objective())
    assert all(low < high for line in (found.tokens, found.running) for low, high in pairwise(line))
    assert found.tokens[-1] == longest(model, one)
    for row, load in enumerate(found.running):
        for column in (0, len(found.tokens) // 2, len(found.tokens) - 1):
            again, swap = breakdowns_of(model, with_length(with_running(one, load), found.tokens[column]))
            assert (found.log_ratio[row][column] < 0) == (swap.cost.engine_s < again.cost.engine_s)


def test_another_objective_may_choose_another_option() -> None:
    """Weighing the others' delay alone leaves nothing to choose where nobody else runs: ties go to recompute."""
    assert explain(objective="others", running=0).chosen == "recompute"
    assert explain(objective="victim").objective.text == "victim"
    with pytest.raises(ValueError, match="objective"):
        explain(objective="speed")


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


def test_without_matplotlib_the_text_is_there_and_the_plot_is_missed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> Any:
        raise ImportError("No module named 'matplotlib'")

    monkeypatch.setattr(explanation, "import_module", missing)
    file = tmp_path / "boundary.svg"
    with pytest.raises(SystemExit) as end:
        cli.main(["explain", "--cost-model", "boosted", "--tokens", "500", "--plot", str(file)])
    said = capsys.readouterr()
    assert end.value.code == 2
    assert "pip install 'kvpolicy[plots]'" in said.err
    assert "choice over tokens and running requests" in said.out
    assert not file.exists()


@pytest.mark.skipif(not WITH_MATPLOTLIB, reason="matplotlib is not installed")
@pytest.mark.parametrize(("ending", "begins"), [(".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_the_boundary_is_drawn_the_same_every_time(tmp_path: Path, ending: str, begins: bytes) -> None:
    files = [tmp_path / f"{number}{ending}" for number in range(2)]
    for file in files:
        assert explain(plot=file).not_drawn == ""
    assert files[0].read_bytes().startswith(begins)
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("name", cost.shipped())
def test_models_that_ship_are_explained(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(explanation, "load", cost.load)
    assert "choice: " in kvpolicy.explain(name, Question(tokens=300, running=2)).text()


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


def test_a_model_itself_is_explained() -> None:
    model = replace(fitted_model("linear"), name="mine")
    assert explain(cost_model=model).breakdowns == explain(cost_model="linear").breakdowns
    assert explain(cost_model=model).cost_model == "mine"


def test_the_command_shows_a_policy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["explain", "--cost-model", "boosted", "--tokens", "500", "--policy", OWN])
    assert stopped.value.code == 0
    assert f"policy {Longer().label}: " in capsys.readouterr().out
