"""Residuals of fitted laws: learned where they help, left out where they do not."""

from __future__ import annotations

from tests.synthetic import fitted_model


def test_residual_learns_what_no_roofline_knows_and_stays_away_where_there_is_nothing() -> None:
    assert fitted_model("boosted", bend=0.4).residuals
    assert not fitted_model("boosted", bend=0.0).residuals
    assert not fitted_model("boosted", states=40, bend=0.4).residuals
