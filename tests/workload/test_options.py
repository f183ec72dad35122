"""Options of a workload's text: each is read once, wrong ones are named."""

from __future__ import annotations

from math import inf

import pytest

from kvpolicy.workload import WorkloadError
from kvpolicy.workload.options import Options


def options(tail: str) -> Options:
    return Options(f"file.csv?{tail}", tail)


def test_an_option_is_read_once() -> None:
    choices = options("rate=2.5&n=30")
    assert "rate" in choices
    assert (choices.real("rate"), choices.real("rate"), choices.real("rate", 1.0)) == (2.5, None, 1.0)
    assert "rate" not in choices
    assert choices.whole("n") == 30
    choices.refuse_rest()


@pytest.mark.parametrize(("text", "value"), [("true", True), ("ON", True), ("1", True), ("no", False), ("off", False)])
def test_flags(text: str, value: bool) -> None:
    assert options(f"sort={text}").flag("sort") is value


@pytest.mark.parametrize(("text", "window_s"), [("0-600", (0.0, 600.0)), ("600-", (600.0, inf)), ("1.5-2", (1.5, 2.0))])
def test_windows(text: str, window_s: tuple[float, float]) -> None:
    assert options(f"window={text}").window("window") == window_s


@pytest.mark.parametrize(
    ("method", "value", "should"),
    [
        ("real", "fast", "a number"),
        ("real", "nan", "a number"),
        ("real", "1_000", "a number"),
        ("whole", "-1", "a whole number, 0 or more"),
        ("whole", "1.0", "a whole number, 0 or more"),
        ("whole", "²", "a whole number, 0 or more"),
        ("whole", "9" * 16, "a whole number, 0 or more"),
        ("signed", "1.5", "a whole number"),
        ("signed", "--1", "a whole number"),
        ("flag", "maybe", "true or false"),
        ("window", "600", "START-END in seconds"),
        ("window", "5-5", "START-END in seconds"),
        ("window", "a-b", "START-END in seconds"),
    ],
)
def test_a_wrong_value_is_named_with_what_it_should_be(method: str, value: str, should: str) -> None:
    with pytest.raises(WorkloadError, match=rf"^file\.csv\?x={value}: x={value}: should be {should}"):
        getattr(options(f"x={value}"), method)("x")


@pytest.mark.parametrize(("text", "value"), [("-3", -3), ("0", 0), ("12", 12)])
def test_whole_numbers_of_either_sign(text: str, value: int) -> None:
    assert options(f"x={text}").signed("x") == value
    assert options("y=1").signed("x") is None


def test_a_seed_of_its_own_goes_before_the_one_that_is_given() -> None:
    assert Options("a?seed=3", "seed=3", 7).seed() == 3
    assert Options("a?n=3", "n=3", 7).seed() == 7


def test_options_are_added_unless_they_are_there() -> None:
    choices = options("n=1")
    choices.add({"rate": "2"})
    assert choices.real("rate") == 2.0
    with pytest.raises(WorkloadError, match=r"^file\.csv\?n=1: n=1: should be left out of a part with a share"):
        choices.add({"n": "5"})


def test_a_missing_value_is_named() -> None:
    with pytest.raises(WorkloadError, match=r"^file\.csv\?n=1: rate: should be given"):
        options("n=1").needed("rate")


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        ("rate", "'rate': options are written NAME=VALUE"),
        ("=3", "'=3': options are written NAME=VALUE"),
        ("rate=", "'rate=': options are written NAME=VALUE"),
        ("rate=1&rate=2", "rate is given twice"),
    ],
)
def test_a_tail_that_is_no_list_of_options_is_refused(tail: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        options(tail)


def test_an_unread_option_is_refused_with_those_there_are() -> None:
    choices = options("n=1&speed=2")
    choices.whole("n")
    choices.text("rate")
    with pytest.raises(WorkloadError, match="speed is no option of this workload; those are n, rate"):
        choices.refuse_rest()
