"""Regressors that know nothing of preemptions: physics times a residual, least squares, conformal intervals."""
