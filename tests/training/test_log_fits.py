"""Learning from production logs: one option seen per situation."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import kvpolicy
from kvpolicy.cost import load
from kvpolicy.cost.intervals import conformal_margin
from kvpolicy.datasets.logs import Record, holds_logs, records_of
from kvpolicy.datasets.threshold import LengthRule
from kvpolicy.evaluation import OffPolicyReport, evaluate
from kvpolicy.evaluation.estimation import Estimation
from kvpolicy.events import KINDS, Kind
from kvpolicy.trace import Trace, TraceError
from kvpolicy.training.family import FAMILIES
from kvpolicy.training.log_fits import (
    RATIO_CONFIDENCE,
    against_threshold,
    fit_logged,
    intervals_of,
    ratio_margin,
    request_folds,
    train_logged,
)
from kvpolicy.training.reports import LogTrainReport
from tests.synthetic import CostLaw, fitted_model, make_trace, options_for, situation, true_cost_s
from tests.synthetic_logs import make_log, reworked
from tests.training.log_records import record
from tests.training.survivors import with_survivors

LAW = CostLaw()


@pytest.fixture(scope="module")
def log() -> Trace:
    return make_log(1, decisions=900, policy="random:0.3")


@pytest.fixture(scope="module")
def folder(log: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log") / "log"
    log.write(folder)
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> LogTrainReport:
    report = kvpolicy.train(traces=[folder], out=folder.parent / "model", family="analytic")
    assert isinstance(report, LogTrainReport)
    return report


def test_each_option_is_learned_from_its_own_records(trained: LogTrainReport) -> None:
    model = load(trained.out)
    for tokens in (60, 200, 700, 1800):
        for running in (0, 3):
            victim = situation(tokens, running_requests=running)
            for option, cost in zip(options_for(victim), model.predict(victim, options_for(victim)), strict=True):
                assert cost.engine_s == pytest.approx(true_cost_s(LAW, option.kind, victim), rel=0.12)


def test_the_report_says_what_it_rests_on(trained: LogTrainReport) -> None:
    text = trained.text()
    assert trained.records["recompute"] + trained.records["swap"] + trained.held_out_records == 900
    assert trained.records["recompute"] > 1.5 * trained.records["swap"]
    assert trained.min_chance == pytest.approx({"recompute": 0.7, "swap": 0.3})
    assert "each situation shows only one option" in text
    for kind in KINDS:
        assert trained.held_out[kind]["mean_error"] == pytest.approx(0.08, abs=0.03)
        assert abs(trained.held_out[kind]["bias"]) < 0.04
        assert trained.held_out[kind]["coverage"]["low"] <= 0.9 <= trained.held_out[kind]["coverage"]["high"]
    json.dumps(trained.to_dict(), allow_nan=False)


def test_held_out_requests_are_held_out_whole(folder: Path, trained: LogTrainReport, log: Trace) -> None:
    seen = load(trained.out).state_ids
    of_seen = [row for row in log.rows("decisions") if f"{row['core']}/{row['request']}" in seen]
    assert len(of_seen) == sum(trained.records.values())


def test_what_was_learned_from_is_not_judged_on(folder: Path, trained: LogTrainReport) -> None:
    report = evaluate([folder], [f"cheapest:{trained.out}"], how=Estimation(("dr",)))
    assert isinstance(report, OffPolicyReport)
    assert report.n == trained.held_out_records
    assert report.counts["left out: records that a policy's model was trained on"] == sum(trained.records.values())


def test_the_ratios_interval_holds_the_true_ratio(trained: LogTrainReport) -> None:
    model = load(trained.out)
    held, narrow = [], []
    for tokens in range(40, 1900, 20):
        victim = situation(tokens, running_requests=tokens % 5)
        first, second = options_for(victim)
        cost = model.predict(victim, (first, second))[1]
        if cost.extrapolated:
            continue
        ratio = math.log(true_cost_s(LAW, "swap", victim) / true_cost_s(LAW, "recompute", victim))
        held.append(cost.log_ratio_low <= ratio <= cost.log_ratio_high)
        narrow.append(cost.log_ratio_high - cost.log_ratio_low)
    assert len(held) > 50 and fmean(held) >= 0.9
    assert max(narrow) < 1.5


def test_outside_the_range_nothing_is_promised(trained: LogTrainReport) -> None:
    victim = situation(50_000)
    cost = load(trained.out).predict(victim, options_for(victim))[1]
    assert cost.extrapolated
    assert (cost.low_s, cost.high_s) == (0.0, math.inf)


def test_a_thin_option_is_learned_for_all_situations_by_its_weights(tmp_path: Path) -> None:
    """Swap was taken often for short victims, seldom for long ones, and is bent: no law is right for both. Weighted,
    the fit is the better one for all."""

    class Leaning(CostLaw):
        def engine_s(self, kind: Kind, x: Any) -> float:
            return super().engine_s(kind, x) * (1.0 + (x.computed_tokens / 700.0) ** 2 if kind == "swap" else 1.0)

    log = make_log(2, decisions=1200, law=Leaning(), noise=0.05)
    kept, ends = [], {row["preemption_id"]: row for row in log.rows("outcomes")}
    for number, row in enumerate(log.rows("decisions")):
        thin = row["computed_tokens"] > 600
        if thin and row["executed"] == "swap" and number % 5:
            continue
        share = 1 / 6 if thin else 0.5
        kept.append(row | {"probabilities": [1 - share, share]})
    log = reworked(log, decisions=kept, outcomes=[ends[row["preemption_id"]] for row in kept])
    flat = reworked(log, decisions=[row | {"probabilities": [0.5, 0.5]} for row in kept])
    missed = {}
    for name, one in (("weighted", log), ("flat", flat)):
        one.write(tmp_path / name)
        train_logged([tmp_path / name], tmp_path / f"{name}-model", "linear", 0, False)
        model = load(tmp_path / f"{name}-model")
        some = [situation(tokens) for tokens in range(700, 2000, 100)]
        missed[name] = fmean(
            abs(math.log(model.predict(s, options_for(s))[1].engine_s / true_cost_s(Leaning(), "swap", s)))
            for s in some
        )
    assert missed["weighted"] <= missed["flat"]


def test_a_law_that_is_off_over_all_situations_is_scaled_to_what_the_log_says(tmp_path: Path) -> None:
    """A straight line through a bent option, taken seldom where it is dear: off on average, and put right."""

    class Bent(CostLaw):
        def engine_s(self, kind: Kind, x: Any) -> float:
            return super().engine_s(kind, x) * (1.0 + (x.computed_tokens / 700.0) ** 3 if kind == "swap" else 1.0)

    make_log(5, decisions=1500, law=Bent(), noise=0.05, policy="random:0.4").write(tmp_path / "log")
    report = train_logged([tmp_path / "log"], tmp_path / "model", "analytic", 0, False)
    swap = report.averages["swap"]
    assert swap.factor > 1.0, "robust to the long ones, a median fit takes them for outliers"
    model, records = load(tmp_path / "model"), records_of({"log": make_log(6, decisions=1500, law=Bent(), noise=0.05)})
    situations = [one.situation for one in records.records]
    result = fmean(model.predict(one, options_for(one))[1].engine_s for one in situations)
    true = fmean(true_cost_s(Bent(), "swap", one) for one in situations)
    assert result == pytest.approx(true, rel=0.15)
    assert abs(result / true - 1) < abs(result / swap.factor / true - 1), "nearer than without"
    assert "scaled" in report.text() and "doubly robustly" in report.text()


def test_laws_are_of_what_was_lost_and_judged_by_what_was_expected(tmp_path: Path) -> None:
    with_survivors(make_log(1, decisions=600, policy="random:0.5")).write(tmp_path / "log")
    report = kvpolicy.train(traces=[tmp_path / "log"], family="analytic")
    recompute = report.model.laws["recompute"]
    assert recompute.s_per_token == pytest.approx(LAW.s_per_token, rel=0.01)
    assert recompute.s_per_pair == pytest.approx(LAW.s_per_pair, rel=0.01)
    for kind in KINDS:
        assert report.held_out[kind]["mean_error"] > 0.05
        assert report.held_out[kind]["coverage"]["holds"] > 0.8


def test_a_residual_is_learned_where_it_helps(tmp_path: Path) -> None:
    make_log(3, decisions=700, law=CostLaw(bend=0.6), noise=0.05).write(tmp_path / "log")
    report = train_logged([tmp_path / "log"], tmp_path / "model", "boosted", 0, False)
    assert max(report.trees.values()) > 0
    kind = max(report.trees, key=report.trees.__getitem__)
    assert report.held_out[kind]["mean_error"] < report.held_out[kind]["law_mean_error"]
    assert load(tmp_path / "model").provenance.family == "boosted"


def test_requests_are_dealt_whole_and_evenly() -> None:

    some = [record(request=f"c/{i % 40}") for i in range(200)]
    hand = request_folds(some, 4, random.Random(0))
    assert sorted(list(hand.values()).count(number) for number in range(4)) == [10] * 4


def test_the_ratios_room_is_put_together_from_both_options() -> None:
    assert ratio_margin((1.0, 2.0), (10.0, 20.0)) == (12.0, 21.0)
    missed: dict[Kind, Sequence[tuple[Record, float]]] = {
        kind: [(record(500, kind), 0.01 * i) for i in range(-100, 100)] for kind in KINDS
    }
    intervals = intervals_of(missed)
    scores = [0.01 * i for i in range(-100, 100)]
    assert intervals.inside["swap"] == (conformal_margin(scores),)
    below, above = conformal_margin(scores, RATIO_CONFIDENCE)
    assert intervals.inside["ratio"] == ((below + above, above + below),)


def test_every_bin_holds_enough_of_either_option() -> None:
    missed: dict[Kind, list[tuple[Record, float]]] = {
        "recompute": [(record(tokens, "recompute"), 0.1) for tokens in (40, 80, 160, 320, 640) for _ in range(40)],
        "swap": [(record(tokens, "swap"), 0.1) for tokens in (40, 160, 640) for _ in range(40)],
    }
    intervals = intervals_of(missed)
    assert intervals.length_edges == (80.0, 320.0)
    assert min(intervals.states) >= 30


def test_an_option_that_was_hardly_taken_is_named(tmp_path: Path) -> None:
    make_log(5, decisions=200, policy="random:0.02").write(tmp_path / "log")
    with pytest.raises(TraceError, match="records to learn swap from, at least 30 are needed"):
        kvpolicy.train(traces=[tmp_path / "log"], out=tmp_path / "m", family="linear")
    assert not (tmp_path / "m").exists()


def test_logs_and_profiles_are_distinguished(folder: Path, tmp_path: Path) -> None:
    make_trace(states=20).write(tmp_path / "profile")
    assert holds_logs([folder])
    assert not holds_logs([tmp_path / "profile"])
    with pytest.raises(TraceError, match="take one kind at a time"):
        kvpolicy.train(traces=[folder, tmp_path / "profile"], out=tmp_path / "m")


def test_where_there_was_no_choice_the_threshold_and_the_model_do_not_differ() -> None:
    """Some victims above 300 tokens met a full host pool, and a recompute of these cost nothing, so that swaps seem
    dear at such lengths."""
    log, rng = make_log(5, decisions=1500), random.Random(0)
    decisions = []
    for row in log.rows("decisions"):
        if row["computed_tokens"] > 300 and row["executed"] == "recompute" and rng.random() < 0.3:
            row = row | {"options": row["options"][:1], "probabilities": [1.0], "chosen": 0, "free_host_blocks": 0}
        decisions.append({name: value for name, value in row.items() if name != "core"})
    records = records_of({"log": reworked(log, decisions=decisions)})
    made = [one if one.had_choice else replace(one, engine_s=-1.0) for one in records.records]
    fitted = fit_logged(
        FAMILIES["analytic"], replace(records, records=tuple(made)), fitted_model("analytic").provenance, 0
    )
    assert fitted.rule.swap_from is not None and fitted.rule.swap_from < 300
    bound = [one for one in made if not one.had_choice]
    assert len(bound) > 50 and all(one.chance == 1.0 for one in bound)
    for rule in (LengthRule(None), LengthRule(0)):
        compared = against_threshold(fitted.model, rule, bound)
        assert compared is not None and compared.mean_s == compared.low_s == compared.high_s == 0.0


@pytest.mark.parametrize("family", ["analytic", "linear", "boosted"])
def test_an_option_that_only_few_requests_took_is_named(tmp_path: Path, family: str) -> None:
    """A fold without these requests would have nothing to fit its law to."""
    log = make_log(3, decisions=300)
    rows = [{name: value for name, value in row.items() if name != "core"} for row in log.rows("decisions")]
    for number, row in enumerate(rows):
        row["request"] = f"s{number % 2}" if row["executed"] == "swap" else row["request"]
    reworked(log, decisions=rows).write(tmp_path / "log")
    with pytest.raises(TraceError, match=r"to learn swap from are of 1 request\(s\) of one fold"):
        kvpolicy.train(traces=[tmp_path / "log"], family=family)
