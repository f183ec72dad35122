"""What the accuracy benchmark counts over all tables, by hand."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from tests.test_benchmarks import ROOT


def test_cost_accuracy_counts_bins_and_tables_beyond_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    accuracy = import_module("cost_accuracy")

    def table(file: str, far: float | None, *bins: tuple[int, float, bool]) -> dict[str, Any]:
        score = {} if far is None else {"from_2x": {"n": 10, "mean": far}}
        coverage = [{"n": n, "covered": covered, "bounded": bounded} for n, covered, bounded in bins]
        return {"file": file, "extrapolated": {"families": {accuracy.OURS: score}, "coverage": coverage}}

    small, unbounded = (29, 0.1, True), (40, 1.0, False)
    tables = [
        table("a", 0.10, (30, 0.85, True), small, unbounded),
        table("a", 0.16, (30, 0.84, True)),
        table("b", 0.12, (300, 0.99, True)),
        table("c", None, (30, 0.90, True)),
        {"file": "d", "extrapolated": None},
    ]
    found = accuracy.beyond_range(tables)
    assert (found["bins"], found["bins_that_hold"]) == (4, 3)
    assert found["error_from_2x"] == {"a": pytest.approx(0.13), "b": 0.12} and found["tables_within"] == 1
    bins, within = accuracy.beyond_words(found)
    assert bins.endswith("3 of 4, 75.0%; bar 90%: missed") and within.endswith("1 of 2, 50.0%; bar 75%: missed")
    assert len(accuracy.missed_bars({"beyond": found, "files": [], "traces": []})) == 2
    assert accuracy.beyond_words(found | {"bins_that_hold": 4})[0].endswith("met")
    assert accuracy.beyond_range([tables[-1]]) is None
