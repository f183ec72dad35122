"""The noise floor of a dataset: self-checks and errors of step times, in lines for the reader."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvpolicy.datasets.profiles import dataset_of
from kvpolicy.trace import Trace, TraceError
from tests.synthetic import make_trace
from tests.synthetic_steps import with_steps

Row = dict[str, Any]
CHECK: Row = {
    "arm": "swap", "block_size": 32, "pairs": 10, "attributed_s": 0.0249, "low_s": 2e-3, "high_s": 7e-3,
    "verdict": "disagrees",
}  # fmt: skip


def with_noise(noise: Row) -> Trace:
    trace = make_trace(states=20)
    headers = {core: replace(header, noise=noise) for core, header in trace.headers.items()}
    return Trace(headers, trace.tables)


def test_checks_that_did_not_pass_are_listed_once() -> None:
    noise = {"variation": 0.03, "self_check": [CHECK, CHECK | {"arm": "recompute", "verdict": "agrees"}]}
    lines = dataset_of({"made": with_noise(noise)}).floor.lines()
    assert lines[0] == (
        "self-check of swap, blocks of 32: failed: costs of 24.9 ms on average, control runs measured +2 to +7 ms more "
        "(95%, 10 pairs)"
    )
    assert not [line for line in lines if "recompute" in line]
    assert len(lines) == 2
    lines = dataset_of({"made": with_noise(noise | {"self_check": [CHECK | {"verdict": "cannot tell"}]})}).floor.lines()
    assert ": undecided (too noisy to confirm these costs or to refute them): costs of 24.9 ms" in lines[0]
    undecided = CHECK | {"verdict": "cannot tell", "pairs": 3, "low_s": None, "high_s": None}
    lines = dataset_of({"made": with_noise(noise | {"self_check": [undecided]})}).floor.lines()
    assert lines[0] == "self-check of swap, blocks of 32: undecided, 3 pairs with control runs are too few"


def test_a_missing_self_check_and_missing_step_times_are_listed() -> None:
    lines = dataset_of({"made": make_trace(states=20)}).floor.lines()
    assert "self-check: none in core-made-32, core-made-64" in lines[0]
    assert "step times: too few undisturbed steps" in lines[1]


def test_the_step_time_models_error_is_the_floor() -> None:
    data = dataset_of({"made": with_steps(make_trace(states=20))})
    assert set(data.step_times) == set(data.headers)
    worst = max(model.error.mean_s for model in data.step_times.values())
    assert f"{1e3 * worst:.3g} ms on held-out undisturbed steps: the noise floor" in data.floor.lines()[-1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("passed", r"noise.self_check is 'passed', should be a list"),
        ([{}], r"noise.self_check\[0\].arm is missing"),
        ([CHECK | {"verdict": "fine"}], r"noise.self_check\[0\].verdict is 'fine', should be one of agrees"),
        ([CHECK | {"attributed_s": "3"}], r"noise.self_check\[0\].attributed_s is '3', should be a number"),
    ],
)
def test_a_self_check_that_cannot_be_read_is_named(given: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        dataset_of({"made": with_noise({"variation": 0.03, "self_check": given})})
