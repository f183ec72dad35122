"""Options of an estimation that are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpolicy.evaluation import evaluate
from kvpolicy.evaluation.estimation import Estimation


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"estimators": ["mips"]}, "estimators is 'mips', should be one of dm, ips"),
        ({"estimators": ["dr", "dr"]}, "estimators has dr twice"),
        ({"interval": "normal"}, "interval is 'normal', should be one of"),
        ({"policies": ["always-swap", "always-swap"]}, "policy always-swap: given twice"),
        ({"policies": []}, "no policy was given"),
        ({"limit_s": 2.0}, "needs a limit"),
        ({"interval": "bernstein", "limit_s": -1.0}, r"limit_s is -1\.0, should be a number above 0"),
    ],
)
def test_wrong_options_are_named(folder: Path, wrong: dict[str, Any], message: str) -> None:
    policies = wrong.get("policies", ["always-swap"])
    with pytest.raises(ValueError, match=message):
        evaluate([folder], policies, how=Estimation(**{key: wrong[key] for key in wrong if key != "policies"}))
