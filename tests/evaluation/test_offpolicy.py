"""From a production log on disk to estimates, or to the reason why there are none."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from kvpolicy.cli import main
from kvpolicy.evaluation import OffPolicyReport, evaluate
from kvpolicy.evaluation.decision_log import Log, log_from_traces
from kvpolicy.evaluation.estimation import Estimation
from kvpolicy.evaluation.estimators import ESTIMATORS
from kvpolicy.evaluation.log_headroom import log_headroom
from kvpolicy.evaluation.offpolicy import Estimate, estimate, heaviest_weight, judge
from kvpolicy.events import KINDS
from kvpolicy.policy import feasible_options, load
from kvpolicy.policy.cheapest import Cheapest
from kvpolicy.trace import Trace
from tests.evaluation.conftest import PLAN
from tests.evaluation.test_log_headroom import SERVER as FEW_BLOCKS
from tests.evaluation.test_log_headroom import Rates
from tests.simulator.worlds import random_workload, run
from tests.synthetic import fitted_model, true_cost_s
from tests.synthetic_logs import LogPlan, make_log, reworked


def true_mean_s(policy: str, log: Trace, plan: LogPlan = PLAN) -> float:
    """Of a policy, in the very states of the log."""
    asked, paid = load(policy, fitted_model), []
    for victim in log_from_traces({"log": log}).situations:
        options = feasible_options(victim)
        shares = asked.probabilities(victim, options, asked.initial_state())
        costs = [true_cost_s(plan.law, option.kind, victim) for option in options]
        paid.append(sum(share * cost for share, cost in zip(shares, costs, strict=True)))
    return fmean(paid)


@pytest.fixture(scope="module")
def report(folder: Path) -> OffPolicyReport:
    result = evaluate([folder], ["always-recompute", "always-swap", "threshold:500"])
    assert isinstance(result, OffPolicyReport)
    return result


def test_every_estimator_finds_the_truth(report: OffPolicyReport, log: Trace) -> None:
    for policy in report.policies:
        assert not policy.refused
        truth_s = true_mean_s(policy.policy, log)
        for result in policy.estimates:
            assert result.value_s == pytest.approx(truth_s, rel=0.05), (policy.policy, result)
            assert result.low_s is not None and result.high_s is not None
            assert result.low_s < result.value_s < result.high_s
            assert result.n == 1500


def test_doubly_robust_is_narrower_than_weights_alone(report: OffPolicyReport) -> None:
    for policy in report.policies:
        width = {result.estimator: (result.high_s or 0) - (result.low_s or 0) for result in policy.estimates}
        assert width["cross-fitted-dr"] < 0.9 * width["ips"]


def test_the_report_has_text_and_json(report: OffPolicyReport) -> None:
    text = report.text()
    assert "1500 decisions in" in text and "always-swap" in text and "cross-fitted-dr" in text
    assert "effects of an action on later states are not included" in " ".join(text.split())
    read = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert read["policies"][0]["estimates"][0]["estimator"] == "dm"
    assert read["known"]["recompute"][0] + read["known"]["swap"][0] == 1500


def test_the_same_seed_says_the_same(folder: Path, report: OffPolicyReport) -> None:
    assert evaluate([folder], ["always-recompute", "always-swap", "threshold:500"]) == report


def test_the_command_prints_and_writes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    with pytest.raises(SystemExit) as stopped:
        main(
            ["evaluate", "--trace", str(folder), "--policy", "always-swap", "--estimator", "dr", "--estimator", "snips",
             "--interval", "sequence", "--cluster", "request", "--json", str(out)]
        )  # fmt: skip
    assert stopped.value.code == 0
    assert "brackets: 95% intervals, sequence" in capsys.readouterr().out
    (one,) = json.loads(out.read_text())["policies"]
    assert [result["estimator"] for result in one["estimates"]] == ["dr", "snips"]


def test_bernstein_wants_a_limit_and_holds_it(folder: Path) -> None:
    def spans(limit_s: float | None) -> dict[str, tuple[float | None, float | None]]:
        estimates = estimate([folder], ["always-swap"], how=Estimation(interval="bernstein", limit_s=limit_s))
        return {one.estimator: (one.low_s, one.high_s) for one in estimates.policies[0].estimates}

    values = spans(5.0)
    assert values["snips"] == values["dm"] == (None, None)
    low, high = values["ips"]
    assert low is not None and high is not None and low < high
    with pytest.raises(ValueError, match=r"limit_s is 0.0001, a cost of"):
        spans(1e-4)
    with pytest.raises(ValueError, match="needs a limit"):
        spans(None)


def test_an_explored_log_supports_only_what_it_left_to_chance() -> None:
    """Outside the band the log's policy is certain: other policies have no support there, and are refused."""
    log = log_from_traces({"log": make_log(2, decisions=600, policy="explore:boosted", loader=fitted_model)})
    sure = log.probability.max(axis=1) == 1.0
    assert 0 < sure.mean() < 1
    result = judge(log, {"swap": log.targets(load("always-swap")), "itself": log.probability}, 0)
    assert any("no support" in why for why in result.policies[0].refused)
    assert not result.policies[0].estimates
    assert "refused" in result.text() and "no support" in result.text()
    assert not result.policies[1].refused


def test_open_records_stay_and_others_of_their_action_stand_for_them(log: Trace) -> None:
    """Dear swaps never end before the log does: their absence must not make swap look cheap to the weights' mean."""
    rng = random.Random(0)
    gone = {row["preemption_id"] for row in log.rows("outcomes") if rng.random() < 0.05}
    cut = reworked(log, outcomes=[row for row in log.rows("outcomes") if row["preemption_id"] not in gone])
    whole, result = log_from_traces({"log": log}), log_from_traces({"log": cut})
    assert len(result) == len(whole)
    assert result.known.sum() == len(whole) - len(gone)
    assert sum(n for what, n in result.counts.items() if "still open" in what) == len(gone)
    one, other = (judge(some, {"swap": some.targets(load("always-swap"))}, 0) for some in (whole, result))
    for before, after in zip(one.policies[0].estimates, other.policies[0].estimates, strict=True):
        assert after.value_s == pytest.approx(before.value_s, rel=0.03)
    assert "still open" in other.text()


def test_many_open_records_refuse_everything(log: Trace) -> None:
    cut = log_from_traces({"log": reworked(log, outcomes=log.rows("outcomes")[:1000])})
    (result,) = judge(cut, {"swap": cut.targets(load("always-swap"))}, 0).policies
    assert any("records is not known, over 10%" in why for why in result.refused)


def test_a_shadow_run_knows_nothing_of_swaps(log: Trace) -> None:
    some = [
        row | ({"executed": "recompute", "reason": "shadow"} if row["executed"] == "swap" else {})
        for row in log.rows("decisions")
    ]
    read_log = log_from_traces({"log": reworked(log, decisions=some)})
    assert (read_log.action == 0).all() and (read_log.probability[:, 0] == 1.0).all()
    report = judge(read_log, {name: read_log.targets(load(name)) for name in ("always-recompute", "always-swap")}, 0)
    assert not report.policies[0].refused
    assert any("no support" in why for why in report.policies[1].refused)
    assert any("shadow mode" in what for what in report.counts)


def test_a_log_of_few_clusters_has_no_estimate_for_its_own_policy_either() -> None:
    log = log_from_traces({"log": make_log(5, decisions=9)})
    result = judge(log, {"swap": log.targets(load("always-swap"))}, 0)
    assert result.clusters < 20 and result.logged is None
    assert any(f"{result.clusters} clusters of decisions, at least 20 are needed" in why for why in result.refused)
    assert "as logged: refused" in result.text() and "at least 20 are needed" in result.text()
    assert " ms " not in result.text(), "no value is printed"
    json.dumps(result.to_dict(), allow_nan=False)


def test_bernstein_bounds_the_weights_that_chance_spared_the_log() -> None:
    """A weight that nobody drew counts: the bound is of what could have been, not of what was seen."""
    target = np.array([[0.0, 1.0], [0.5, 0.5]])
    probability = np.array([[0.96, 0.04], [0.5, 0.5]])
    assert heaviest_weight(target, probability, np.array([1.0, 0.8])) == pytest.approx(1 / (0.04 * 0.8))
    assert heaviest_weight(target, probability, np.array([1.0, np.nan])) == pytest.approx(25.0)
    assert heaviest_weight(target, np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([1.0, 1.0])) == pytest.approx(1.0)


def test_bernstein_is_as_wide_where_the_dearest_weight_was_not_drawn() -> None:
    """Two logs that differ in one probability, on an action that was not taken: the second could have met 1 / 0.02."""
    log = log_from_traces({"log": make_log(1, PLAN)})
    swap = KINDS.index("swap")
    at = int(np.flatnonzero((log.action != swap) & log.feasible[:, swap])[0])
    rare = log.probability.copy()
    rare[at] = [0.98, 0.02] if swap == 1 else [0.02, 0.98]

    def width(some: Log) -> float:
        how = Estimation(("ips",), "bernstein", limit_s=5.0)
        (result,) = judge(some, {"swap": some.targets(load("always-swap"))}, 0, how).policies
        (one,) = result.estimates
        assert one.low_s is not None and one.high_s is not None
        return one.high_s - one.low_s

    assert width(replace(log, probability=rare)) > 2 * width(log)


def test_the_bias_of_tuning_widens_the_interval_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_from_traces({"log": make_log(2, PLAN)})
    target = {"always-swap": log.targets(load("always-swap"))}

    def switch() -> Estimate:
        return judge(log, target, 2, Estimation(("switch-dr",))).policies[0].estimates[0]

    plain, as_it_is = switch(), ESTIMATORS["switch-dr"]
    monkeypatch.setitem(ESTIMATORS, "switch-dr", lambda records: replace(as_it_is(records), bias_s=0.25))
    wider = switch()
    assert plain.low_s is not None and plain.high_s is not None
    assert (wider.value_s, wider.bias_s, plain.bias_s) == (plain.value_s, 0.25, 0.0)
    assert wider.low_s == pytest.approx(plain.low_s - 0.25) and wider.high_s == pytest.approx(plain.high_s + 0.25)


def test_a_log_with_steps_says_what_there_was_to_win(tmp_path: Path) -> None:
    """A simulated log of always-recompute, priced by a policy's cost model; a made-up log has no steps."""
    _, recorded = run(random_workload(5, 200, 60.0), FEW_BLOCKS)
    recorded.write(tmp_path / "log")
    report = evaluate([tmp_path / "log"], ["always-recompute", Cheapest("rates", Rates())])
    assert isinstance(report, OffPolicyReport) and report.headroom is not None
    assert report.headroom == log_headroom([recorded], Rates())
    assert report.headroom.sentence() in report.text()
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["headroom"]["bound"] > 0
    unpriced = evaluate([tmp_path / "log"], ["always-recompute"])
    assert "how much of it is likely is not known: no cost model" in unpriced.text()
    make_log(seed=3, decisions=60).write(tmp_path / "bare")
    assert "is not known: the trace holds no steps." in evaluate([tmp_path / "bare"], ["always-swap"]).text()
