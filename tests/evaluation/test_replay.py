"""Regret: worked by hand, against a known law, and refused where it could not be trusted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpolicy import cost
from kvpolicy.cost import ModelError
from kvpolicy.datasets.profiles import Sample, State, dataset_of, read_dataset
from kvpolicy.datasets.threshold import Difference, best_threshold
from kvpolicy.evaluation import evaluate
from kvpolicy.evaluation.replay import _thresholds, is_tie, price
from kvpolicy.events import KINDS, Kind
from kvpolicy.policy import load
from kvpolicy.trace import TraceError
from kvpolicy.training import train
from tests.synthetic import CostLaw, Plan, make_trace, situation

SHIPPED = Path(__file__).resolve().parents[2] / "traces" / "cpu-llama-native"


def state(recompute_s: list[float], swap_s: list[float], tokens: int = 500) -> State:
    costs: dict[Kind, list[float]] = {"recompute": recompute_s, "swap": swap_s}
    victim = situation(tokens)
    return State(
        "s",
        frozenset({"core/s"}),
        {
            kind: tuple(Sample(victim, kind, s, "core", i, f"{kind}-{i}") for i, s in enumerate(costs[kind]))
            for kind in KINDS
        },
    )


def test_split_half_worked_by_hand() -> None:
    """Repeats 0 and 2 choose first: recompute 1.0, swap 2.0 -> recompute; on 1 and 3 it costs 4.0.
    Then 1 and 3 choose: recompute 4.0, swap 3.0 -> swap; on 0 and 2 it costs 2.0. The oracle pays 3.0."""
    one = state([0.8, 3.0, 1.2, 5.0], [2.0, 2.5, 2.0, 3.5])
    policies = [load(name) for name in ("always-recompute", "always-swap", "random:0.25", "threshold:501")]
    priced = price(one, policies)
    assert priced.oracle_s == pytest.approx(3.0)
    # On the paying halves recompute means 4.0 and 1.0, swap 3.0 and 2.0: both 2.5 on average.
    assert priced.policy_s == pytest.approx((2.5, 2.5, 2.5, 2.5))
    assert priced.tie


def test_regret_of_a_clear_state_worked_by_hand() -> None:
    priced = price(state([4.0, 4.2, 3.8], [1.0, 1.1, 0.9]), [load("random:0.25"), load("always-swap")])
    # Halves of recompute: (4.0 + 3.8) / 2 = 3.9 and 4.2; of swap: 0.95 and 1.1. The oracle always swaps.
    assert priced.oracle_s == pytest.approx((0.95 + 1.1) / 2)
    assert priced.policy_s[0] == pytest.approx(0.75 * (3.9 + 4.2) / 2 + 0.25 * (0.95 + 1.1) / 2)
    assert priced.policy_s[1] == pytest.approx(priced.oracle_s)
    assert priced.right == (0.25, 1.0)
    assert not priced.tie


def test_ties_are_states_closer_than_two_standard_errors() -> None:
    """Variances 1 and 1 over 4 and 4: the standard error of the difference is sqrt(0.5) = 0.707."""
    spread = [-1.224744871391589, 0.0, 0.0, 1.224744871391589]
    assert is_tie(state([10 + s for s in spread], [11.41 + s for s in spread]))
    assert not is_tie(state([10 + s for s in spread], [11.42 + s for s in spread]))


def test_an_oracle_that_sees_its_own_noise_would_be_too_good() -> None:
    """Both options cost the same: nothing can be gained, and the split-half oracle says so on average."""
    law = CostLaw(fixed_s=5e-3, alone_s=0, s_per_token=0, s_per_pair=0, copy_latency_s=2.5e-3, s_per_byte=0,
                  s_per_segment=0, overlap=1.0)  # fmt: skip
    trace = make_trace(seed=3, law=law, noise=0.3, states=400, repeats=4)
    states = dataset_of({"made": trace}).states
    priced = [price(one, [load("always-swap")]) for one in states]
    regret = sum(one.policy_s[0] - one.oracle_s for one in priced) / sum(one.oracle_s for one in priced)
    naive = sum(one.mean_s["swap"] - min(one.mean_s.values()) for one in states) / sum(one.oracle_s for one in priced)
    assert abs(regret) < 0.015
    assert naive > 0.05
    assert sum(one.tie for one in priced) > 0.85 * len(priced)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make_trace(seed=1, states=160, law=CostLaw(bend=0.4)).write(folder / "trace")
    train([folder / "trace"], folder / "model")
    return folder


def test_the_learned_policy_is_near_the_oracle_and_the_fixed_ones_are_not(model_folder: Path) -> None:
    names = [
        "always-recompute",
        "always-swap",
        "random:0.5",
        f"cheapest:{model_folder / 'model'}",
        f"explore:{model_folder / 'model'}",
    ]
    report = evaluate([model_folder / "trace"], names)
    recompute, swap, coin, cheapest, explore = report.policies
    assert report.states == 40
    assert report.left_out["states a policy's model was trained on"] == 120
    assert cheapest.accuracy is not None
    assert cheapest.accuracy.value > 0.97
    assert cheapest.over_oracle is not None
    assert cheapest.over_oracle.value < 0.01
    for fixed in (recompute, swap):
        assert fixed.over_oracle is not None
        assert fixed.over_oracle.low > 0.02
    assert coin.mean_regret_s.value == pytest.approx((recompute.mean_regret_s.value + swap.mean_regret_s.value) / 2)
    assert coin.accuracy is not None
    assert coin.accuracy.value == pytest.approx(0.5)
    assert cheapest.mean_regret_s.value <= explore.mean_regret_s.value < swap.mean_regret_s.value
    for score in report.policies:
        assert score.mean_regret_s.low <= score.mean_regret_s.value <= score.mean_regret_s.high
        assert sum(cell[1] for cell in score.by_length) == report.states
        assert sum(cell[1] for cell in score.by_load) == report.states
        assert sum(cell[3] for cell in score.by_length) == pytest.approx(score.total_s)
    assert report.always_wins is None


def test_a_report_is_json_and_text(model_folder: Path) -> None:
    report = evaluate([model_folder / "trace"], ["always-swap", "always-recompute"])
    assert report.states == 160
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["policies"][0]["policy"] == "always-swap"
    assert "always-recompute" in report.text()
    assert evaluate([model_folder / "trace"], ["always-swap", "always-recompute"]) == report


def test_a_regret_below_zero_is_explained(model_folder: Path) -> None:
    report = evaluate([model_folder / "trace"], ["always-swap"])
    (score,) = report.policies
    below = replace(score, mean_regret_s=replace(score.mean_regret_s, value=-1e-5))
    assert score.mean_regret_s.value >= 0 and "below zero" not in report.text()
    assert "below zero: the oracle chooses by half" in replace(report, policies=(below,)).text()


def test_policies_are_compared_on_the_same_states(model_folder: Path) -> None:
    alone = evaluate([model_folder / "trace"], ["always-swap"])
    beside = evaluate([model_folder / "trace"], ["always-swap", f"cheapest:{model_folder / 'model'}"])
    assert (alone.states, beside.states) == (160, 40)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"states": 19}, "19 states can be priced, at least 20 are needed"),
        ({"states": 30, "repeats": 1}, r"0 states can be priced.*30 states with an option measured only once"),
    ],
)
def test_too_few_states_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    make_trace(**changes).write(tmp_path / "trace")
    with pytest.raises(TraceError, match=message):
        evaluate([tmp_path / "trace"], ["always-swap"])


def test_states_the_model_trained_on_do_not_count(tmp_path: Path) -> None:
    make_trace(states=30).write(tmp_path / "trace")
    train([tmp_path / "trace"], tmp_path / "model")
    with pytest.raises(TraceError, match=r"15 states can be priced.*15 states a policy's model was trained on"):
        evaluate([tmp_path / "trace"], [f"cheapest:{tmp_path / 'model'}"])
    # A trace of its own, of the same engine, will do; that its states bear the same names means nothing.
    make_trace(seed=8, states=30, name="other").write(tmp_path / "other")
    assert evaluate([tmp_path / "other"], [f"cheapest:{tmp_path / 'model'}"]).states == 30


def test_a_model_of_another_link_or_machine_is_refused(model_folder: Path, tmp_path: Path) -> None:
    policy = f"cheapest:{model_folder / 'model'}"
    link = {"kind": "simulated", "bytes_per_s": 1e8, "latency_s": 0.0}
    make_trace(link=link).write(tmp_path / "linked")
    with pytest.raises(ModelError, match="link is"):
        evaluate([tmp_path / "linked"], [policy])
    make_trace(hardware=Plan().hardware | {"device": "accelerator"}).write(tmp_path / "moved")
    with pytest.raises(ModelError, match="device is 'accelerator'"):
        evaluate([tmp_path / "moved"], [policy])


def test_where_one_option_always_wins_it_says_that_the_policy_is_a_constant(tmp_path: Path) -> None:
    make_trace(law=CostLaw(copy_latency_s=0.0, s_per_byte=1e-11)).write(tmp_path / "trace")
    report = evaluate([tmp_path / "trace"], ["always-swap"])
    assert report.always_wins == "swap"
    assert "swap costs less in every state: here always choosing it is optimal" in report.text()


def test_no_policy_and_a_wrong_one_are_errors(model_folder: Path) -> None:
    with pytest.raises(ValueError, match="no policy was given"):
        evaluate([model_folder / "trace"], [])
    with pytest.raises(ValueError, match="the policies are"):
        evaluate([model_folder / "trace"], ["always-win"])


def test_a_policy_given_twice_and_a_negative_seed_are_errors(model_folder: Path) -> None:
    with pytest.raises(ValueError, match="policy always-swap: given twice"):
        evaluate([model_folder / "trace"], ["always-swap", "always-recompute", "always-swap"])
    with pytest.raises(ValueError, match="seed is -1, should be 0 or above"):
        evaluate([model_folder / "trace"], ["always-swap"], seed=-1)


def test_the_noise_floor_is_reported(model_folder: Path) -> None:
    report = evaluate([model_folder / "trace"], ["always-swap"])
    assert "self-check: none in core-made-32, core-made-64" in report.text()
    assert report.to_dict()["floor"]["unchecked"] == ("core-made-32", "core-made-64")


def test_a_replay_reports_the_policies_that_do_not_learn_in_it() -> None:
    plain, taught = "cheapest:cpu-llama-native", "cheapest:cpu-llama-native,online=on"
    report = evaluate([SHIPPED], [plain, taught, "always-swap"])
    assert report.learning == (taught,)
    assert report.text().count("a replay has no outcomes to learn from") == 1
    assert f"{taught}: a replay has no outcomes to learn from; judged as without online=on" in report.text()
    assert report.policies[0].total_s == report.policies[1].total_s
    assert json.loads(json.dumps(report.to_dict()))["learning"] == [taught]


def test_a_replay_says_what_a_recomputed_token_costs() -> None:
    """How many there will be, a profile does not know."""
    report = evaluate([SHIPPED], ["always-swap"])
    assert report.prices == read_dataset([SHIPPED]).prices
    assert report.prices.sentence() in report.text() and "a profile cannot say" in report.text()


def test_the_threshold_is_that_of_the_models_training_states(model_folder: Path, tmp_path: Path) -> None:
    """Both reports name the same rule, and compare the model with it on the same held-out states."""
    trained = train([model_folder / "trace"], tmp_path / "model")
    report = evaluate([model_folder / "trace"], ["always-swap", f"cheapest:{tmp_path / 'model'}"])
    seen = [one for one in read_dataset([model_folder / "trace"]).states if one.ids & trained.model.state_ids]
    assert report.threshold.rules == (trained.best_threshold,) == (best_threshold(seen).policy,)
    card = cost.load(tmp_path / "model").provenance.held_out
    assert Difference.from_card(card) == (trained.best_threshold, trained.against_threshold), "the model keeps it"
    assert report.threshold.chosen_on == "120 states that a model was trained on"
    (against,) = report.threshold.against
    assert against.states == trained.against_threshold.states == 40
    assert against.mean_s == pytest.approx(trained.against_threshold.mean_s)
    text = report.text()
    assert "\nbest threshold   " in text
    assert f"cheapest:{tmp_path / 'model'} less the best threshold: " in text
    assert "always-swap less" not in text, "a rule by length alone"
    assert report.to_dict()["threshold"]["against"][0]["high_s"] == against.high_s


def test_where_cost_depends_on_length_alone_the_model_is_no_better_than_the_threshold(tmp_path: Path) -> None:
    law = CostLaw(alone_s=0.0, overlap=1.0)
    make_trace(seed=1, states=160, law=law, block_sizes=(32,)).write(tmp_path / "trace")
    trained = train([tmp_path / "trace"], tmp_path / "model")
    assert trained.best_threshold.startswith("threshold:")
    assert trained.against_threshold.verdict.startswith("no better than the threshold")
    assert f"best threshold on the training states: {trained.best_threshold};" in trained.text()
    assert "no better than the threshold" in trained.text()
    report = evaluate([tmp_path / "trace"], [f"cheapest:{tmp_path / 'model'}"])
    assert "no better than the threshold" in report.text()
    assert json.loads(json.dumps(trained.to_dict()))["best_threshold"] == trained.best_threshold


def test_where_cost_depends_on_more_the_model_is_better_than_the_threshold(tmp_path: Path) -> None:
    """A recompute beside nobody costs 20 ms more, so that swap is right there at every length."""
    make_trace(seed=1, states=480, repeats=2, law=CostLaw(alone_s=20e-3)).write(tmp_path / "trace")
    train([tmp_path / "trace"], tmp_path / "model")
    report = evaluate([tmp_path / "trace"], [f"cheapest:{tmp_path / 'model'}"])
    (against,) = report.threshold.against
    assert against.high_s < 0
    assert "better than the threshold" in report.text()
    assert "no better" not in report.text()


def test_without_training_states_no_threshold_is_judged_on_a_state_it_was_chosen_on() -> None:
    """Whatever one state costs, its own rule stays the same, and those of the other folds follow it."""
    states = list(dataset_of({"made": make_trace(states=30, repeats=2)}).states)
    rules, chosen_on = _thresholds(states, [], seed=0)
    assert chosen_on == "the states of the other folds, 5 folds"
    order = sorted(range(30), key=lambda number: states[number].computed_tokens)
    for number, recompute_s, swap_s in ((order[0], 1e6, 0.0), (order[15], 0.0, 1e6), (order[-1], 0.0, 1e6)):
        changed = list(states)
        extreme = state([recompute_s] * 2, [swap_s] * 2, round(states[number].computed_tokens))
        changed[number] = replace(extreme, name=states[number].name)
        changed_rules, _ = _thresholds(changed, [], seed=0)
        assert changed_rules[number] == rules[number]
        assert changed_rules != rules


def test_a_report_without_a_model_has_a_threshold_too(model_folder: Path) -> None:
    report = evaluate([model_folder / "trace"], ["always-swap"])
    assert 1 <= len(report.threshold.rules) <= 5
    assert report.threshold.against == ()
    assert "chosen on the states of the other folds" in report.text()
    assert report.threshold.score.total_s <= report.policies[0].total_s
