"""Values of files in JSON: what has the right type is returned, anything else is refused by its path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvpolicy.errors import InputError
from kvpolicy.stored_values import FieldMissing, list_at, number_at, object_at, text_at, value_at, whole_at

VALUES = {"a": {"n": 3, "x": 0.5, "s": "text", "l": [1], "none": None, "yes": True, "negative": -1}}


def test_what_has_the_right_type_is_returned() -> None:
    assert object_at(VALUES, "a") is VALUES["a"]
    assert (whole_at(VALUES, "a", "n"), number_at(VALUES, "a", "x"), number_at(VALUES, "a", "n")) == (3, 0.5, 3.0)
    assert (text_at(VALUES, "a", "s"), list_at(VALUES, "a", "l"), value_at(VALUES, "a", "none")) == ("text", [1], None)


@pytest.mark.parametrize(
    ("reader", "field", "message"),
    [
        (object_at, "l", r"a\.l is \[1\], should be an object"),
        (list_at, "s", r"a\.s is 'text', should be a list"),
        (text_at, "n", r"a\.n is 3, should be a text"),
        (number_at, "yes", r"a\.yes is True, should be a finite number"),
        (number_at, "none", r"a\.none is None, should be a finite number"),
        (whole_at, "x", r"a\.x is 0\.5, should be a whole number"),
        (whole_at, "negative", r"a\.negative is -1, should be a whole number"),
        (whole_at, "yes", r"a\.yes is True, should be a whole number"),
        (value_at, "gone", r"field a\.gone is missing"),
    ],
)
def test_anything_else_is_refused_by_its_path(reader: Callable[..., Any], field: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        reader(VALUES, "a", field)


def test_numbers_are_finite() -> None:
    for number in (float("nan"), float("inf")):
        with pytest.raises(InputError, match="should be a finite number"):
            number_at({"x": number}, "x")


def test_something_on_the_way_that_is_no_object_is_named() -> None:
    with pytest.raises(InputError, match=r"field a\.n is 3, should be an object with the field deeper"):
        value_at(VALUES, "a", "n", "deeper")
    with pytest.raises(InputError, match=r"is 7, should be an object with the field a"):
        value_at(7, "a")
    with pytest.raises(FieldMissing) as missing:
        value_at(VALUES, "b", "c")
    assert missing.value.field == "b"
