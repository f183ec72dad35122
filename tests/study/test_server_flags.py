"""The server that a study simulated, in words and as a command."""

from __future__ import annotations

from typing import Any

import pytest

from kvpolicy.study.server_flags import baseline_words, cache_words, config_line, order_of, ordered_by

ORDERED = {"order": "mlfq:base=64", "classes": "chat:ttft=1.0+batch"}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"serving": {}}, "kvpolicy config --policy always-swap"),
        ({"serving": {"order": "fcfs"}}, "kvpolicy config --policy always-swap"),
        ({"serving": ORDERED}, "kvpolicy config --policy always-swap --order mlfq:base=64 "
                               "--classes chat:ttft=1.0+batch"),
        ({"serving": {"order": "python:mine:Mine"}}, "kvpolicy config --policy always-swap --order python:mine:Mine "
                                                     "--allow-python-policies"),
        ({"serving": {"host_cache": "cost"}}, "kvpolicy config --policy always-swap --cache cost"),
        ({"serving": {"host_cache": "python:mine:Mine"}}, "kvpolicy config --policy always-swap --cache "
                                                          "python:mine:Mine --allow-python-policies"),
        ({"serving": {}, "module": "python:a:B"}, "kvpolicy config --policy python:a:B --allow-python-policies"),
        ({"serving": ORDERED, "policy_digest": "ab"}, ""),
    ],
)  # fmt: skip
def test_the_command_has_all_that_was_simulated(more: dict[str, Any], expected: str) -> None:
    assert config_line("always-swap", more, 4.0) == (expected and f"{expected} --host-gib 4")


def test_a_model_that_was_given_as_an_object_has_no_command() -> None:
    inputs = {"serving": {}, "hardware": "boosted@ab", "hardware_digest": "ab"}
    assert config_line("cheapest:boosted@ab", inputs, 4.0) == ""
    assert config_line("always-swap", inputs, 8.0) == "kvpolicy config --policy always-swap --host-gib 8"


def test_the_baseline_is_stock_vllm_only_in_its_own_order() -> None:
    assert baseline_words({"serving": {"order": "fcfs"}}) == baseline_words({"serving": {}}) == "vLLM's default"
    assert baseline_words({"serving": ORDERED}) == "always-recompute under the order mlfq:base=64"
    assert (order_of({"serving": {}}), ordered_by({"order": "fcfs"}), ordered_by(ORDERED)) == ("fcfs", {}, ORDERED)


def test_the_cache_and_its_files_are_named_where_there_are_any() -> None:
    assert cache_words({}) == ""
    assert cache_words({"host_cache": "cost"}) == ", prompts in host memory by cost"
    files = {"host_cache": "lru", "file_gib": 200.0, "file_link": "3e9,0.0001"}
    assert cache_words(files) == ", prompts in host memory by lru, 200 GiB of files at 3e9,0.0001"
