"""Events go to those that follow them, whoever else fails; counters are told once, gauges as they stand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy.attribution.ledger import Ledger, OpenPreemption
from kvpolicy.events import Decision, Ending, Option
from kvpolicy.survival import Survival
from kvpolicy_vllm.plugin import observers
from kvpolicy_vllm.plugin.host_copies import CopyBook
from kvpolicy_vllm.plugin.observers import (
    EVENTS,
    MAX_FAILURES,
    Identity,
    MetricsCounter,
    Observer,
    Observers,
    Pending,
    SurvivalLearner,
    Tally,
)
from tests.synthetic import situation


class Follower(Observer):
    """Follows arrivals. ``works``: how often it does before it fails; then it always does."""

    trouble, given_up = "arrivals failed", "arrivals are given up"

    def __init__(self, works: int = 1000) -> None:
        self.seen: list[Any] = []
        self.closed_times = 0
        self._works = works

    def arrived(self, request: Any, now: float) -> None:
        self._works -= 1
        if self._works < 0:
            raise ValueError("made up")
        self.seen.append(request)

    def close(self) -> None:
        self.closed_times += 1
        if self._works < 0:
            raise ValueError("made up")


class Steps(Observer):
    def done(self, step: Any, output: Any, scheduler: Any, began_s: float, now: float) -> None:
        """Only follows."""


def test_events_are_known() -> None:
    assert {"arrived", "decided", "executed", "copied", "closed", "measured", "done", "ended"} <= set(EVENTS)
    assert not {"close", "begin_afresh"} & set(EVENTS)


def test_events_go_to_subscribers_and_a_failing_one_stops_no_other() -> None:
    complaints: list[str] = []
    observers = Observers(complaints.append)
    broken, sound = Follower(works=1), Follower()
    observers.add(broken, Steps(), sound)
    for number in range(3):
        observers.tell("arrived", number, 0.0)
    observers.tell("ended", 7, 0.0)
    assert broken.seen == [0] and sound.seen == [0, 1, 2]
    assert complaints == ["arrivals failed", "arrivals failed"]


def test_one_that_always_fails_is_given_up_but_closed_in_the_end() -> None:
    complaints: list[str] = []
    observers = Observers(complaints.append)
    broken, sound = Follower(works=0), Follower()
    observers.add(broken, sound)
    for number in range(2 * MAX_FAILURES):
        observers.tell("arrived", number, 0.0)
    assert broken.failures == MAX_FAILURES and len(sound.seen) == 2 * MAX_FAILURES
    assert complaints.count("arrivals are given up") == 1
    observers.close()
    assert (broken.closed_times, sound.closed_times) == (1, 1)


def test_steps_are_not_reported_without_subscribers() -> None:
    observers = Observers(pytest.fail)
    observers.add(Follower())
    assert not observers.follow_steps
    observers.replace(Steps, Steps())
    assert observers.follow_steps
    observers.replace(Steps, None)
    assert not observers.follow_steps


def test_whoever_is_dropped_follows_nothing_any_more() -> None:
    observers = Observers(lambda what: None)
    assert not observers.follows("arrived")
    observers.add(Follower(works=0))
    assert observers.follows("arrived") and not observers.follows("scheduled")
    for _ in range(MAX_FAILURES):
        assert observers.follows("arrived")
        observers.tell("arrived", 1, 0.0)
    assert not observers.follows("arrived")


def test_a_replaced_observer_is_closed() -> None:
    observers = Observers(pytest.fail)
    first, second = Follower(), Follower()
    observers.add(first)
    observers.replace(Follower, second)
    observers.tell("arrived", 1, 0.0)
    assert (first.seen, first.closed_times, second.seen, second.closed_times) == ([], 1, [1], 0)


def test_a_strict_engine_raises_every_mistake() -> None:
    def complain(what: str) -> None:
        raise  # called while an exception is handled

    observers = Observers(complain)
    observers.add(Follower(works=0))
    with pytest.raises(ValueError, match="made up"):
        observers.tell("arrived", 1, 0.0)


def test_counters_are_reported_once_and_gauges_as_they_stand() -> None:
    tally = Tally()
    tally.add("fallbacks", reason="host_full")
    tally.set("host_slots_used", 3)
    assert tally.report() == {"counters": {"fallbacks|reason=host_full": 1}, "gauges": {"host_slots_used": 3}}
    assert tally.report() is None
    tally.set("host_slots_used", 3)
    assert tally.report() is None and not tally.urgent
    tally.add("fallbacks", 2, reason="host_full")
    tally.set("host_slots_used", 0)
    assert tally.report() == {"counters": {"fallbacks|reason=host_full": 2}, "gauges": {"host_slots_used": 0}}
    assert tally.totals == {"fallbacks|reason=host_full": 3}


def test_dropped_records_alone_keep_no_idle_engine_stepping() -> None:
    tally = Tally()
    tally.add("records_dropped")
    assert not tally.urgent and tally.report() is not None
    tally.add("loaded_tokens", 7)
    assert tally.urgent


def test_gauges_follow_slots_and_open_preemptions() -> None:
    copies, ledger = CopyBook(slots=4, ranks=1, block_bytes=100), Ledger()
    counter = MetricsCounter(copies, ledger)
    first = counter.report()
    assert first is not None and first["gauges"] == {
        "host_slots_used": 0, "host_slots_total": 4, "open_preemptions": 0,
    }  # fmt: skip
    assert counter.report() is None and not counter.urgent
    copies.keep("r", "p", 40, [(None, 7), (None, 8), (None, 9)])
    ledger.add(OpenPreemption("p", "r", "swap", 40, 0.0, 0))
    assert counter.urgent
    assert counter.stats()["host_slots_used"] == 3 and counter.stats()["open_preemptions"] == 1
    second = counter.report()
    assert second is not None and second["gauges"]["host_slots_used"] == 3


def test_counting_goes_on_however_often_it_failed() -> None:
    complaints: list[str] = []
    observers, counter = Observers(complaints.append), MetricsCounter(CopyBook(4, 1, 100), Ledger())
    observers.add(counter)
    for _ in range(3 * MAX_FAILURES):
        observers.tell("executed", None)
    observers.tell("fell_back", "host_full")
    assert len(complaints) == 3 * MAX_FAILURES
    assert counter.tally.totals == {"fallbacks|reason=host_full": 1}


def test_all_begin_to_write_before_the_first_is_waited_for() -> None:
    order: list[str] = []

    class Writer(Observer):
        def idle(self) -> None:
            order.append("asked")

        def close(self) -> None:
            order.append("closed")

    observers = Observers(pytest.fail)
    observers.add(Writer(), Writer())
    observers.close()
    assert order == ["asked", "asked", "closed", "closed"]


def test_an_observer_that_was_given_up_is_closed_when_replaced() -> None:
    observers, broken = Observers(lambda complaint: None), Follower(works=0)
    observers.add(broken)
    for number in range(MAX_FAILURES):
        observers.tell("arrived", number, 0.0)
    broken._works = 1000
    observers.replace(Follower, None)
    observers.close()
    assert broken.closed_times == 1


# ---- what survives on the device ----


@pytest.mark.parametrize(
    ("resumed", "mixed", "ended", "learned"),
    [
        (True, False, "resumed", True),
        (True, False, "superseded", True),
        (True, True, "resumed", False),
        (False, False, "aborted", False),
    ],
)
def test_what_was_found_on_the_device_is_learned_if_it_is_known(
    resumed: bool, mixed: bool, ended: Ending, learned: bool
) -> None:
    """Not of a request that never came back, nor of one whose load failed."""
    survival, observers = Survival(), Observers(lambda message: None)
    observers.add(SurvivalLearner(survival))
    victim = situation(computed_tokens=320, hashed_blocks=9)
    decision = Decision((Option("recompute"),), (1.0,), 0, (), "p", "{}", "recompute")
    observers.tell("decided", Pending(victim, decision, Identity("p", "r", 0, 0, {})))
    opened = OpenPreemption("p", "r", "recompute", 320, 0.0, 0, resumed=resumed, mixed=mixed, local_hit_tokens=96)
    observers.tell("closed", opened, opened.close(ended, 3.0))
    expected = Survival()
    if learned:
        expected.preempted("p", victim)
        expected.closed("p", 96)
        assert expected != Survival()
    assert survival == expected


def test_after_a_failure_what_waits_is_forgotten_and_learning_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    survival, complaints = Survival(), list[str]()
    observers = Observers(complaints.append)
    observers.add(SurvivalLearner(survival))
    survival.preempted("waits", situation())
    monkeypatch.setattr(Survival, "closed", lambda *arguments: 1 / 0)
    opened = OpenPreemption("p", "r", "recompute", 320, 0.0, 0)
    observers.tell("closed", opened, opened.close("resumed", 3.0))
    assert complaints == [SurvivalLearner.trouble] and survival == Survival()
    monkeypatch.undo()
    observers.tell("closed", opened, opened.close("resumed", 3.0))
    assert len(complaints) == 1


def test_what_is_observed_is_told_once_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "MAX_OBSERVED", 2)
    tally = Tally()
    for value in (0.1, 0.2, 0.3):
        tally.observe("copy_seconds", value, direction="save")
    report = tally.report()
    assert report is not None and report["observed"] == {"copy_seconds|direction=save": [0.1, 0.2]}
    assert tally.report() is None
    tally.add("extrapolated")
    assert "observed" not in (tally.report() or {"observed": 1})


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("cheapest:/srv/alice/models/mine", "cheapest:mine"),
        ("cheapest:models/mine/,online=on", "cheapest:mine,online=on"),
        ("explore:../a b/mine,budget=2%,base=cheapest:/x/other", "explore:mine,budget=2%,base=cheapest:other"),
        ("mine@0123abcd", "mine@0123abcd"),
        ("threshold:500", "threshold:500"),
        ("cheapest:analytic", "cheapest:analytic"),
    ],
)
def test_no_path_of_the_host_is_in_a_label(label: str, shown: str) -> None:
    counter = MetricsCounter(CopyBook(4, 1, 1), Ledger())
    policy = SimpleNamespace(label=label, cost_model=SimpleNamespace(digest="abc"))
    counter.show_policy(policy, 1)
    assert counter.tally.gauges == {f"cost_model|policy={shown}|digest=abc": 1}
