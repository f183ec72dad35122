"""Figures by name: which field of a result, and whether more is better."""

from __future__ import annotations

from typing import Any

import pytest

from kvpolicy.errors import InputError
from kvpolicy.fields import WrongValue
from kvpolicy.study.figure import Figure, names_figure

RESULT: dict[str, Any] = {
    "inputs": {"workload": "w"},
    "e2e_s": {"mean": 3.0, "p50": 2.0, "p99": 9.0},
    "itl_s": {"mean": None, "p50": None, "p99": None},
    "throughput_tok_s": 50.0,
    "classes": {"urgent": {"longest_gap_s": {"mean": 1.0, "p50": 0.5, "p99": 4.0}, "slo_share": 0.75}},
}


@pytest.mark.parametrize(
    ("text", "value", "more_is_better", "unit"),
    [
        ("e2e", 3.0, False, "s"),
        ("e2e.p50", 2.0, False, "s"),
        ("throughput", 50.0, True, "tokens/s"),
        ("gap.p99:urgent", 4.0, False, "s"),
        ("gap:urgent", 1.0, False, "s"),
        ("slo:urgent", 0.75, True, "of the requests"),
    ],
)
def test_figures_by_name(text: str, value: float, more_is_better: bool, unit: str) -> None:
    figure = Figure.parse(text)
    assert (figure.of(RESULT), figure.more_is_better, figure.unit) == (value, more_is_better, unit)
    assert names_figure(text)


@pytest.mark.parametrize("text", ["", "speed", "e2e.p95", "e2e.", "throughput.p99", "ttft:", "throughput:", ":urgent"])
def test_other_names_are_refused(text: str) -> None:
    assert not names_figure(text)
    with pytest.raises(WrongValue, match="should be one of e2e, ttft, itl, gap, per-token"):
        Figure.parse(text)


def test_what_a_run_does_not_have_is_named() -> None:
    with pytest.raises(InputError, match=r"workload w: its runs have no itl_s.p99, so that they cannot be compared"):
        Figure.parse("itl.p99").of(RESULT)
    with pytest.raises(InputError, match="has no class 'batch' to compare by; it has urgent"):
        Figure.parse("e2e:batch").of(RESULT)


@pytest.mark.parametrize(("text", "values"), [("slo", {"slo_share": 0.0}), ("ttft", {"ttft_s": {"mean": 0.0}})])
def test_what_is_0_has_no_ratio(text: str, values: dict[str, Any]) -> None:
    with pytest.raises(WrongValue, match=rf"judge_by is {text}, which is 0 in a run of workload w"):
        Figure.parse(text).of(RESULT | values)
