"""Learning from production logs: one option seen per situation."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import kvpolicy
from kvpolicy.cost import load
from kvpolicy.cost.intervals import conformal_margin
from kvpolicy.datasets.examples import Example
from kvpolicy.datasets.logs import Record, holds_logs, records_of
from kvpolicy.evaluation import OffPolicyReport, evaluate
from kvpolicy.evaluation.estimation import Estimation
from kvpolicy.events import KINDS, Kind
from kvpolicy.features import features_of
from kvpolicy.trace import Trace, TraceError
from kvpolicy.training.log_fits import (
    MAX_WEIGHT,
    RATIO_CONFIDENCE,
    LogTrainReport,
    clipped,
    intervals_of,
    ratio_margin,
    request_folds,
    train_logged,
    weight_of,
    weighted_examples,
)
from tests.synthetic import CostLaw, make_trace, options_for, situation, true_cost_s
from tests.synthetic_logs import make_log, reworked

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
    found = kvpolicy.train(traces=[folder], out=folder.parent / "model", family="analytic")
    assert isinstance(found, LogTrainReport)
    return found


def record(
    tokens: int = 500, kind: Kind = "swap", chance: float = 0.5, request: str = "c/r", cost_s: float = 1.0
) -> Record:
    return Record(situation(tokens), kind, chance, cost_s, request)


def test_each_option_is_learned_from_its_own_records(trained: LogTrainReport) -> None:
    model = load(trained.out)
    for tokens in (60, 200, 700, 1800):
        for running in (0, 3):
            one = situation(tokens, running_requests=running)
            for option, cost in zip(options_for(one), model.predict(one, options_for(one)), strict=True):
                assert cost.engine_s == pytest.approx(true_cost_s(LAW, option.kind, one), rel=0.12)


def test_the_report_says_what_it_rests_on(trained: LogTrainReport) -> None:
    text = trained.text()
    assert trained.records["recompute"] + trained.records["swap"] + trained.held_out_records == 900
    assert trained.records["recompute"] > 1.5 * trained.records["swap"]
    assert trained.min_chance == pytest.approx({"recompute": 0.7, "swap": 0.3})
    assert "no situation was met with both options" in text
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
    found = evaluate([folder], [f"cheapest:{trained.out}"], how=Estimation(("dr",)))
    assert isinstance(found, OffPolicyReport)
    assert found.n == trained.held_out_records
    assert found.counts["left out: records that a policy's model was trained on"] == sum(trained.records.values())


def test_the_ratios_interval_holds_the_true_ratio(trained: LogTrainReport) -> None:
    model = load(trained.out)
    held, narrow = [], []
    for tokens in range(40, 1900, 20):
        one = situation(tokens, running_requests=tokens % 5)
        first, second = options_for(one)
        cost = model.predict(one, (first, second))[1]
        if cost.extrapolated:
            continue
        ratio = math.log(true_cost_s(LAW, "swap", one) / true_cost_s(LAW, "recompute", one))
        held.append(cost.log_ratio_low <= ratio <= cost.log_ratio_high)
        narrow.append(cost.log_ratio_high - cost.log_ratio_low)
    assert len(held) > 50 and fmean(held) >= 0.9
    assert max(narrow) < 1.5


def test_outside_the_range_nothing_is_promised(trained: LogTrainReport) -> None:
    one = situation(50_000)
    cost = load(trained.out).predict(one, options_for(one))[1]
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
    found = train_logged([tmp_path / "log"], tmp_path / "model", "analytic", 0, False)
    swap = found.averages["swap"]
    assert swap.factor > 1.0, "robust to the long ones, a median fit takes them for outliers"
    model, records = load(tmp_path / "model"), records_of({"log": make_log(6, decisions=1500, law=Bent(), noise=0.05)})
    situations = [one.situation for one in records.records]
    told = fmean(model.predict(one, options_for(one))[1].engine_s for one in situations)
    true = fmean(true_cost_s(Bent(), "swap", one) for one in situations)
    assert told == pytest.approx(true, rel=0.15)
    assert abs(told / true - 1) < abs(told / swap.factor / true - 1), "nearer than without"
    assert "scaled" in found.text() and "doubly robustly" in found.text()


def test_a_residual_is_learned_where_it_helps(tmp_path: Path) -> None:
    make_log(3, decisions=700, law=CostLaw(bend=0.6), noise=0.05).write(tmp_path / "log")
    found = train_logged([tmp_path / "log"], tmp_path / "model", "boosted", 0, False)
    assert max(found.trees.values()) > 0
    kind = max(found.trees, key=found.trees.__getitem__)
    assert found.held_out[kind]["mean_error"] < found.held_out[kind]["law_mean_error"]
    assert load(tmp_path / "model").provenance.family == "boosted"


# ---- weights ----


def test_a_record_is_copied_as_often_as_it_weighs() -> None:
    some = [record(chance=0.4, tokens=100 + i) for i in range(40)]
    made = weighted_examples(some)
    assert len(made) == 100
    assert {made.count(one.example) for one in some} == {2, 3}
    assert weighted_examples([record(chance=1.0)]) == (record().example,)
    assert isinstance(made[0], Example) and made[0].x == features_of(
        some[0].situation, options_for(some[0].situation)[1]
    )


def test_weights_are_clipped_and_counted() -> None:
    some = [record(chance=0.001), record(chance=0.2)]
    assert [weight_of(one) for one in some] == [MAX_WEIGHT, 5.0]
    assert clipped(some) == 1


def test_requests_are_dealt_whole_and_evenly() -> None:
    import random

    some = [record(request=f"c/{i % 40}") for i in range(200)]
    hand = request_folds(some, 4, random.Random(0))
    assert sorted(list(hand.values()).count(one) for one in range(4)) == [10] * 4


# ---- intervals ----


def test_the_ratios_room_is_put_together_from_both_options() -> None:
    assert ratio_margin((1.0, 2.0), (10.0, 20.0)) == (12.0, 21.0)
    missed: dict[Kind, Sequence[tuple[Record, float]]] = {
        kind: [(record(500, kind), 0.01 * i) for i in range(-100, 100)] for kind in KINDS
    }
    found = intervals_of(missed)
    scores = [0.01 * i for i in range(-100, 100)]
    assert found.inside["swap"] == (conformal_margin(scores),)
    below, above = conformal_margin(scores, RATIO_CONFIDENCE)
    assert found.inside["ratio"] == ((below + above, above + below),)


def test_every_bin_holds_enough_of_either_option() -> None:
    missed: dict[Kind, list[tuple[Record, float]]] = {
        "recompute": [(record(tokens, "recompute"), 0.1) for tokens in (40, 80, 160, 320, 640) for _ in range(40)],
        "swap": [(record(tokens, "swap"), 0.1) for tokens in (40, 160, 640) for _ in range(40)],
    }
    found = intervals_of(missed)
    assert found.length_edges == (64.0, 256.0)
    assert min(found.states) >= 30


# ---- what is a record ----


def test_only_what_teaches_an_options_cost_is_learned_from(log: Trace) -> None:
    some, ends = log.rows("decisions"), log.rows("outcomes")
    ends[0] |= {"ended": "aborted"}
    ends[1] |= {"ended": "superseded"}
    ends[2] |= {"engine_s": None}
    del ends[3]
    some[4] |= {"cause": "reset"}
    swap = next(row for row in some[5:] if row["executed"] == "swap")
    swap |= {"executed": "recompute", "reason": "save_failed"}
    found = records_of({"log": reworked(log, decisions=some, outcomes=ends)})
    assert len(found.records) == 900 - 6
    assert dict(found.left_out) == {
        "preemptions that ended before the victim was back (aborted)": 1,
        "preemptions that ended before the victim was back (superseded)": 1,
        "preemptions whose cost could not be attributed": 1,
        "preemptions still open": 1,
        "preemptions by a reset, or of nothing computed": 1,
        "preemptions in which something else was executed than was chosen": 1,
    }


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([], "row 17: probability of option . missing"),
        ([None, None], "row 17: probability of option . missing"),
        ([0.0, 0.0], "row 17: probability of option . 0, should be above 0"),
    ],
)
def test_a_missing_probability_is_never_one(log: Trace, shares: list[float | None], message: str) -> None:
    some = log.rows("decisions")
    some[17] |= {"probabilities": shares}
    with pytest.raises(TraceError, match=message):
        records_of({"there": reworked(log, decisions=some)})


def test_a_swap_of_which_nothing_was_loaded_teaches_nothing(log: Trace) -> None:
    executed = {row["preemption_id"]: row["executed"] for row in log.rows("decisions")}
    outcomes = log.rows("outcomes")
    for row in [row for row in outcomes if executed[row["preemption_id"]] == "swap"][:3]:
        row |= {"loaded_tokens": 0, "recomputed_tokens": 40}
    before, after = records_of({"log": log}), records_of({"log": reworked(log, outcomes=outcomes)})
    assert after.left_out["swaps of which nothing was loaded"] == 3
    assert len(after.of_kind("swap")) == len(before.of_kind("swap")) - 3


def test_an_option_that_was_hardly_taken_is_named(tmp_path: Path) -> None:
    make_log(5, decisions=200, policy="random:0.02").write(tmp_path / "log")
    with pytest.raises(TraceError, match="records to learn swap from, at least 30 are needed"):
        kvpolicy.train(traces=[tmp_path / "log"], out=tmp_path / "m", family="linear")
    assert not (tmp_path / "m").exists()


def test_logs_and_profiles_are_told_apart(folder: Path, tmp_path: Path) -> None:
    make_trace(states=20).write(tmp_path / "profile")
    assert holds_logs([folder])
    assert not holds_logs([tmp_path / "profile"])
    with pytest.raises(TraceError, match="take one kind at a time"):
        kvpolicy.train(traces=[folder, tmp_path / "profile"], out=tmp_path / "m")
