"""Fits of step times: known laws are found, with noise and outliers, and whichever steps are left out."""

from __future__ import annotations

import numpy as np
import pytest

from kvpolicy.attribution.offline import attribute, step_time_models
from kvpolicy.attribution.step_time_fit import PARTS, fit_step_time, with_aftermath
from tests.attribution.step_rows import (
    DECODE_S,
    FIXED_S,
    PAIR_S,
    READ_S,
    TOKEN_S,
    Row,
    calm_steps,
    costs,
    law,
    one_after_another,
    outcome,
    repeated,
    step,
    trace_of_cores,
    transfer,
)


def test_fit_recovers_a_known_law() -> None:
    rows = calm_steps(600, np.random.default_rng(1))
    model = step_time_models(trace_of_cores({"a": {"steps": rows}}))["a"]
    assert model.fixed_s == pytest.approx(FIXED_S, rel=1e-6)
    assert model.per_part_s == pytest.approx((TOKEN_S, DECODE_S, READ_S, PAIR_S, 0.0, 0.0), rel=1e-6, abs=1e-12)
    assert model.error.mean_relative < 1e-6
    assert model.fitted_on == "core a"
    assert model.steps == 600


def test_fit_with_noise_and_outliers_stays_near_the_law_and_says_its_error() -> None:
    rng = np.random.default_rng(2)
    rows = calm_steps(2000, rng, noise=0.05)
    for row in rows[::50]:
        row["duration_s"] *= 20.0
    model = step_time_models(trace_of_cores({"a": {"steps": one_after_another(rows, 100.0)}}))["a"]
    parts = np.array([[8.0, 8.0, 4000.0, 0.0], [500.0, 4.0, 900.0, 120_000.0]])
    assert model.predict(parts) == pytest.approx([law(*row) for row in parts], rel=0.03)
    typical = [row["duration_s"] for row in rows]
    assert 0.02 < model.error.mean_relative < 0.2
    assert 0 < model.error.mean_s < np.mean(typical)


def test_an_empty_step_costs_nothing() -> None:
    model = fit_step_time(with_aftermath(np.tile([4.0, 4.0, 100.0, 0.0], (30, 1))), np.full(30, 2e-3), "core a")
    assert model.predict(np.zeros((1, len(PARTS)))) == [0.0]


COLD_S = (1e-3, 4e-4)


def cold(rows: list[Row]) -> list[Row]:
    """Every prefill of 256 tokens and more makes the two steps after it slower."""
    for before, lost_s in zip((1, 2), COLD_S, strict=True):
        for row, earlier in zip(rows[before:], rows, strict=False):
            chunk = earlier["scheduled_tokens"] - earlier["decode_requests"]
            row["duration_s"] += lost_s * min(1.0, chunk / 256)
    return one_after_another(rows, 100.0)


def test_the_caches_a_prefill_leaves_cold_are_part_of_the_law_and_of_a_recompute() -> None:
    calm = calm_steps(600, np.random.default_rng(22))
    calm += [step(600 + i, 0, (4, 4, 800, 0)) for i in range(20)]
    preempting = step(620, 0, (3, 3, 600, 0), preemptions=1)
    again = step(
        621, 0, (404, 3, 600, 0), recomputed_tokens=400, scheduled_requests=4,
        repeated=[repeated("p", 400, -401, 0, -1)],
    )  # fmt: skip
    after = [step(622 + i, 0, (4, 4, 1005 + 4 * i, 0)) for i in range(20)]
    rows = cold([*calm, preempting, again, *after])
    trace = trace_of_cores({"a": {"steps": rows, "outcomes": [outcome("p", recomputed_tokens=400, first_step=620)]}})
    assert step_time_models(trace)["a"].per_part_s[4:] == pytest.approx(COLD_S, rel=1e-6)
    expected = law(404, 3, 600, 0) - law(4, 4, 1001, 0) + sum(COLD_S)
    assert costs(attribute(trace))["p"][0] == pytest.approx(expected, rel=1e-6)
    assert costs(attribute(trace))["p"][1] == pytest.approx(3 * expected, rel=1e-6)


def test_undisturbed_steps_have_no_copy_in_flight() -> None:
    """Steps that a transfer overlaps are slow here; were they fitted on, the law would come out wrong."""
    rows = calm_steps(400, np.random.default_rng(10))
    for row in rows[100:200]:
        row["duration_s"] *= 3
    rows = one_after_another(rows, 100.0)
    moves = [transfer("p", 100, "load", rows[100]["start_s"] + 1e-5, rows[200]["start_s"] - 1e-5)]
    model = step_time_models(trace_of_cores({"a": {"steps": rows, "transfers": moves}}))["a"]
    assert model.steps == 298  # nor the two that find the caches cold
    assert model.per_part_s[0] == pytest.approx(TOKEN_S, rel=1e-6)


def test_each_core_has_its_own_law_unless_it_has_too_few_steps() -> None:
    rng = np.random.default_rng(12)
    fast, slow, few = calm_steps(300, rng), calm_steps(300, rng), calm_steps(30, rng)
    for row in slow:
        row["duration_s"] *= 2
    models = step_time_models(
        trace_of_cores({"f": {"steps": fast}, "s": {"steps": one_after_another(slow, 1.0)}, "x": {"steps": few}})
    )
    assert models["s"].fixed_s == pytest.approx(2 * models["f"].fixed_s, rel=1e-6)
    assert models["x"].fitted_on == "3 cores"
    assert models["x"].steps == 630
