"""Every figure of a report is drawn, the same at every run."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest

from kvpolicy.overflow import FIGURES
from kvpolicy.reporting.findings import missing
from kvpolicy.reporting.measurements import Mark, material
from tests.reporting.measured_runs import relabelled, served_run, with_runs
from tests.synthetic import make_trace


def test_every_figure_can_be_drawn() -> None:
    pytest.importorskip("matplotlib")
    figures = import_module("kvpolicy.reporting.figures")
    marks = (Mark(0.5, "swap"), Mark(0.7, "recompute"))
    runs = [
        served_run(figure=figure, level=level, arm=arm, repeat=repeat, preempted=marks, resumed=marks)
        for figure, level in (("memory", 10), ("memory", 30), ("timeline", 12))
        for arm in ("recompute", "swap", "learned")
        for repeat in range(2)
    ]
    trace = make_trace(states=6, repeats=2, block_sizes=(32, 64))
    rows = trace.rows("decisions", ("state_id", "block_size"))
    sizes = material(relabelled(trace, {row["state_id"]: f"block-size/{row['block_size']}" for row in rows}))
    evicted = material(relabelled(trace, {row["state_id"]: f"evicted-tokens/{row['block_size']}" for row in rows}))
    every = replace(with_runs(*runs), overflows=(*material(trace).overflows, *sizes.overflows, *evicted.overflows))
    for figure in FIGURES:
        assert not missing(every, figure)
        once, again = (figures.svg(figures.draw(every, figure), figure) for _ in range(2))
        assert once == again and once.count("<path") > 10, figure
    assert "tokens evicted in one overflow" in figures.svg(figures.draw(every, "evicted-tokens"), "a")
