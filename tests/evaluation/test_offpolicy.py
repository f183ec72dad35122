"""From a production log on disk to estimates, or to the reason why there are none."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

import kvpolicy
from kvpolicy.cli import main
from kvpolicy.evaluation import OffPolicyReport, evaluate
from kvpolicy.evaluation.decision_log import Log, log_from_traces, read_log
from kvpolicy.evaluation.estimation import Estimation
from kvpolicy.evaluation.estimators import ESTIMATORS
from kvpolicy.evaluation.offpolicy import Estimate, estimate, heaviest_weight, judge
from kvpolicy.events import KINDS
from kvpolicy.policy import feasible_options, load
from kvpolicy.policy.objective import Objective
from kvpolicy.trace import Trace, TraceError
from tests.synthetic import fitted_model, make_trace, true_cost_s
from tests.synthetic_logs import LogPlan, make_log, reworked

PLAN = LogPlan(decisions=1500)


def true_mean_s(policy: str, log: Trace, plan: LogPlan = PLAN) -> float:
    """Of a policy, in the very states of the log."""
    asked, paid = load(policy, fitted_model), []
    for one in log_from_traces({"log": log}).situations:
        options = feasible_options(one)
        shares = asked.probabilities(one, options, asked.initial_state())
        costs = [true_cost_s(plan.law, option.kind, one) for option in options]
        paid.append(sum(share * cost for share, cost in zip(shares, costs, strict=True)))
    return fmean(paid)


@pytest.fixture(scope="module")
def log() -> Trace:
    return make_log(1, PLAN, host_full_share=0.1)


@pytest.fixture(scope="module")
def folder(log: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log") / "log"
    log.write(folder)
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> OffPolicyReport:
    found = evaluate([folder], ["always-recompute", "always-swap", "threshold:500"])
    assert isinstance(found, OffPolicyReport)
    return found


def test_every_estimator_finds_the_truth(report: OffPolicyReport, log: Trace) -> None:
    for one in report.policies:
        assert not one.refused
        truth_s = true_mean_s(one.policy, log)
        for found in one.estimates:
            assert found.value_s == pytest.approx(truth_s, rel=0.05), (one.policy, found)
            assert found.low_s is not None and found.high_s is not None
            assert found.low_s < found.value_s < found.high_s
            assert found.n == 1500


def test_doubly_robust_is_narrower_than_weights_alone(report: OffPolicyReport) -> None:
    for one in report.policies:
        width = {found.estimator: (found.high_s or 0) - (found.low_s or 0) for found in one.estimates}
        assert width["cross-fitted-dr"] < 0.9 * width["ips"]


def test_the_report_is_told_and_goes_to_json(report: OffPolicyReport) -> None:
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
    assert [found["estimator"] for found in one["estimates"]] == ["dr", "snips"]


def test_bernstein_wants_a_limit_and_holds_it(folder: Path) -> None:
    def spans(limit_s: float | None) -> dict[str, tuple[float | None, float | None]]:
        found = estimate([folder], ["always-swap"], how=Estimation(interval="bernstein", limit_s=limit_s))
        return {one.estimator: (one.low_s, one.high_s) for one in found.policies[0].estimates}

    told = spans(5.0)
    assert told["snips"] == told["dm"] == (None, None)
    low, high = told["ips"]
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
    found = judge(log, {"swap": log.targets(load("always-swap")), "itself": log.probability}, 0)
    assert any("no support" in why for why in found.policies[0].refused)
    assert not found.policies[0].estimates
    assert "refused" in found.text() and "no support" in found.text()
    assert not found.policies[1].refused


# ---- what records are ----


def rows(log: Trace, table: str) -> list[dict[str, Any]]:
    return log.rows(table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"probabilities": []}, r"there: table decisions, row 17: probability of option 0 \(recompute\) missing"),
        ({"probabilities": [0.5]}, r"row 17: probability of option 1 \(swap\) missing"),
        ({"probabilities": [0.5, None]}, r"row 17: probability of option 1 \(swap\) missing"),
        ({"probabilities": [0.5, float("nan")]}, r"row 17: probability of option 1 \(swap\) missing"),
        ({"probabilities": [0.5, 0.6]}, "row 17: probabilities are .*should be 0 or above and sum to 1"),
        ({"probabilities": [1.0, 0.0], "chosen": 1}, "row 17: swap was chosen with probability 0"),
        ({"chosen": 2}, "row 17: chosen is 2, there are 2 options"),
        ({"computed_tokens": -5}, "row 17: computed_tokens is -5"),
    ],
)
def test_a_record_that_cannot_be_is_named(log: Trace, change: dict[str, Any], message: str) -> None:
    some = rows(log, "decisions")
    at = next(i for i, row in enumerate(some) if len(row["options"]) == 2 and i >= 17)
    some[17], some[at] = some[at], some[17]
    some[17] |= change
    with pytest.raises(TraceError, match=message):
        log_from_traces({"there": reworked(log, decisions=some)})


def test_two_options_of_a_kind_are_refused(log: Trace) -> None:
    some = rows(log, "decisions")
    swap = {"kind": "swap", "load_tokens": 5, "tier": "host", "synchronous": False}
    some[3] |= {"options": [swap, swap], "probabilities": [0.5, 0.5]}
    with pytest.raises(TraceError, match="row 3: options are"):
        log_from_traces({"there": reworked(log, decisions=some)})


def test_open_records_stay_and_others_of_their_action_stand_for_them(log: Trace) -> None:
    """Dear swaps never end before the log does: their absence must not make swap look cheap to the weights' mean."""
    rng = random.Random(0)
    gone = {row["preemption_id"] for row in rows(log, "outcomes") if rng.random() < 0.05}
    cut = reworked(log, outcomes=[row for row in rows(log, "outcomes") if row["preemption_id"] not in gone])
    whole, found = log_from_traces({"log": log}), log_from_traces({"log": cut})
    assert len(found) == len(whole)
    assert found.known.sum() == len(whole) - len(gone)
    assert sum(n for what, n in found.counts.items() if "still open" in what) == len(gone)
    one, other = (judge(some, {"swap": some.targets(load("always-swap"))}, 0) for some in (whole, found))
    for before, after in zip(one.policies[0].estimates, other.policies[0].estimates, strict=True):
        assert after.value_s == pytest.approx(before.value_s, rel=0.03)
    assert "still open" in other.text()


def test_many_open_records_refuse_everything(log: Trace) -> None:
    cut = log_from_traces({"log": reworked(log, outcomes=rows(log, "outcomes")[:1000])})
    (found,) = judge(cut, {"swap": cut.targets(load("always-swap"))}, 0).policies
    assert any("records is not known, over 10%" in why for why in found.refused)


def test_the_intended_action_answers_for_what_was_executed(log: Trace) -> None:
    """Swaps whose save failed cost a recompute: that is what choosing swap costs, and it is counted."""
    some, ends = rows(log, "decisions"), {row["preemption_id"]: row for row in rows(log, "outcomes")}
    swaps = [row for row in some if row["executed"] == "swap"][::4]
    for row in swaps:
        row |= {"executed": "recompute", "reason": "save_failed"}
        ends[row["preemption_id"]]["engine_s"] = 10.0
    found = log_from_traces({"log": reworked(log, decisions=some, outcomes=list(ends.values()))})
    assert found.counts["intended otherwise, recompute executed: save_failed"] == len(swaps)
    assert (found.cost_s[found.action == KINDS.index("swap")] == 10.0).sum() == len(swaps)
    assert not (found.cost_s[found.action == KINDS.index("recompute")] == 10.0).any()


def test_a_shadow_run_knows_nothing_of_swaps(log: Trace) -> None:
    some = [
        row | ({"executed": "recompute", "reason": "shadow"} if row["executed"] == "swap" else {})
        for row in rows(log, "decisions")
    ]
    found = log_from_traces({"log": reworked(log, decisions=some)})
    assert (found.action == 0).all() and (found.probability[:, 0] == 1.0).all()
    report = judge(found, {name: found.targets(load(name)) for name in ("always-recompute", "always-swap")}, 0)
    assert not report.policies[0].refused
    assert any("no support" in why for why in report.policies[1].refused)
    assert any("shadow mode" in what for what in report.counts)


def test_aborted_and_superseded_count_with_what_they_cost_and_resets_not_at_all(log: Trace) -> None:
    some, ends = rows(log, "decisions"), rows(log, "outcomes")
    ends[0] |= {"ended": "aborted"}
    ends[1] |= {"ended": "superseded"}
    some[2] |= {"cause": "reset"}
    found = log_from_traces({"log": reworked(log, decisions=some, outcomes=ends)})
    assert len(found) == len(some) - 1
    assert found.known.all()
    assert found.counts["aborted: counted with what was spent until then"] == 1
    assert found.counts["superseded: counted with what was spent until then"] == 1
    assert found.counts["left out: preemptions by a reset, which leave no choice"] == 1


def test_records_are_judged_by_what_is_asked(log: Trace) -> None:
    ends = [row | {"victim_delay_s": 1.0} for row in rows(log, "outcomes")]
    given = reworked(log, outcomes=ends)
    assert (log_from_traces({"log": given}, Objective.parse("2*victim")).cost_s == 2.0).all()
    nobody = [row | {"others_delay_s": None} for row in ends]
    with pytest.raises(TraceError, match=r"table outcomes, preemption .* of core core-log: .*others is not known"):
        log_from_traces({"log": reworked(log, outcomes=nobody)}, Objective.parse("others"))


def test_clusters_are_overflows_or_requests(log: Trace) -> None:
    some = rows(log, "decisions")
    by = {name: int(log_from_traces({"log": log}, cluster=name).cluster.max()) + 1 for name in ("overflow", "request")}
    assert by == {
        "overflow": len({row["overflow_id"] for row in some}),
        "request": len({row["request"] for row in some}),
    }
    with pytest.raises(ValueError, match="cluster is 'step', should be overflow or request"):
        log_from_traces({"log": log}, cluster="step")


def test_profiles_and_logs_are_not_judged_together(folder: Path, tmp_path: Path) -> None:
    make_trace(states=30).write(tmp_path / "profile")
    with pytest.raises(TraceError, match="take one kind at a time"):
        evaluate([folder, tmp_path / "profile"], ["always-swap"])
    with pytest.raises(ValueError, match="a profile measured both options and is replayed"):
        evaluate([tmp_path / "profile"], ["always-swap"], how=Estimation(("dr",)))


def test_logs_given_twice_or_empty_are_refused(folder: Path, log: Trace) -> None:
    with pytest.raises(TraceError, match="given twice"):
        read_log([folder, folder])
    with pytest.raises(TraceError, match="holds no decision that a policy made"):
        log_from_traces({"log": reworked(log, decisions=[])})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"estimators": ["mips"]}, "estimators is 'mips', should be one of dm, ips"),
        ({"estimators": ["dr", "dr"]}, "estimators has dr twice"),
        ({"interval": "normal"}, "interval is 'normal', should be one of"),
        ({"policies": ["always-swap", "always-swap"]}, "policy always-swap: given twice"),
        ({"policies": []}, "no policy was given"),
        ({"limit_s": 2.0}, "needs a limit"),
        ({"interval": "bernstein", "limit_s": -1.0}, r"limit_s is -1\.0, should be a number above 0"),
    ],
)
def test_wrong_words_are_named(folder: Path, wrong: dict[str, Any], message: str) -> None:
    policies = wrong.get("policies", ["always-swap"])
    with pytest.raises(ValueError, match=message):
        evaluate([folder], policies, how=Estimation(**{key: wrong[key] for key in wrong if key != "policies"}))


def test_costs_are_attributed_where_a_log_has_none() -> None:
    """Traces of a server hold steps; the log's costs come out of them. Without steps they are unknown, and said so."""
    log = make_log(3, decisions=40)
    without = reworked(log, outcomes=[row | {"engine_s": None} for row in rows(log, "outcomes")])
    found = log_from_traces({"log": without})
    assert not found.known.any()
    assert sum(n for what, n in found.counts.items() if "could not be attributed" in what) == 40


def test_the_public_function_judges_logs(folder: Path) -> None:
    found = kvpolicy.evaluate(traces=[folder], policies=["always-swap"])
    assert isinstance(found, OffPolicyReport)
    assert found.logged is not None and math.isfinite(found.logged.value_s)
    assert np.isfinite(found.policies[0].support.mean_weight_high)


def test_a_log_of_few_clusters_tells_nothing_of_its_own_policy_either() -> None:
    log = log_from_traces({"log": make_log(5, decisions=9)})
    found = judge(log, {"swap": log.targets(load("always-swap"))}, 0)
    assert found.clusters < 20 and found.logged is None
    assert any(f"{found.clusters} clusters of decisions, at least 20 are needed" in why for why in found.refused)
    assert "as logged: refused" in found.text() and "at least 20 are needed" in found.text()
    assert " ms " not in found.text(), "no value is printed"
    json.dumps(found.to_dict(), allow_nan=False)


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
        (found,) = judge(some, {"swap": some.targets(load("always-swap"))}, 0, how).policies
        (one,) = found.estimates
        assert one.low_s is not None and one.high_s is not None
        return one.high_s - one.low_s

    assert width(replace(log, probability=rare)) > 2 * width(log)


def test_what_tuning_may_have_left_out_widens_the_interval_to_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
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
