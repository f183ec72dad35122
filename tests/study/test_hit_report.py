"""The table of what was found of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpolicy.study.hit_report import hit_rows
from tests.study.grids import simulate

NOTHING = {"device_tokens": 0, "host_tokens": 0, "file_tokens": 0, "loaded_tokens": 0}


def result(prompt_tokens: int, device: int, **classes: dict[str, Any]) -> dict[str, Any]:
    hits = NOTHING | {"prompt_tokens": prompt_tokens, "device_tokens": device}
    return {"prefix_hits": hits, "classes": {name: {"prefix_hits": NOTHING | one} for name, one in classes.items()}}


def test_shares_are_of_the_tokens_of_all_runs() -> None:
    rows = hit_rows({"swap": [result(300, 30), result(100, 70)]})
    assert rows[1:] == [["swap", "all", "200", "25.0%", "0.0%", "0.0%", "0.0%"]]


def test_classes_stand_below_all_requests_where_there_are_several() -> None:
    chat, batch = {"prompt_tokens": 100, "device_tokens": 50, "host_tokens": 25, "loaded_tokens": 20}, {}
    batch = {"prompt_tokens": 0}
    rows = hit_rows({"swap": [result(100, 50, chat=chat, batch=batch)]})
    assert rows[2:] == [
        ["swap", "batch", "0", "", "", "", ""],
        ["swap", "chat", "100", "50.0%", "25.0%", "0.0%", "20.0%"],
    ]
    assert len(hit_rows({"swap": [result(100, 50, chat=chat)]})) == 2


def test_the_report_has_the_table_where_prompts_share_prefixes(hardware: str, tmp_path: Path) -> None:
    alone = simulate(hardware, tmp_path / "c", policies=["always-swap"])
    assert "prompts found in caches" not in alone.text()
    sessions = "sessions:azure-conversation-2023?n=5&turns=4&think=1&rate=1&context=1500"
    talking = simulate(hardware, tmp_path / "c", policies=["always-swap"], workloads=[sessions])
    (one,) = talking.results
    assert 0 < one["prefix_hits"]["device_tokens"] < one["prefix_hits"]["prompt_tokens"]
    assert "prompts found in caches" in talking.text()
