"""What a client adds to a request's body."""

from __future__ import annotations

from typing import Any

import pytest

from kvpolicy.client import authorization, counters_in, request_body
from kvpolicy.errors import InputError
from kvpolicy.request_marks import ALL_TOKENS, Hints, Marks, read_marks


@pytest.mark.parametrize(
    ("said", "marks"),
    [
        ({"class_name": "chat", "ttft_s": 1.0, "tpot_s": 0.1}, Marks("chat", 0, 1.0, 0.1)),
        ({"keep_s": 60, "session": "s"}, Marks(hints=Hints(60.0, session="s"))),
        ({"once": True, "pin": 128}, Marks(hints=Hints(once=True, pin_tokens=128))),
        ({"pin": True}, Marks(hints=Hints(pin_tokens=ALL_TOKENS))),
        ({"session": "s", "ended": True}, Marks(hints=Hints(session="s", ended=True))),
    ],
)
def test_a_server_reads_what_a_client_says(said: dict[str, Any], marks: Marks) -> None:
    assert read_marks(request_body(**said)["kv_transfer_params"]["kvpolicy"]) == marks


@pytest.mark.parametrize("key", ["se\ncret", "se\x7fcret", "sécret", "se\rcret"])
def test_a_key_that_no_header_can_have_is_refused_and_not_shown(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(InputError, match=r"^OPENAI_API_KEY: should be one line of printable ASCII characters$"):
        authorization()


def test_nothing_said_adds_nothing() -> None:
    assert request_body() == {}


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"keep_s": 0}, "has a keep_s that is no number above 0"),
        ({"pin": -1}, "has a pin that is neither true or false nor a whole number above 0"),
        ({"once": True, "keep_s": 60}, "has a once that .* contradicts keep_s"),
        ({"session": "a b"}, "has a session that is not 1 to 64 letters"),
        ({"class_name": ""}, "has a class that is no name"),
    ],
)
def test_what_a_server_would_not_read_is_refused(said: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=f"what the request says of itself {problem}"):
        request_body(**said)


def test_counters_are_summed_over_their_labels() -> None:
    lines = (
        "# TYPE vllm:kvpolicy_a_total counter",
        'vllm:kvpolicy_a_total{engine="0"} 2.0',
        'vllm:kvpolicy_a_total{engine="1"} 3',
        "vllm:kvpolicy_a_created 1.7e9", 'vllm:kvpolicy_b_bucket{le="1"} 9', "vllm:e2e_request_latency_seconds_sum 7",
    )  # fmt: skip
    assert counters_in("\n".join(lines)) == {"vllm:kvpolicy_a_total": 5.0}
    assert counters_in("\n".join(lines), 'engine="1"') == {"vllm:kvpolicy_a_total": 3.0}
    assert counters_in("\n".join(lines), 'engine="1"', 'engine="0"') == {}
