"""Reading a log: which records count, at what cost, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpolicy.evaluation.decision_log import log_from_traces, read_log
from kvpolicy.events import KINDS
from kvpolicy.policy.objective import Objective
from kvpolicy.trace import Trace, TraceError
from tests.synthetic_logs import make_log, reworked


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
def test_a_wrong_record_is_named(log: Trace, change: dict[str, Any], message: str) -> None:
    some = log.rows("decisions")
    at = next(i for i, row in enumerate(some) if len(row["options"]) == 2 and i >= 17)
    some[17], some[at] = some[at], some[17]
    some[17] |= change
    with pytest.raises(TraceError, match=message):
        log_from_traces({"there": reworked(log, decisions=some)})


def test_two_options_of_a_kind_are_refused(log: Trace) -> None:
    some = log.rows("decisions")
    swap = {"kind": "swap", "load_tokens": 5, "tier": "host", "synchronous": False}
    some[3] |= {"options": [swap, swap], "probabilities": [0.5, 0.5]}
    with pytest.raises(TraceError, match="row 3: options are"):
        log_from_traces({"there": reworked(log, decisions=some)})


def test_the_intended_action_answers_for_what_was_executed(log: Trace) -> None:
    """Swaps whose save failed cost a recompute: that is what choosing swap costs, and it is counted."""
    some, ends = log.rows("decisions"), {row["preemption_id"]: row for row in log.rows("outcomes")}
    swaps = [row for row in some if row["executed"] == "swap"][::4]
    for row in swaps:
        row |= {"executed": "recompute", "reason": "save_failed"}
        ends[row["preemption_id"]]["engine_s"] = 10.0
    result = log_from_traces({"log": reworked(log, decisions=some, outcomes=list(ends.values()))})
    assert result.counts["intended otherwise, recompute executed: save_failed"] == len(swaps)
    assert (result.cost_s[result.action == KINDS.index("swap")] == 10.0).sum() == len(swaps)
    assert not (result.cost_s[result.action == KINDS.index("recompute")] == 10.0).any()


def test_aborted_and_superseded_count_with_what_they_cost_and_resets_not_at_all(log: Trace) -> None:
    some, ends = log.rows("decisions"), log.rows("outcomes")
    ends[0] |= {"ended": "aborted"}
    ends[1] |= {"ended": "superseded"}
    some[2] |= {"cause": "reset"}
    result = log_from_traces({"log": reworked(log, decisions=some, outcomes=ends)})
    assert len(result) == len(some) - 1
    assert result.known.all()
    assert result.counts["aborted: counted with what was spent until then"] == 1
    assert result.counts["superseded: counted with what was spent until then"] == 1
    assert result.counts["left out: preemptions by a reset, which leave no choice"] == 1


def test_records_are_judged_by_the_objective(log: Trace) -> None:
    ends = [row | {"victim_delay_s": 1.0} for row in log.rows("outcomes")]
    result = reworked(log, outcomes=ends)
    assert (log_from_traces({"log": result}, Objective.parse("2*victim")).cost_s == 2.0).all()
    nobody = [row | {"others_delay_s": None} for row in ends]
    with pytest.raises(TraceError, match=r"table outcomes, preemption .* of core core-log: .*others is not known"):
        log_from_traces({"log": reworked(log, outcomes=nobody)}, Objective.parse("others"))


def test_clusters_are_overflows_or_requests(log: Trace) -> None:
    some = log.rows("decisions")
    by = {name: int(log_from_traces({"log": log}, cluster=name).cluster.max()) + 1 for name in ("overflow", "request")}
    assert by == {
        "overflow": len({row["overflow_id"] for row in some}),
        "request": len({row["request"] for row in some}),
    }
    with pytest.raises(ValueError, match="cluster is 'step', should be overflow or request"):
        log_from_traces({"log": log}, cluster="step")


def test_logs_given_twice_or_empty_are_refused(folder: Path, log: Trace) -> None:
    with pytest.raises(TraceError, match="given twice"):
        read_log([folder, folder])
    with pytest.raises(TraceError, match="holds no decision that a policy made"):
        log_from_traces({"log": reworked(log, decisions=[])})


def test_costs_are_attributed_where_a_log_has_none() -> None:
    """Traces of a server hold steps; the log's costs come out of them. Without steps they are unknown, and said so."""
    log = make_log(3, decisions=40)
    without = reworked(log, outcomes=[row | {"engine_s": None} for row in log.rows("outcomes")])
    result = log_from_traces({"log": without})
    assert not result.known.any()
    assert sum(n for what, n in result.counts.items() if "could not be attributed" in what) == 40
