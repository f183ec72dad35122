"""Beyond the trained range: distances and growth worked by hand, and what inner extrapolation decides."""

from __future__ import annotations

from dataclasses import replace
from math import exp, inf, log
from typing import Any

import numpy as np
import pytest

from kvpolicy.cost.intervals import PREDICTED, Misses, calibrate
from kvpolicy.datasets.profiles import dataset_of
from kvpolicy.events import KINDS
from kvpolicy.regression.conformal import CONFIDENCE
from kvpolicy.regression.estimator import BoostedRegressor
from kvpolicy.training.extrapolation import (
    ExtrapolatedMiss,
    growth_by_scatter,
    inner_coverage,
    residuals_kept,
    with_growth,
)
from tests.synthetic import fitted_model, make_trace, options_for, situation

NO_LEAST = dict.fromkeys(PREDICTED, 0.0)


def misses_of(miss: float, tokens: float) -> Misses:
    return Misses(tokens, 1.0, dict.fromkeys(PREDICTED, miss), dict.fromkeys(PREDICTED, miss))


def extrapolated_miss(
    share: float, miss: float, distance: float, number: int, tokens: float = 800.0
) -> ExtrapolatedMiss:
    """Missed by ``miss`` with the residual left out, by half as much with it kept."""
    kept, left = (Misses(tokens, 1.0, dict.fromkeys(PREDICTED, one), {}) for one in (miss / 2, miss))
    return ExtrapolatedMiss(share, f"state {number}", kept, left, dict.fromkeys(PREDICTED, distance))


def test_growth_is_what_the_misses_of_inner_fits_need_and_no_state_inside_counts() -> None:
    """The room that misses stick out of is that of the short states alone, however wide the long ones make it."""
    near = [misses_of(s, 100.0) for s in [0.1, -0.1] * 20]
    all_lengths = near + [misses_of(s, 1000.0) for s in [0.5, -0.5] * 20]
    missed = [
        extrapolated_miss(0.5, 0.1 + 0.4 * distance, distance, i)
        for i, distance in enumerate(np.linspace(0.1, 1.3, 30))
    ]
    inside = [extrapolated_miss(0.5, 9.0, 0.0, 100 + i) for i in range(30)]
    dropped = dict.fromkeys(KINDS, False)
    intervals = with_growth(calibrate(all_lengths), all_lengths, [*missed, *inside], dropped, NO_LEAST)
    assert intervals.growth["swap"] == pytest.approx(0.4)
    assert intervals.room("swap", 0, True, 2.0) == pytest.approx((0.9, 0.9))
    assert residuals_kept(missed, {"recompute": 5, "swap": 0}) == {"recompute": True, "swap": False}
    assert with_growth(calibrate(all_lengths), all_lengths, missed[:8], dropped, NO_LEAST).growth["swap"] == inf


def test_growth_is_that_of_the_fit_that_needs_most_and_never_below_what_fits_disagree_by() -> None:
    inside = [misses_of(s, tokens) for tokens in (100.0, 1000.0) for s in [0.1, -0.1] * 20]
    missed = [extrapolated_miss(0.5, 0.1 + 0.2 * d, d, i) for i, d in enumerate(np.linspace(0.1, 0.6, 90))]
    missed += [extrapolated_miss(0.25, 0.1 + 0.8 * d, d, i) for i, d in enumerate(np.linspace(0.1, 1.3, 9))]
    dropped = dict.fromkeys(KINDS, False)
    intervals = with_growth(calibrate(inside), inside, missed, dropped, NO_LEAST | {"ratio": 3.0})
    assert intervals.growth["swap"] == pytest.approx(0.8)
    assert intervals.growth["ratio"] == 3.0


def test_coverage_beyond_the_range_uses_states_outside_the_fits() -> None:
    """Told by fits to an eighth and a quarter, on lengths up to half; what is longer is missed four times as far."""
    inside = [misses_of(s, tokens) for tokens in (100.0, 500.0, 1000.0) for s in [0.1, -0.1] * 20]
    results = [
        extrapolated_miss(share, 0.1 + 0.2 * d, d, i, 500.0)
        for share in (0.125, 0.25)
        for i, d in enumerate([0.2, 0.6] * 10)
    ]
    judged = [extrapolated_miss(0.5, 0.1 + 0.8 * d, d, i, 900.0) for i, d in enumerate([0.3, 0.6] * 10)]
    dropped = dict.fromkeys(KINDS, False)
    part = inner_coverage(inside, [*results, *judged], dropped)["swap"]
    assert (part["states"], part["holds"]) == (20, 0.0)
    assert inner_coverage(inside, judged, dropped)["swap"]["states"] == 0


def test_fits_that_agree_within_the_range_and_drift_apart_beyond_ask_for_room() -> None:
    """The pairs' constant, hardly felt up to 512 tokens, rules from some thousands on."""
    model = fitted_model("analytic")
    law: Any = model.laws["recompute"]
    fits = [replace(model, laws=model.laws | {"recompute": replace(law, s_per_pair=p * 1e-8)}) for p in range(2, 7)]
    states = list(dataset_of({"x": make_trace(states=24, tokens=(32, 512))}).states)
    dropped = dict.fromkeys(KINDS, False)
    growth = growth_by_scatter(fits, states, dropped)
    assert growth["recompute"] > 0.2 and growth["ratio"] == pytest.approx(growth["recompute"])
    assert growth["swap"] == pytest.approx(0.0, abs=1e-12)
    assert growth_by_scatter([model] * 5, states, dropped) == pytest.approx(NO_LEAST, abs=1e-12)


def test_fitted_models_hold_their_decisions_and_predictions_inside_do_not_depend_on_them() -> None:
    model = fitted_model("boosted")
    assert set(model.carried) == set(KINDS)
    assert all(0 <= model.intervals.growth[of] < inf for of in PREDICTED)
    other = replace(model, carried={kind: not kept for kind, kept in model.carried.items()})
    victim = situation(900, 32, 3)
    assert [c.engine_s for c in other.predict(victim, options_for(victim))] == [
        c.engine_s for c in model.predict(victim, options_for(victim))
    ]


COLUMNS = ("tokens",)


def measured_times(factor_grows: bool, rows: int = 600) -> tuple[np.ndarray, np.ndarray]:
    """Times that a straight line misses by a factor, which stays beyond 100 tokens or comes and goes."""
    rng = np.random.default_rng(1)
    tokens = np.exp(rng.uniform(0, log(4000), rows))
    wave = np.where(tokens > 100, 1.6, 1.0) if factor_grows else 1.0 + 0.5 * np.sin(3 * np.log(tokens))
    return tokens[:, None], 1e-5 * (20 + tokens) * wave * np.exp(rng.normal(0, 0.01, rows))


def test_a_regressor_decides_by_inner_extrapolation_and_only_outside_changes() -> None:
    x, seconds = measured_times(factor_grows=False)
    plain = BoostedRegressor(columns=COLUMNS).fit(x, seconds)
    regressor = BoostedRegressor(columns=COLUMNS).fit(x, seconds, lengths=x[:, 0])
    assert plain.carried_ and plain.inner_ is None and plain.trees_
    assert [one.share for one in regressor.inner_ or ()] == [0.25, 0.5]
    kept, left = (
        sum(np.abs(getattr(one, name)).sum() for one in regressor.inner_ or ()) for name in ("carried", "dropped")
    )
    assert regressor.carried_ == (kept <= left)
    assert np.array_equal(regressor.predict(x), plain.predict(x))
    regressor.carried_ = False
    assert np.array_equal(regressor.predict(x), plain.predict(x))
    longer = np.linspace(x.max(), 8 * x.max(), 50)[:, None]
    assert (np.diff(regressor.predict(longer)) >= 0).all()
    assert regressor.predict(longer)[-1] == pytest.approx(
        max(regressor.physics_.seconds(longer)[-1], regressor.predict(x[[x[:, 0].argmax()]])[0])
    )


def test_a_regressors_widening_is_infinite_without_lengths_and_finite_with_them() -> None:
    x, seconds = measured_times(factor_grows=True)
    without = BoostedRegressor(columns=COLUMNS).fit(x, seconds).widening((0.1, 0.1), CONFIDENCE)
    assert without.at(0.0) == 0.0 and without.at(1.0) == inf
    regressor = BoostedRegressor(columns=COLUMNS).fit(x, seconds, lengths=x[:, 0])
    wide, narrow = (regressor.widening((margin, margin)).at(1.0) for margin in (0.5, 0.01))
    assert 0 <= wide <= narrow < exp(1)


def test_impossible_lengths_are_refused_by_row() -> None:
    x, seconds = measured_times(factor_grows=True, rows=50)
    lengths = x[:, 0].copy()
    lengths[7] = 0.0
    with pytest.raises(ValueError, match=r"lengths: row 7 holds 0\.0, should be above 0"):
        BoostedRegressor(columns=COLUMNS).fit(x, seconds, lengths=lengths)
