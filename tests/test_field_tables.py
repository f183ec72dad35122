"""The tables of docs/own-policies.md have every field of the records that policies and orders are shown."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from kvpolicy import Feedback, Option, Preemption, Progress, View
from kvpolicy.events import Cause, Kind

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "own-policies.md").read_text()
UNITS = {"_s": "s", "_tokens": "tokens", "_blocks": "blocks", "_bytes": "bytes", "_requests": "requests"}


def table(record: type) -> list[list[str]]:
    """The cells of the first table below the record's name."""
    _, found, below = PAGE.partition(f"The fields of `kvpolicy.{record.__name__}`")
    assert found, record
    _, _, body = below.partition("| -- | -- | -- |\n")
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in body.partition("\n\n")[0].splitlines()]


@pytest.mark.parametrize("record", [Preemption, Option, Feedback, Progress, View])
def test_every_field_is_in_the_table_with_its_unit(record: type) -> None:
    rows = table(record)
    assert [name for name, _, _ in rows] == [f"`{field.name}`" for field in fields(record)]  # type: ignore[arg-type]
    assert all(meaning for _, _, meaning in rows)
    for name, unit, _ in rows:
        suffix = next((suffix for suffix in UNITS if name.strip("`").endswith(suffix)), None)
        assert unit in (UNITS.get(str(suffix)), "function") if suffix else unit, name
    none = {field.name for field in fields(record) if "None" in str(field.type) and "Callable" not in str(field.type)}  # type: ignore[arg-type]
    assert {name.strip("`") for name, _, meaning in rows if "None" in meaning} >= none


def test_what_follows_from_fields_is_named_too() -> None:
    for name in (name for name, member in vars(Preemption).items() if isinstance(member, property)):
        assert re.search(rf"`{name}`", PAGE.partition("Three more values follow")[2])
    meanings = {name: meaning for name, _, meaning in (*table(Preemption), *table(Option))}
    assert all(f"`{cause}`" in meanings["`cause`"] for cause in get_args(Cause))
    assert all(f"`{kind}`" in meanings["`kind`"] for kind in get_args(Kind))
