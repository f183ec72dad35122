"""Conversations in the form of ShareGPT: read one by one, damaged ones refused or skipped."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from kvpolicy.workload import (
    Care,
    Even,
    ShareGPT,
    Starting,
    Think,
    WorkloadError,
)
from kvpolicy.workload.sharegpt import items
from tests.workload import published_files


def test_sharegpt_by_hand(tmp_path: Path) -> None:
    """At one token a word; the whole history is the next prompt, and what was never answered is left out."""
    path = published_files.put(tmp_path, "sg.json.gz", _json(published_files.SHAREGPT))
    source = ShareGPT(path, Think(3.0, 0.0), Starting(Even(1.0)), tokens_per_word=1.0, block_tokens=4)
    result = list(source)
    assert [(r.session, r.arrival_s, r.think_s, r.prompt_tokens, r.output_tokens) for r in result] == [
        ("first", 1.0, None, 3, 3),
        ("second", 2.0, None, 3, 3),
        ("first", 4.0, 3.0, 10, 3),
    ]
    base = 1 << 32
    assert [result[0].prefix, result[2].prefix] == [(base, base + 1), tuple(base + block for block in range(4))]
    assert (source.counts.rows, source.counts.requests, source.counts.empty) == (3, 3, 1)
    assert "1 a word" in source.source


def test_conversations_with_one_id_stay_apart(tmp_path: Path) -> None:
    """Else their turns would be dealt as those of one, and a prompt be shorter than the one before it."""
    one, *_ = published_files.SHAREGPT
    ids = ["same", "same", "same.2", "same"]
    path = published_files.put(tmp_path, "sg.json", _json([one | {"id": name} for name in ids]))
    result = list(ShareGPT(path, Think(1.0), Starting(Even(1.0)), tokens_per_word=1.0))
    turns = [request.session for request in result]
    assert {*turns} == {"same", "same.2", "same.2.2", "same.3"}
    assert [turns.count(name) for name in {*turns}] == [len(turns) // 4] * 4


def test_a_tokenizer_counts_instead(tmp_path: Path) -> None:
    path = published_files.put(tmp_path, "sg.json", _json(published_files.SHAREGPT))
    result = list(ShareGPT(path, Think(0.0), tokenizer=len, count=1))
    assert [(request.prompt_tokens, request.output_tokens) for request in result] == [(13, 13), (50, 17)]


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 7, 64, 1 << 16])
def test_conversations_are_found_whatever_the_pieces(tmp_path: Path, chunk_bytes: int) -> None:
    path = published_files.put(tmp_path, "sg.json", "\ufeff" + json.dumps(published_files.SHAREGPT, indent=1))
    result = list(items(path, chunk_bytes))
    assert [json.loads(text) for _, text in result] == published_files.SHAREGPT
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    assert [where for where, _ in result] == [
        f"line {1 + place}, conversation {number}"
        for number, place in enumerate((n for n, line in enumerate(lines) if line == " {"), 1)
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[{"id": "x"}]', "line 1, conversation 1: conversations is missing"),
        ('[["id", "conversations"]]', "line 1, conversation 1: should be a JSON object, is"),
        ('[{"conversations": 3}]', "conversation 1: conversations should be a list"),
        ('[{"conversations": [3]}]', "conversation 1: message 0 should be an object"),
        ('[{"conversations": [{"from": "robot", "value": "x"}]}]', "conversation 1: message 0 is from 'robot', known"),
        ('[{"conversations": [{"from": "gpt", "value": null}]}]', "conversation 1: message 0: value should be text"),
        ('[{"conversations": [', "line 1: the list breaks off after 0 conversations"),
        ('[{"conversations": []},\n{"conversations": [', "line 2: the list breaks off after 1 conversations"),
        ('[{"conversations": nil}]', "conversation 1: not JSON"),
    ],
)
def test_a_damaged_conversation_is_refused_or_skipped(tmp_path: Path, text: str, reason: str) -> None:
    path = published_files.put(tmp_path, "sg.json", text)
    with pytest.raises(WorkloadError, match=rf"sg\.json, .*{reason}"):
        list(ShareGPT(path, Think(1.0)))
    source = ShareGPT(path, Think(1.0), care=Care(skip_damaged=True))
    assert list(source) == []
    assert source.counts.damaged == 1


@pytest.mark.parametrize("text", ["", "{}", '"x"', 'x [{"conversations": []}]'])
def test_a_file_that_is_no_list_of_conversations_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(WorkloadError, match="should be a JSON list of conversations"):
        list(ShareGPT(published_files.put(tmp_path, "sg.json", text), Think(1.0), care=Care(skip_damaged=True)))


def test_conversations_are_read_as_they_are_needed(tmp_path: Path) -> None:
    path = published_files.put(tmp_path, "sg.json", _json(published_files.SHAREGPT * 5_000))
    source = ShareGPT(path, Think(0.0), Starting(Even(1.0)))
    assert len(list(islice(source, 10))) == 10
    assert source.counts.rows < 20


def _json(value: object) -> str:
    return json.dumps(value)
