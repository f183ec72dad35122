"""Coverage of intervals on held-out states, by bin."""

from __future__ import annotations

import pytest

from kvpolicy.cost.intervals import (
    calibrate,
)
from kvpolicy.training.coverage import coverage
from tests.cost.score_samples import spread


def test_coverage_is_reported_by_bin_with_the_number_of_states() -> None:
    intervals = calibrate([*spread(40, 0.1), *spread(900, 0.3)])
    shares = coverage(intervals, [0, 0, 0, 1], [True, True, False, True])
    assert (shares["states"], shares["holds"]) == (4, 0.75)
    first, second = shares["bins"]
    assert (first["states"], first["holds"], first["tokens_below"]) == (3, pytest.approx(2 / 3), 900)
    assert (second["states"], second["holds"], second["tokens_from"]) == (1, 1.0, 900)
    assert second["low"] == pytest.approx(0.025)
    empty = coverage(intervals, [0], [True])["bins"][1]
    assert (empty["states"], empty["holds"], empty["low"], empty["high"]) == (0, None, 0.0, 1.0)
