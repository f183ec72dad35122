"""A trace with one row changed."""

from __future__ import annotations

from typing import Any

from kvpolicy.trace import Trace
from tests.synthetic import changed


def with_change(made: Trace, table: str, number: int, **changes: Any) -> Trace:
    rows = made.rows(table)
    rows[number] |= changes
    return changed(made, table, rows)
