"""What the support matrix says of a test is what the test is marked with. Seen of those that are collected with this
one: the marks of parameters are not known before."""

from __future__ import annotations

import pytest

from tests.feature_record import MARKS, RECORD, read, unbacked


def test_every_recorded_feature_is_still_marked(request: pytest.FixtureRequest) -> None:
    rows, marks = read(RECORD), request.config.stash[MARKS]
    if not marks.keys() & {row["test"] for row in rows}:
        pytest.skip("no test of the record was collected beside this one")
    assert not unbacked(rows, marks), "record these tests again: python -m pytest -p tests.feature_record TEST..."
