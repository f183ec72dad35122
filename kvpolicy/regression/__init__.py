"""General regressors for times: physics times a learned residual, least squares, conformal intervals."""
