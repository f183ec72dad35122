"""Figures of a cost model: what they hold, and scales that fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from kvpolicy.reporting.figures import svg
from kvpolicy.reporting.model_figures import draw_calibration, draw_regret
from kvpolicy.reporting.model_section import Predicted


def predictions(lowest_s: float) -> list[Predicted]:
    return [
        Predicted("recompute", 300, 0.010, 0.011, 0.009, 0.013),
        Predicted("recompute", 900, 0.030, 0.028, 0.024, 0.033),
        Predicted("swap", 300, lowest_s, 0.004, 0.003, 0.005),
    ]


@pytest.mark.parametrize(("lowest_s", "scale"), [(0.005, "log"), (-0.001, "linear")])
def test_calibration_is_logarithmic_as_far_as_measurements_allow(lowest_s: float, scale: str) -> None:
    figure = draw_calibration(predictions(lowest_s))
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", scale)
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"recompute", "swap"}


def test_bars_of_regret_stand_side_by_side_in_milliseconds() -> None:
    cells = [[("short", 12, 0.002 * n, 0.0), ("long", 8, 0.004 * n, 0.0)] for n in (1, 2)]
    scores: Any = SimpleNamespace(policies=[SimpleNamespace(by_length=each, by_load=each) for each in cells])
    figure = draw_regret(scores, ("always-swap", "learned"))
    assert [round(bar.get_height(), 9) for bar in figure.axes[0].patches] == [2.0, 4.0, 4.0, 8.0]
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["short\n(12)", "long\n(8)"]
    assert svg(figure, "regret").count("<path") > 10
