"""Marks of a server's requests: read once, whatever was sent, counted and forgotten."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy.request_marks import KEY, REASONS, Classes, Client, HintLimits, Hints, Marks, as_said, granting
from kvpolicy_vllm.plugin.marks import MarkReader, client_of
from kvpolicy_vllm.plugin.observers import Tally

CLASSES = Classes.parse("chat:ttft=0.5")


def request(said: Any = None, name: str = "r", priority: int = 0, **more: Any) -> Any:
    parameters = None if said is None else {KEY: said, "do_remote_prefill": False}
    return SimpleNamespace(request_id=name, priority=priority, kv_transfer_params=parameters, **more)


def hints(payload: Any, kind: str = KEY, version: str = "1") -> Any:
    action = SimpleNamespace(action_id="a", action_type=kind, action_version=version, payload=payload)
    other = SimpleNamespace(action_id="b", action_type="prefetch", action_version="9", payload={})
    return SimpleNamespace(protocol_version="1", message_id="m", actions=[other, action])


def reader() -> tuple[MarkReader, Tally]:
    tally = Tally()
    return MarkReader(CLASSES.grant, tally), tally


def test_what_a_request_is_is_read_once_and_forgotten_at_its_end() -> None:
    marks, tally = reader()
    one = request({"class": "chat", "ttft_s": 0.1})
    assert marks.of(one) == Marks("chat", 0, 0.5)
    one.kv_transfer_params[KEY]["class"] = "changed"
    assert marks.of(one).class_name == "chat" and len(marks) == 1
    assert tally.totals == {"clamped_marks|mark=ttft_s": 1}
    marks.forget(one)
    marks.forget(one)
    assert len(marks) == 0


def test_what_was_read_is_read_anew_once_more_is_granted() -> None:
    marks = MarkReader(Classes().grant, Tally())
    one, unmarked = request({"class": "chat"}), request(name="unmarked")
    assert marks.of(one).class_name == "default" and marks.of(unmarked) == Marks()
    marks.grant_by(Classes.parse("chat:ttft=0.5+default:ttft=2").grant)
    assert marks.of(one) == Marks("chat", 0, 0.5) and marks.of(unmarked) == Marks("default", 0, 2.0)


def test_its_row_has_what_was_granted() -> None:
    """So no text that a client sent gets into a trace, but for the names that an operator listed."""
    marks, _ = reader()
    row = {"class_name": "chat", "priority": -3, "ttft_deadline_s": 0.5, "tpot_deadline_s": None}
    assert marks.columns(request({"class": "chat"}, priority=-3)) == row
    assert marks.columns(request({"class": "Jane Doe"}, "s"))["class_name"] == "default"


class Evil:
    """Raises whatever is asked of it."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (request("x" * 10**7), "type"),
        (request({"class": "chat", "a|b=c\n": 1}), "key"),
        (request({"class": b"chat"}), "class"),
        (request({"ttft_s": float("nan")}), "ttft_s"),
        (request({"tpot_s": True}), "tpot_s"),
        (request(kv_hints=hints({"class": "chat"}, version="2")), "version"),
        (request(kv_hints=Evil()), "error"),
        (request(kv_hints=hints({"klass": "chat"})), "key"),
    ],
)
def test_what_cannot_be_read_is_counted_and_logged_once(
    sent: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The request is of the default class then. Nothing that a client sent gets into a log or a label."""
    marks, tally = reader()
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            sent.request_id = str(number)
            assert marks.of(sent) == Marks()
    assert tally.totals == {f"invalid_marks|reason={reason}": 3}
    assert len(caplog.records) == 1 and REASONS[reason] in caplog.text and len(caplog.text) < 500


@pytest.mark.parametrize("parameters", ["text", ["list"], 7, {}, {"other": {"class": "chat"}}])
def test_parameters_without_marks_say_nothing(parameters: Any) -> None:
    marks, tally = reader()
    sent = request()
    sent.kv_transfer_params = parameters
    assert marks.of(sent) == Marks() and tally.totals == {}


def test_a_hint_of_the_servers_own_process_goes_before_the_clients_marks() -> None:
    marks, _ = reader()
    assert marks.of(request({"class": "default"}, kv_hints=hints({"class": "chat"}))).class_name == "chat"
    assert marks.of(request({"class": "chat"}, "s", kv_hints=hints({}, "prefetch"))).class_name == "chat"
    assert marks.of(request({"class": "chat"}, "t", kv_hints=None)).class_name == "chat"


def test_hints_about_kv_come_with_either_and_are_cut_to_what_is_granted() -> None:
    tally = Tally()
    marks = MarkReader(granting(CLASSES, HintLimits(60.0)), tally)
    sent = {"keep_s": 90.0, "session": "s"}
    assert (
        marks.of(request(sent)).hints
        == marks.of(request(None, "s", kv_hints=hints(sent))).hints
        == Hints(60.0, session="s")
    )
    assert tally.totals == {"clamped_marks|mark=keep_s": 2}
    assert marks.of(request({"pin": "all"}, "t")).hints == Hints()
    assert tally.totals["invalid_marks|reason=pin"] == 1


def test_a_simulation_grants_everything() -> None:
    marks = MarkReader(as_said, Tally())
    assert marks.of(request({"class": "my class", "tpot_s": 1e-6}, priority=-9)) == Marks("my class", -9, None, 1e-6)


def test_a_client_is_a_class_and_a_salt_which_nothing_shows() -> None:
    one, same, other, plain = (
        client_of(request(cache_salt=salt), Marks("chat")) for salt in ("tenant-1", "tenant-1", "tenant-2", None)
    )
    assert one == same and one != other and plain == Client("chat") != one
    assert client_of(request(cache_salt="tenant-1"), Marks("batch")) != one
    assert repr(one) == "Client(class_name='chat')" and b"tenant" not in one.salt


def test_whatever_vllm_takes_for_a_salt_makes_a_client() -> None:
    """Versions before 0.29 take one of any length, as JSON has it."""
    half, long = (client_of(request(cache_salt=salt), Marks()) for salt in ("\ud800", "x" * 10**6))
    assert half != long and len(half.salt) == len(long.salt) == 16
