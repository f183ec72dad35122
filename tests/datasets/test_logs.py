"""Records of a log that teach the cost of an option, and those that do not."""

from __future__ import annotations

import pytest

from kvpolicy.datasets.logs import records_of
from kvpolicy.trace import Trace, TraceError
from tests.synthetic_logs import make_log, reworked


@pytest.fixture(scope="module")
def log() -> Trace:
    return make_log(1, decisions=900, policy="random:0.3")


def test_only_what_teaches_an_options_cost_is_learned_from(log: Trace) -> None:
    some, ends = log.rows("decisions"), log.rows("outcomes")
    ends[0] |= {"ended": "aborted"}
    ends[1] |= {"ended": "superseded"}
    ends[2] |= {"engine_s": None}
    del ends[3]
    some[4] |= {"cause": "reset"}
    swap = next(row for row in some[5:] if row["executed"] == "swap")
    swap |= {"executed": "recompute", "reason": "save_failed"}
    records = records_of({"log": reworked(log, decisions=some, outcomes=ends)})
    assert len(records.records) == 900 - 6
    assert dict(records.left_out) == {
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


def test_tokens_found_below_zero_are_refused(log: Trace) -> None:
    some = log.rows("outcomes")
    some[17] |= {"local_hit_tokens": -5}
    with pytest.raises(TraceError, match=r"folder: table outcomes, row 17 of core .*: local_hit_tokens is -5"):
        records_of({"folder": reworked(log, outcomes=some)})
