"""What the judge does with a state learned online that is not of its cost model; no engine is started."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kvpolicy import cost
from kvpolicy.cost import ModelError, online
from kvpolicy.cost.online import Online
from kvpolicy_vllm.plugin.deciding import Judge
from kvpolicy_vllm.plugin.settings import Settings

POLICY = "cheapest:cpu-llama-native,online=on"


def judge(state: Path, policy: str = POLICY) -> Judge:
    fits = dict.fromkeys(("block_size", "block_bytes", "geometry", "hardware"))
    return Judge(Settings(policy=policy, online_state=state), fits, cost.load, rank=0, draw_seed=0)


@pytest.fixture(autouse=True)
def any_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the model fits is not what is asked here."""
    monkeypatch.setattr(Judge, "_check", lambda self, policy: None)


def test_a_state_of_another_model_is_set_aside_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = tmp_path / "state.json"
    online.save(Online(events=7), "abc123" * 4, state)
    with caplog.at_level(logging.WARNING):
        begun = judge(state)
    begun.close()
    assert begun.policy.learned(begun._state) == Online()
    assert [one.name for one in tmp_path.iterdir()] == ["state.json.other-abc123abc123"]
    assert "another cost model" in caplog.text and "state.json.other-abc123abc123" in caplog.text
    assert online.load(tmp_path / "state.json.other-abc123abc123", "abc123" * 4).events == 7


def test_a_state_of_the_same_model_is_resumed(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    online.save(Online(events=7), cost.load("cpu-llama-native").digest, state)
    begun = judge(state)
    begun.close()
    assert begun.policy.learned(begun._state) == Online(events=7)


def test_an_idle_engine_has_what_was_learned_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpolicy_vllm.plugin.deciding.KEEP_EVERY_S", 1e6)
    state = tmp_path / "state.json"
    begun = judge(state)
    assert begun._memory is not None
    begun._memory.keep(Online(events=3))
    begun.keep_soon()
    patience = time.monotonic() + 60
    while not state.exists() and time.monotonic() < patience:
        time.sleep(0.01)
    assert online.load(state, cost.load("cpu-llama-native").digest).events == 3
    begun.close()


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
        begun = judge(state)
    begun.close()
    assert begun.policy.learned(begun._state) == Online()
    assert why in caplog.text and "state.json.damaged" in caplog.text
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("state.json.damaged", left)]


def test_a_file_that_never_was_a_state_is_refused_and_stays(tmp_path: Path) -> None:
    state = tmp_path / "notes.json"
    state.write_text('{"mine": 1}')
    with pytest.raises(ModelError, match=r"notes.json: schema_version is None"):
        judge(state)
    assert state.read_text() == '{"mine": 1}'
