"""What becomes of a state learned online that is not of the cost model; learning from costs as they come."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpolicy import cost
from kvpolicy.attribution import LiveCost
from kvpolicy.attribution.ledger import OpenPreemption
from kvpolicy.cost import ModelError, online
from kvpolicy.cost.online import Online
from kvpolicy.events import Cause, Ending, Option, Preemption
from kvpolicy.policy import Decider, Feedback, LearningPolicy, NoState, load
from kvpolicy_vllm.plugin.learner import Learner, remember
from kvpolicy_vllm.plugin.observers import MAX_FAILURES, Identity, Observers, Pending, Tally
from tests.synthetic import situation

POLICY = "cheapest:cpu-llama-native,online=on"


def decider_of(state: Path, policy: str = POLICY) -> Decider:
    decider = Decider(load(policy), random.Random(0))
    remember(decider, state).close()
    return decider


def test_a_state_of_another_model_is_set_aside_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = tmp_path / "state.json"
    online.save(Online(events=7), "abc123" * 4, state)
    with caplog.at_level(logging.WARNING):
        begun = decider_of(state)
    assert begun.learned == Online()
    assert [path.name for path in tmp_path.iterdir()] == ["state.json.other-abc123abc123"]
    assert "another cost model" in caplog.text and "state.json.other-abc123abc123" in caplog.text
    assert online.load(tmp_path / "state.json.other-abc123abc123", "abc123" * 4).events == 7


def test_a_state_of_the_same_model_is_resumed(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    online.save(Online(events=7), cost.load("cpu-llama-native").digest, state)
    begun = decider_of(state)
    assert begun.learned == Online(events=7)


def test_an_idle_engine_has_what_was_learned_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpolicy_vllm.plugin.learner.WRITE_EVERY_S", 1e6)
    state = tmp_path / "state.json"
    decider = Decider(load(POLICY), random.Random(0))
    memory = remember(decider, state)
    observers = Observers(pytest.fail)
    observers.add(Learner(decider, memory, Tally()))
    memory.keep(Online(events=3))
    observers.tell("idle")
    patience = time.monotonic() + 60
    while not state.exists() and time.monotonic() < patience:
        time.sleep(0.01)
    assert online.load(state, cost.load("cpu-llama-native").digest).events == 3
    observers.close()


def test_a_policy_that_is_left_is_written_beside_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A slow disk holds up no step when the policy is switched, only the shutdown."""
    disk, write = threading.Event(), online.save

    def slowly(*arguments: Any) -> None:
        assert disk.wait(60)
        write(*arguments)

    monkeypatch.setattr(online, "save", slowly)
    state = tmp_path / "state.json"
    decider = Decider(load(POLICY), random.Random(0))
    memory = remember(decider, state)
    observers = Observers(pytest.fail)
    observers.add(Learner(decider, memory, Tally()))
    memory.keep(Online(events=3))
    with monkeypatch.context() as impatient:
        impatient.setattr("kvpolicy_vllm.plugin.learner.CLOSE_S", 0.01)
        for later in (Learner(decider, None, Tally()), None):
            observers.replace(Learner, later)
    assert "was not written" not in caplog.text, "the switch waited for the disk"
    assert not state.exists()
    threading.Timer(0.2, disk.set).start()
    observers.close()
    assert online.load(state, cost.load("cpu-llama-native").digest).events == 3


def cut_off(state: Path) -> str:
    state.write_text(state.read_text()[:100])
    return "cannot be read"


def emptied(state: Path) -> str:
    state.write_bytes(b"")
    return "cannot be read"


def without_rooms(state: Path) -> str:
    state.write_text(json.dumps(json.loads(state.read_text()) | {"room": {}}))
    return "field room.recompute is None"


def of_another_version(state: Path) -> str:
    state.write_text(json.dumps(json.loads(state.read_text()) | {"schema_version": 1}))
    return "schema_version is 1"


@pytest.mark.parametrize("damage", [cut_off, emptied, without_rooms, of_another_version])
def test_a_damaged_state_is_set_aside_with_a_warning(
    damage: Callable[[Path], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "state.json"
    online.save(Online(events=7), cost.load("cpu-llama-native").digest, state)
    why = damage(state)
    left = state.read_bytes()
    with caplog.at_level(logging.WARNING):
        begun = decider_of(state)
    assert begun.learned == Online()
    assert why in caplog.text and "state.json.damaged" in caplog.text
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("state.json.damaged", left)]


def test_a_file_that_never_was_a_state_is_refused_and_stays(tmp_path: Path) -> None:
    state = tmp_path / "notes.json"
    state.write_text('{"mine": 1}')
    with pytest.raises(ModelError, match=r"notes.json: schema_version is None"):
        decider_of(state)
    assert state.read_text() == '{"mine": 1}'


SWAPPABLE = situation(computed_tokens=64)


class Lessons(LearningPolicy[NoState]):
    """Swaps, and keeps what it is taught."""

    name = "lessons"

    def __init__(self, fails: int = 0) -> None:
        self.feedback: list[Feedback] = []
        self.fails = fails

    def probabilities(self, situation: Preemption, options: Sequence[Option], state: NoState) -> Sequence[float]:
        return (0.0, 1.0)[: len(options)] if len(options) > 1 else (1.0,)

    def observe(self, state: NoState, feedback: Feedback) -> NoState:
        self.fails -= 1
        if self.fails >= 0:
            raise ValueError("made up")
        self.feedback.append(feedback)
        return state


class School:
    """A learner of one policy, and one preemption after the other."""

    def __init__(self, policy: Lessons) -> None:
        self.decider, self.tally, self.complaints = Decider(policy, random.Random(0)), Tally(), list[str]()
        self.learner = Learner(self.decider, None, self.tally)
        self.observers = Observers(self.complaints.append)
        self.observers.add(self.learner)
        self._count = 0

    def teach(self, cause: Cause = "memory", ended: Ending = "resumed", mixed: bool = False) -> None:
        self._count += 1
        name = f"p{self._count}"
        situation, tell = replace(SWAPPABLE, cause=cause), self.observers.tell
        tell("decided", Pending(situation, self.decider.decide(situation), Identity(name, "r", 0, 0, {})))
        opened = OpenPreemption(name, "r", "swap", 64, 0.0, 0)
        opened.mixed, opened.admitted_s = mixed, 1.0
        tell("closed", opened, opened.close(ended, 3.0))
        tell("measured", LiveCost(name, None if mixed else "swap", ended, 0.25, 0.0))


def test_what_a_swap_cost_is_learned_from() -> None:
    school = School(policy := Lessons())
    school.teach()
    (feedback,) = policy.feedback
    assert (feedback.option.kind, feedback.engine_s, feedback.victim_delay_s) == ("swap", 0.25, 2.0)
    assert not school.learner._awaited and not school.complaints


@pytest.mark.parametrize(
    "unusable", [{"cause": "reset"}, {"ended": "aborted"}, {"ended": "superseded"}, {"mixed": True}]
)
def test_what_is_no_options_cost_alone_is_not_learned_from(unusable: dict[str, Any]) -> None:
    school = School(policy := Lessons())
    school.teach(**unusable)
    assert not policy.feedback and not school.learner._awaited
    school.decider.pin("swap")
    school.teach()
    assert not policy.feedback and not school.learner._awaited, "a tool's option is not the policy's choice"
    school.decider.pin(None)
    school.teach()
    assert len(policy.feedback) == 1


def test_a_cost_that_cannot_be_learned_from_is_dropped_alone_and_counted() -> None:
    school = School(policy := Lessons(fails=1))
    school.teach()
    school.teach()
    assert len(policy.feedback) == 1 and school.tally.totals == {"measuring_failed": 1}


def test_learning_that_never_works_is_given_up() -> None:
    school = School(Lessons(fails=1000))
    for _ in range(MAX_FAILURES + 2):
        school.teach()
    assert school.tally.totals == {"measuring_failed": MAX_FAILURES}
    assert school.complaints[-1] == Learner.given_up
