"""The best threshold on a log: chosen doubly robustly, judged on other records, and compared with policies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvpolicy import cost
from kvpolicy.datasets.threshold import Difference, LengthRule
from kvpolicy.evaluation.decision_log import log_from_traces
from kvpolicy.evaluation.estimation import Estimation
from kvpolicy.evaluation.log_threshold import ChosenRules, choose_rules, extra_s
from kvpolicy.evaluation.offpolicy import estimate
from kvpolicy.events import KINDS
from kvpolicy.training import train
from tests.synthetic import CostLaw, true_cost_s
from tests.synthetic_logs import make_log

HOW = Estimation(("cross-fitted-dr",))
BY_LENGTH = CostLaw(alone_s=0.0, overlap=1.0)
BY_MORE = CostLaw(alone_s=20e-3)
"""A recompute beside nobody costs 20 ms more, so that swap is right there at every length."""


def test_what_swap_costs_more_is_estimated_without_bias() -> None:
    log = log_from_traces({"log": make_log(3, decisions=3000, policy="random:0.3", host_full_share=0.2)})
    extra = extra_s(log, np.random.default_rng(0))
    free = log.feasible.all(axis=1)
    assert (~free).any() and not extra[~free].any()
    law = CostLaw()
    true_s = [true_cost_s(law, "swap", one) - true_cost_s(law, "recompute", one) for one in log.situations]
    error_s = extra[free] - np.array(true_s)[free]
    assert abs(error_s.mean()) < 3 * error_s.std() / np.sqrt(free.sum())


def test_rules_are_chosen_on_other_records() -> None:
    log = log_from_traces({"log": make_log(4, decisions=1500, law=BY_LENGTH)})
    rng = np.random.default_rng(0)
    crossed = choose_rules(log, log, rng)
    assert crossed.chosen_on == "the records of the other folds, 5 folds" and len(crossed.by_record) == len(log)
    seen = frozenset(log.requests[: len(log) // 2])
    rest = log.without(seen, "seen")
    chosen = choose_rules(log, rest, rng)
    assert len(chosen.names) == 1 and len(chosen.by_record) == len(rest)
    assert chosen.chosen_on == f"{len(log) - len(rest)} records that a model was trained on"
    lengths = sorted({one.computed_tokens for one in log.situations})
    first = [next(one for one in log.situations if one.computed_tokens == length) for length in lengths]
    crossing = next(
        one.computed_tokens
        for one in first
        if true_cost_s(BY_LENGTH, "swap", one) < true_cost_s(BY_LENGTH, "recompute", one)
    )
    swap_from = chosen.by_record[0].swap_from
    assert swap_from is not None and 0.7 * crossing < swap_from < 1.4 * crossing


def test_a_records_rule_is_the_same_whatever_it_cost() -> None:
    """Neither it nor the direct model behind the estimates of other records knows its cost."""
    log = log_from_traces({"log": make_log(4, decisions=400, law=BY_LENGTH)})
    rules = choose_rules(log, log, np.random.default_rng(0)).by_record
    assert len(set(rules)) > 1
    for number in range(0, len(log), 23):
        cost_s = log.cost_s.copy()
        cost_s[number] += 1.0
        dear = replace(log, cost_s=cost_s)
        others = choose_rules(dear, dear, np.random.default_rng(0)).by_record
        assert others[number] == rules[number] and others != rules


def test_a_record_without_a_choice_leaves_the_rule_none() -> None:
    log = log_from_traces({"log": make_log(5, decisions=200, host_full_share=0.5)})
    target = ChosenRules((LengthRule(0),) * len(log), "nothing").targets(log)
    free = log.feasible.all(axis=1)
    assert (target[free, KINDS.index("swap")] == 1).all() and (target[~free, KINDS.index("swap")] == 0).all()
    assert (target.sum(axis=1) == 1).all()


@pytest.mark.parametrize("law", [BY_LENGTH, BY_MORE], ids=["length", "more"])
def test_training_and_evaluation_compare_the_model_with_it(law: CostLaw, tmp_path: Path) -> None:
    """And say plainly where the model is no better."""
    make_log(6, decisions=7000, law=law).write(tmp_path / "log")
    trained = train([tmp_path / "log"], tmp_path / "model", family="analytic")
    name = f"cheapest:{tmp_path / 'model'}"
    report = estimate([tmp_path / "log"], [name, "always-swap", "threshold:300"], how=HOW)
    assert report.threshold is not None and trained.against_threshold is not None
    (against,) = report.threshold.against
    assert against.policy == name, "the others decide by length alone"
    assert against.states == report.n == trained.against_threshold.states == trained.held_out_records
    card = cost.load(tmp_path / "model").provenance.held_out
    assert Difference.from_card(card) == (trained.best_threshold, trained.against_threshold), "the model keeps it"
    verdict = "no better than the threshold" if law is BY_LENGTH else "better than the threshold"
    for text, compared in ((report.text(), against), (trained.text(), trained.against_threshold)):
        assert compared.verdict.startswith(verdict) and compared.low_s <= compared.mean_s <= compared.high_s
        assert f"per preemption: {compared.verdict}" in text
    assert f"best threshold on the training records: {trained.best_threshold};" in trained.text()
    assert "\nbest threshold: mean weight" in report.text()
    assert "chosen doubly robustly on" in report.text()
    assert json.loads(json.dumps(report.to_dict()))["threshold"]["against"][0]["policy"] == name


def test_a_rule_that_a_log_cannot_judge_is_refused_and_nothing_is_compared_with_it(tmp_path: Path) -> None:
    make_log(6, decisions=2500, law=BY_LENGTH).write(tmp_path / "log")
    train([tmp_path / "log"], tmp_path / "model", family="analytic")
    report = estimate([tmp_path / "log"], [f"cheapest:{tmp_path / 'model'}"], how=HOW)
    assert report.threshold is not None and report.threshold.judgement.refused and report.threshold.against == ()
    assert "best threshold: refused\n  because mean weight" in report.text()
    assert "no policy is compared with it" in report.text()


def test_a_log_that_supports_no_estimate_has_no_threshold(tmp_path: Path) -> None:
    make_log(7, decisions=8).write(tmp_path / "log")
    report = estimate([tmp_path / "log"], ["always-swap"], how=HOW)
    assert report.refused and report.threshold is None
