"""Marks of requests: what a client may send, what an operator grants, and that nobody gets more than that."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvpolicy.fields import WrongValue
from kvpolicy.request_marks import (
    ALL_TOKENS,
    MAX_DEADLINE_S,
    REASONS,
    Classes,
    ClassLimits,
    HintLimits,
    Hints,
    InvalidMarks,
    Marks,
    as_said,
    granting,
    read_marks,
)

LISTED = Classes.parse("interactive:ttft=0.5,tpot=0.05,priority=-1+batch:priority=5+other")
NESTED: dict[str, Any] = {}
for _ in range(5000):
    NESTED = {"class": NESTED}


@pytest.mark.parametrize(
    ("said", "marks"),
    [
        (None, Marks()),
        ({}, Marks()),
        ({"class": "chat"}, Marks("chat")),
        ({"class": "chat", "ttft_s": 1, "tpot_s": 0.05}, Marks("chat", 0, 1.0, 0.05)),
        ({"class": None, "ttft_s": None, "tpot_s": None}, Marks()),
        ({"keep_s": 60}, Marks(hints=Hints(60.0))),
        ({"once": True, "pin": 512}, Marks(hints=Hints(once=True, pin_tokens=512))),
        ({"pin": True, "keep_s": 5, "once": True}, Marks(hints=Hints(5.0, True, ALL_TOKENS))),
        ({"pin": 10**30}, Marks(hints=Hints(pin_tokens=ALL_TOKENS))),
        ({"session": "user-7.a", "ended": True}, Marks(hints=Hints(session="user-7.a", ended=True))),
        ({"keep_s": None, "once": None, "pin": None, "session": None, "ended": None}, Marks()),
        ({"once": False, "pin": False, "ended": False}, Marks()),
    ],
)
def test_what_is_said_is_read(said: Any, marks: Marks) -> None:
    assert read_marks(said) == marks == as_said(read_marks(said))[0]
    assert read_marks(said, -3).priority == -3
    assert read_marks(marks.hints.said()).hints == marks.hints and all(marks.hints.said().values())


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("chat", "type"),
        (["class"], "type"),
        (True, "type"),
        ({"klass": "chat"}, "key"),
        ({"class": "chat", "priority": -1}, "key"),
        ({"class": "chat", "ttft_s": 1.0, "tpot_s": 1.0, "more": 1}, "key"),
        ({"keep_s": 0}, "keep_s"),
        ({"keep_s": "60"}, "keep_s"),
        ({"keep_s": float("inf")}, "keep_s"),
        ({"once": 1}, "once"),
        ({"once": True, "keep_s": 5}, "once"),
        ({"pin": 0}, "pin"),
        ({"pin": -1}, "pin"),
        ({"pin": 1.5}, "pin"),
        ({"pin": "all"}, "pin"),
        ({"session": ""}, "session"),
        ({"session": "a b"}, "session"),
        ({"session": "x" * 65}, "session"),
        ({"session": 7}, "session"),
        ({"ended": "yes"}, "ended"),
        ({"ended": True, "keep_s": 5}, "ended"),
        ({7: "chat"}, "key"),
        (dict.fromkeys(range(100_000)), "key"),
        ({"class": 7}, "class"),
        ({"class": ""}, "class"),
        ({"class": ["chat"]}, "class"),
        (NESTED, "class"),
        ({"ttft_s": "1"}, "ttft_s"),
        ({"ttft_s": True}, "ttft_s"),
        ({"ttft_s": 0}, "ttft_s"),
        ({"ttft_s": -1.0}, "ttft_s"),
        ({"ttft_s": float("nan")}, "ttft_s"),
        ({"ttft_s": float("inf")}, "ttft_s"),
        ({"ttft_s": 10**400}, "ttft_s"),
        ({"tpot_s": NESTED}, "tpot_s"),
        ({"tpot_s": 1j}, "tpot_s"),
    ],
)
def test_what_cannot_be_read_has_a_reason(said: Any, reason: str) -> None:
    with pytest.raises(InvalidMarks, match=REASONS[reason]) as told:
        read_marks(said)
    assert told.value.reason == reason


@pytest.mark.parametrize(
    ("said", "granted", "vain"),
    [
        (Marks(), Marks(), ()),
        (Marks("interactive"), Marks("interactive", -1, 0.5, 0.05), ()),
        (Marks("interactive", -9, 0.1, 0.01), Marks("interactive", -1, 0.5, 0.05), ("ttft_s", "tpot_s", "priority")),
        (Marks("interactive", 3, 2.0, 0.5), Marks("interactive", 3, 2.0, 0.5), ()),
        (Marks("interactive", 0, 1e300), Marks("interactive", -1, MAX_DEADLINE_S, 0.05), ("ttft_s",)),
        (Marks("batch", 0, 0.1), Marks("batch", 5), ("ttft_s",)),
        (Marks("batch", 3), Marks("batch", 5), ("priority",)),
        (Marks("batch", 7), Marks("batch", 7), ()),
        (Marks("other", -1000), Marks("other"), ("priority",)),
        (Marks("urgent", -1000, 0.1), Marks(), ("class", "ttft_s", "priority")),
        (Marks("x" * 10**7), Marks(), ("class",)),
        (Marks("interactive\nfaked 1"), Marks(), ("class",)),
        (Marks("default", 2), Marks("default", 2), ()),
    ],
)
def test_what_an_operator_grants(said: Marks, granted: Marks, vain: tuple[str, ...]) -> None:
    assert LISTED.grant(said) == (granted, vain)


def test_without_a_list_there_is_one_class_without_deadlines() -> None:
    """A priority is vLLM's own affair until an operator bounds it."""
    assert Classes().grant(Marks("chat", -7, 0.1, 0.1)) == (Marks(priority=-7), ("class", "ttft_s", "tpot_s"))
    assert Classes.parse("chat").grant(Marks("chat", -7)) == (Marks("chat", -7), ())


def test_the_default_class_may_be_bounded_too() -> None:
    classes = Classes.parse("default:ttft=2,priority=1+chat")
    assert classes.grant(Marks(priority=-5)) == (Marks("default", 1, 2.0), ("priority",))
    assert classes.grant(Marks("nobody", 0, 1.0)) == (Marks("default", 1, 2.0), ("class", "ttft_s"))


def test_nobody_is_more_urgent_than_its_class() -> None:
    """Over drawn lists and claims: listed names alone, no deadline below the class's, no priority below it."""
    rng = random.Random(1)
    for _ in range(2000):
        limits = {
            name: ClassLimits(rng.choice((None, rng.random())), rng.choice((None, rng.random())), rng.randint(-3, 3))
            for name in rng.sample(("a", "b", "c", "default"), 3)
        }
        said = Marks(
            rng.choice(("a", "b", "c", "d", "default")), rng.randint(-9, 9), rng.choice((None, rng.random())),
            rng.choice((None, rng.random())),
        )  # fmt: skip
        granted, _ = Classes(tuple(limits.items())).grant(said)
        limit = limits.get(granted.class_name, ClassLimits(priority=0))
        assert granted.class_name in {*limits, "default"}
        assert granted.priority >= (limit.priority or 0)
        for given, least in ((granted.ttft_s, limit.ttft_s), (granted.tpot_s, limit.tpot_s)):
            assert given is None if least is None else given is not None and given >= least


def test_a_list_is_read() -> None:
    assert LISTED.names == ("interactive", "batch", "other") and LISTED.bounds_priority
    assert LISTED.limits[0] == ("interactive", ClassLimits(0.5, 0.05, -1))
    assert Classes.parse("a + b:ttft=1").names == ("a", "b") and not Classes.parse("a+b").bounds_priority
    assert LISTED.text == "interactive:ttft=0.5,tpot=0.05,priority=-1+batch:priority=5+other"
    by_hand = Classes((("a", ClassLimits(1e-5, None, 0)), ("b", ClassLimits(None, 3.0))))
    assert Classes.parse(by_hand.text) == by_hand


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "has the class ''"),
        ("a+", "has the class ''"),
        ("a b", "has the class 'a b', should be 1 to 64 letters"),
        ("x" * 65, "should be 1 to 64 letters"),
        ("a+a", "has a twice"),
        ("a:ttft", "has ttft in a, should be seconds"),
        ("a:ttft=1,ttft=2", "each at most once"),
        ("a:speed=1", "has 'speed=1' in a"),
        ("a:ttft=0", "has ttft=0 in a, should be seconds above 0, up to 86400"),
        ("a:tpot=nan", "has tpot=nan in a, should be seconds"),
        ("a:tpot=1e9", "has tpot=1e9 in a, should be seconds"),
        ("a:tpot=x", "has tpot=x in a, should be seconds"),
        ("a:priority=1.5", "has priority=1.5 in a, should be a whole number"),
        ("a:priority=1_0", "should be a whole number"),
    ],
)
def test_a_list_that_is_wrong_is_named(text: str, named: str) -> None:
    with pytest.raises(WrongValue, match="the form is NAME:ttft=SECONDS") as told:
        Classes.parse(text)
    assert named in str(told.value)


def test_hints_are_cut_to_what_the_operator_allows() -> None:
    grant = granting(Classes.parse("chat:priority=0"), HintLimits(60.0))
    said = Marks("chat", -1, hints=Hints(3600.0, pin_tokens=7, session="s"))
    assert grant(said) == (Marks("chat", 0, hints=Hints(60.0, pin_tokens=7, session="s")), ("priority", "keep_s"))
    assert grant(Marks(hints=Hints(60.0))) == (Marks(hints=Hints(60.0)), ())
    assert Classes().grant(said)[0].hints == Hints(), "by itself a list of classes grants no hints"


def test_no_more_is_pinned_than_the_prompt() -> None:
    """What follows it is the answer."""
    assert [Hints(pin_tokens=tokens).of_prompt(96).pin_tokens for tokens in (0, 96, 97, ALL_TOKENS)] == [0, 96, 96, 96]


def test_an_operator_may_refuse_all_that_holds_memory() -> None:
    none = HintLimits.parse("none")
    assert none.grant(Hints(5.0, True, 7, "s")) == (Hints(None, True, 7, "s"), ("keep_s", "pin"))
    assert none.grant(Hints(once=True, ended=True)) == (Hints(once=True, ended=True), ())
    assert none.text == "none"


def test_limits_of_hints_are_read() -> None:
    limits = HintLimits.parse("keep=60, share=0.4,class=0.1")
    assert limits == HintLimits(60.0, 0.4, 0.1) == HintLimits.parse(limits.text)
    assert HintLimits.parse("share=0.1") == HintLimits(600.0, 0.1, 0.1), "a class has no more than all have"
    limits = HintLimits.parse("class=0.2,client=0.05")
    assert limits == HintLimits(600.0, 0.5, 0.2, 0.05) == HintLimits.parse(limits.text)
    assert limits.text == "keep=600.0,share=0.5,class=0.2,client=0.05"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "has ''"),
        ("keep", "has 'keep', should be a number"),
        ("keep=0", "has keep=0, should be above 0, up to 86400 seconds"),
        ("keep=nan", "should be above 0, up to 86400 seconds"),
        ("share=1", "has share=1, should be a share above 0, up to 0.9"),
        ("class=0", "has class=0, should be a share"),
        ("share=nan", "should be a share"),
        ("pin=1", "has 'pin=1'; the options are keep, share, class, client, each"),
        ("client=0", "has client=0, should be a share above 0, up to that of a class, 0.25"),
        ("class=0.1,client=0.2", "has client=0.2, should be a share above 0, up to that of a class, 0.1"),
        ("share=0.1,client=0.2", "has client=0.2, should be a share above 0, up to that of a class, 0.1"),
        ("client=nan", "has client=nan, should be a share"),
        ("client=x", "has 'client=x', should be a number"),
        ("keep=1,keep=2", "each at most once"),
    ],
)
def test_limits_of_hints_that_are_wrong_are_named(text: str, named: str) -> None:
    with pytest.raises(WrongValue, match="the form is keep=SECONDS") as told:
        HintLimits.parse(text)
    assert named in str(told.value)
