"""A cost model judged on a report's traces: calibration on unseen states, and what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy.reporting.model_section import OWN, Predicted, coverage, learned
from tests.synthetic import make_trace


def predicted(measured_s: float) -> Predicted:
    return Predicted("swap", 500, measured_s, 0.010, 0.008, 0.012)


def test_coverage_is_the_share_inside_the_interval() -> None:
    share, low, high = coverage([predicted(0.008), predicted(0.011), predicted(0.012), predicted(0.013)])
    assert share == 0.75
    assert 0 < low < 0.75 < high < 1


def test_a_model_trained_on_the_traces_is_judged_on_the_rest(tmp_path: Path) -> None:
    make_trace(states=60, repeats=2).write(tmp_path / "trace")
    judged = learned([tmp_path / "trace"], None, seed=0)
    assert (judged.model, judged.lacking) == (OWN, ())
    assert {prediction.kind for prediction in judged.calibration} == {"recompute", "swap"}
    assert 20 <= len(judged.calibration) / 2 < 60, "held-out states alone"
    assert coverage(judged.calibration)[0] > 0.7
    assert judged.boundary is not None and judged.scores is not None


def test_too_few_states_lack_a_model_and_say_why(tmp_path: Path) -> None:
    make_trace(states=3, repeats=1).write(tmp_path / "trace")
    judged = learned([tmp_path / "trace"], None, seed=0)
    (reason,) = judged.lacking
    assert reason.startswith("no cost model can be trained on these traces: ")
    assert (judged.boundary, judged.calibration, judged.scores) == (None, (), None)


@pytest.mark.parametrize("measured_s", [0.0079, 0.0121])
def test_a_cost_outside_its_interval_is_not_covered(measured_s: float) -> None:
    assert not predicted(measured_s).inside
