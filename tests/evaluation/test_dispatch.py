"""Which evaluation a trace gets: profiles are replayed, logs are estimated, never both."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import kvpolicy
from kvpolicy.evaluation import OffPolicyReport, evaluate
from kvpolicy.evaluation.estimation import Estimation
from kvpolicy.latency import Slo
from kvpolicy.trace import TraceError
from tests.synthetic import make_trace


def test_profiles_and_logs_are_not_judged_together(folder: Path, tmp_path: Path) -> None:
    make_trace(states=30).write(tmp_path / "profile")
    with pytest.raises(TraceError, match="take one kind at a time"):
        evaluate([folder, tmp_path / "profile"], ["always-swap"])
    with pytest.raises(ValueError, match="a profile measured both options and is replayed"):
        evaluate([tmp_path / "profile"], ["always-swap"], how=Estimation(("dr",)))
    with pytest.raises(ValueError, match="limit and slo are for logs"):
        evaluate([tmp_path / "profile"], ["always-swap"], how=Estimation(slo=Slo(ttft_s=1.0)))


def test_the_public_function_judges_logs(folder: Path) -> None:
    report = kvpolicy.evaluate(traces=[folder], policies=["always-swap"])
    assert isinstance(report, OffPolicyReport)
    assert report.logged is not None and math.isfinite(report.logged.value_s)
    assert np.isfinite(report.policies[0].support.mean_weight_high)
