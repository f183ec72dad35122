"""What becomes of a state learned online that is not of the cost model; learning from costs as they come."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpolicy import cost
from kvpolicy.cost import ModelError, online
from kvpolicy.cost.online import Online
from kvpolicy.policy import Decider, load
from kvpolicy_vllm.plugin.learner import Learner, remember
from kvpolicy_vllm.plugin.observers import Observers, Tally

POLICY = "cheapest:cpu-llama-native,online=on"


def begun_with(state: Path, policy: str = POLICY) -> Decider:
    decider = Decider(load(policy), random.Random(0))
    remember(decider, state).close()
    return decider


def test_a_state_of_another_model_is_set_aside_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = tmp_path / "state.json"
    online.save(Online(events=7), "abc123" * 4, state)
    with caplog.at_level(logging.WARNING):
        begun = begun_with(state)
    assert begun.learned == Online()
    assert [one.name for one in tmp_path.iterdir()] == ["state.json.other-abc123abc123"]
    assert "another cost model" in caplog.text and "state.json.other-abc123abc123" in caplog.text
    assert online.load(tmp_path / "state.json.other-abc123abc123", "abc123" * 4).events == 7


def test_a_state_of_the_same_model_is_resumed(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    online.save(Online(events=7), cost.load("cpu-llama-native").digest, state)
    begun = begun_with(state)
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
        begun = begun_with(state)
    assert begun.learned == Online()
    assert why in caplog.text and "state.json.damaged" in caplog.text
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("state.json.damaged", left)]


def test_a_file_that_never_was_a_state_is_refused_and_stays(tmp_path: Path) -> None:
    state = tmp_path / "notes.json"
    state.write_text('{"mine": 1}')
    with pytest.raises(ModelError, match=r"notes.json: schema_version is None"):
        begun_with(state)
    assert state.read_text() == '{"mine": 1}'
