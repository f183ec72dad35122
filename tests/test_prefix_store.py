"""`kvpolicy warm`: what it sends, what it says was stored, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpolicy.errors import InputError
from kvpolicy.fields import WrongValue
from kvpolicy.prefix_store import read_messages, read_prompt, warm
from tests.bench.live_http import Small, serving


def test_a_prompt_is_stored_and_pinned() -> None:
    small = Small()
    with serving(small) as url:
        first = warm(f"{url}/v1", list(range(1, 41)), keep_s=60.0, class_name="chat")
        again = warm(url, list(range(1, 41)))
    assert (first.prompt_tokens, first.found_before, first.found_after) == (40, 0, 40)
    assert again.found_before == 40 and first.first_s > 0
    body = small.bodies[0]
    assert body["max_tokens"] == 1
    assert body["kv_transfer_params"] == {"kvpolicy": {"class": "chat", "keep_s": 60.0, "once": True, "pin": True}}
    assert first.to_dict()["grown"] == {"vllm:kvpolicy_decisions_total": 4}
    assert "40 tokens, of which 0 were cached; 40 were computed" in first.text() and "found 40 of them" in first.text()


@pytest.mark.parametrize(
    ("server", "held", "why"),
    [
        (Small(has_plugin=False), 0, ["nothing is pinned: the server shows no counter of kvpolicy's"]),
        (Small(), 0, ["no further block is held back from eviction: it was pinned for longer before"]),
        (Small(hinted={"refused": 3}), 0, ["nothing more is pinned: hints hold back as many blocks as they may"]),
        (
            Small(hinted={"held": 2, "refused": 1}),
            2,
            ["not all of it is pinned: hints hold back as many blocks as they may"],
        ),
        (Small(hinted={"held": 2}), 2, []),
    ],
    ids=["vLLM alone", "no cache", "refused", "held in part", "held"],
)
def test_a_pin_without_effect_is_told(server: Small, held: int, why: list[str]) -> None:
    """As on vLLM without the plugin, and without a cache: what was computed is on the device until others take it."""
    with serving(server) as url:
        found = warm(url, list(range(1, 41)))
    assert (found.found_after, found.has_plugin, found.held_blocks) == (40, server.has_plugin, held)
    said = [line.partition(",")[0].partition(";")[0] for line in found.text().splitlines() if "pinned" in line]
    assert said == why


def test_whoever_has_the_salt_finds_it() -> None:
    small, prompt = Small(), list(range(1, 41))
    with serving(small) as url:
        assert warm(url, prompt, cache_salt="tenant").found_after == 40
        assert warm(url, prompt, cache_salt="tenant").found_before == 40
        assert warm(url, prompt).found_before == 0
    assert [body.get("cache_salt") for body in small.bodies] == ["tenant"] * 4 + [None] * 2


def test_a_key_is_sent_along_and_another_model_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Small()
    monkeypatch.setenv("OPENAI_API_KEY", "secret\n")  # as of a mounted file
    with serving(small) as url:
        assert warm(url, "a text", model="small").model == "small"
        with pytest.raises(WrongValue, match="model is 'large', should be one that the server has: small"):
            warm(url, "a text", model="large")
        monkeypatch.delenv("OPENAI_API_KEY")
        warm(url, "a text")
    assert small.keys == ["Bearer secret"] * 2 + [""] * 2


def test_messages_end_where_they_do() -> None:
    small = Small()
    with serving(small) as url:
        found = warm(url, messages=[{"role": "system", "content": "be kind and be brief"}])
    assert found.prompt_tokens == 5 and small.bodies[0]["add_generation_prompt"] is False


def test_a_server_that_refuses_is_quoted() -> None:
    with serving(Small({0: "status"})) as url, pytest.raises(InputError, match=r"answers 503: .*the pool"):
        warm(url, "a text")
    with pytest.raises(InputError, match="cannot be reached"):
        warm(url, "a text")
    for url in ("localhost", "ftp://localhost"):
        with pytest.raises(InputError, match=f"^'{url}' is no address of a server, as http://localhost:8000$"):
            warm(url, "a text")
    with pytest.raises(InputError, match=r"is no address of a server, as http://localhost:8000: .*port"):
        warm("http://localhost:many", "a text")
    with pytest.raises(InputError, match="give one of the two"):
        warm(url)


def test_hints_that_no_server_reads_are_refused_before_one_is_asked() -> None:
    small = Small()
    with serving(small) as url, pytest.raises(WrongValue, match=r"keep_s is -3\.0, should be a number above 0"):
        warm(url, "a text", keep_s=-3.0)
    assert not small.bodies


def test_files_are_read(tmp_path: Path) -> None:
    text, ids, messages = tmp_path / "a.txt", tmp_path / "a.json", tmp_path / "m.json"
    text.write_text("a text")
    ids.write_text("[1, 2]")
    messages.write_text(json.dumps([{"role": "system", "content": "a"}]))
    assert read_prompt(text) == "a text" and read_prompt(ids) == [1, 2]
    assert read_messages(messages) == [{"role": "system", "content": "a"}]
    with pytest.raises(InputError, match=r"m.json: should be a JSON list of token ids"):
        read_prompt(messages)
    with pytest.raises(InputError, match=r"a.json: should be a JSON list of objects"):
        read_messages(ids)
    with pytest.raises(InputError, match=r"a.txt: is no JSON"):
        read_messages(text)
    with pytest.raises(InputError, match=r"none\.txt: cannot be read: no such file"):
        read_prompt(tmp_path / "none.txt")
