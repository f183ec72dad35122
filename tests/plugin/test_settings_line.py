"""One line of settings: where it is cut, what its values are, and what is said of a wrong one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.errors import InputError
from kvpolicy.policy import spec
from kvpolicy_vllm.plugin.settings_line import KEYS, read_line, server_settings


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("always-swap", {"policy": "always-swap"}),
        ("cheapest:models/mine,order=urgent", {"policy": "cheapest:models/mine", "order": "urgent"}),
        (
            "explore:models/mine,online=on,budget=2%,host_gib=8,online_state=/var/s",
            {"policy": "explore:models/mine,online=on,budget=2%", "host_gib": 8.0, "online_state": "/var/s"},
        ),
        (
            " always-swap , hints=keep=60,share=0.5,class=0.1,client=0.05,cache=lru ,seed=3,shadow=on,pin_memory=off",
            {
                "policy": "always-swap", "hints": "keep=60,share=0.5,class=0.1,client=0.05", "cache": "lru", "seed": 3,
                "shadow": True, "pin_memory": False,
            },
        ),
        (
            "always-swap,classes=chat:ttft=0.5,priority=-1+batch,order=deadline:ttft=5,tpot=1",
            {
                "policy": "always-swap", "classes": "chat:ttft=0.5,priority=-1+batch",
                "order": "deadline:ttft=5,tpot=1",
            },
        ),
        (
            "always-swap,allow_untested_states_v2=on,share_replicated_kv=on",
            {"policy": "always-swap", "allow_untested_states_v2": True, "share_replicated_kv": True},
        ),
        ("always-swap,link=1e9,0.001", {"policy": "always-swap", "link": "1e9,0.001"}),
        ("order=urgent,policy=always-swap", {"policy": "always-swap", "order": "urgent"}),
        ("python:mine:Own,weight=2,order=x", {"policy": "python:mine:Own,weight=2", "order": "x"}),
        ('{"policy": "python:mine:Own,order=x", "seed": 4}', {"policy": "python:mine:Own,order=x", "seed": 4}),
    ],
)  # fmt: skip
def test_a_line_is_cut_where_a_setting_begins(line: str, values: dict[str, Any]) -> None:
    assert read_line(line, "KVPOLICY") == values


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("always-swap,host_gib=much", "KVPOLICY: host_gib is 'much', should be a number"),
        ("always-swap,seed=1.5", "seed is '1.5', should be a whole number"),
        ("always-swap,shadow=yes", "shadow is 'yes', should be on or off"),
        ("always-swap,order=urgent,order=fcfs", "order is given twice"),
        ("always-swap,order=", "order is empty"),
        ('{"policy": "always-swap", "hostgib": 1}', "unknown key 'hostgib'; the keys are .*host_gib"),
        ('{"policy": ', "cannot be read as JSON"),
    ],
)
def test_what_is_wrong_is_named(line: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_line(line, "KVPOLICY")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("order=urgent", "KVPOLICY: key 'policy' is missing"),
        ("always-swap,order=fastest", "KVPOLICY: order .*fastest"),
        ("always-swap,host_gib=-1", "KVPOLICY: host_gib is -1.0, should be a number above 0"),
    ],
)
def test_values_are_checked_as_flags_are(line: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        server_settings(read_line(line, "KVPOLICY"), "KVPOLICY")


def test_a_limited_line_takes_no_other_settings() -> None:
    keys = ("policy", "order", "shadow")
    assert read_line("always-swap,shadow=on", "control", keys) == {"policy": "always-swap", "shadow": True}
    assert read_line("always-swap,host_gib=1", "control", keys) == {"policy": "always-swap,host_gib=1"}, (
        "what is no setting of the line belongs to the policy, which refuses it"
    )


def test_no_option_of_ours_has_the_name_of_a_setting() -> None:
    """Or a line would be cut within a value."""
    texts = [file.read_text() for name in ("order", "caching") for file in Path("kvpolicy", name).glob("*.py")]
    texts.append(Path("kvpolicy/request_marks.py").read_text())
    assert not set(spec.OPTIONS) & set(KEYS)
    for key in KEYS:
        assert not any(re.search(rf"[,:]{key}=[A-Z0-9]", text) for text in texts), key
