"""Held-out scores and predictions of models trained from the shipped traces and from made-up logs, as they were.

``tests/golden/learned.json`` holds them. Another solver or learner may move a score by one point, and a prediction by a
few percent; the coverage of intervals stays. Written anew by ``python -m tests.training.test_scores``: read the
difference, for every line of it is a model that learned something else.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from kvpolicy.cost.model import FittedModel
from kvpolicy.events import KINDS
from kvpolicy.regression.ceilings import Ceilings
from kvpolicy.training import train
from tests.synthetic import CostLaw, make_trace, options_for, situation
from tests.synthetic_logs import make_log
from tests.synthetic_steps import with_steps

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "learned.json"
FAMILIES = ("boosted", "linear", "analytic")
SHIPPED = ("cpu-llama-native", "cpu-llama-simulated-link")
CASES = (*SHIPPED, "log", "bent log", "bent profile", "profile with steps")
LENGTHS, RUNNING = (48, 130, 260, 480), (0, 3, 9)
MAX_SCORE_CHANGE = 0.01
MAX_PREDICTION_CHANGE = 0.03


def trace_of(case: str, scratch: Path) -> Path:
    """Folder of the trace that a case is trained from."""
    if case in SHIPPED:
        return ROOT / "traces" / case
    bent = CostLaw(bend=0.4)
    made = {
        "log": lambda: make_log(1, decisions=600, policy="random:0.3"),
        "bent log": lambda: make_log(2, decisions=600, law=bent, noise=0.05),
        "bent profile": lambda: make_trace(1, states=120, repeats=2, law=bent),
        "profile with steps": lambda: with_steps(make_trace(states=40)),
    }[case]()
    made.write(scratch / "trace")
    return scratch / "trace"


def learned(case: str, family: str) -> dict[str, Any]:
    """Scores on held-out states or records, and predictions."""
    with TemporaryDirectory() as scratch:
        report = train([trace_of(case, Path(scratch))], family=family, force=True)
    scores = {
        f"{kind} {name}": report.held_out[kind][name]
        for kind in KINDS
        for name in ("mean_error", "bias", "law_mean_error")
    }
    by_quantity = report.held_out.get("coverage") or {kind: report.held_out[kind]["coverage"] for kind in KINDS}
    return {
        "scores": scores,
        "coverage": {quantity: coverage["holds"] for quantity, coverage in by_quantity.items()},
        "trees": dict(report.trees),
        "predictions": predictions(report.model),
    }


def predictions(model: FittedModel) -> dict[str, float]:
    """Seconds by option, length and load, on blocks of the model's first size."""
    size = model.provenance.block_sizes[0]
    predicted = {}
    for tokens in LENGTHS:
        for running in RUNNING:
            one = situation(tokens, size, running)
            for kind, cost in zip(KINDS, model.predict(one, options_for(one)), strict=True):
                predicted[f"{kind} {tokens} beside {running}"] = cost.engine_s
    return predicted


def ceilings() -> dict[str, float]:
    """Constants that rooflines of operators are fitted with, with noise, an outlier and a ceiling of two terms."""
    rng = np.random.default_rng(5)
    x = np.exp(rng.uniform(0.0, 8.0, (300, 3)))
    seconds = (1e-5 + np.maximum(3e-7 * x[:, 0], 5e-7 * x[:, 1]) + 2e-7 * x[:, 2]) * np.exp(0.03 * rng.normal(size=300))
    seconds[7] *= 20
    names = ("flops", "bytes", "rows")
    weight = rng.uniform(0.5, 2.0, 300)
    fitted = {
        "sum": Ceilings().calibrated(x, seconds, names, weight),
        "maximum": Ceilings((("",), ("flops", "bytes"), ("rows",))).calibrated(x, seconds, names, weight),
    }
    return {f"{name} {constant.term}": constant.value for name, law in fitted.items() for constant in law.constants}


GOLDEN_VALUES: dict[str, Any] = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_a_model_scores_and_predicts_as_before(case: str, family: str) -> None:
    before, now = GOLDEN_VALUES[f"{case}, {family}"], learned(case, family)
    assert now["scores"] == pytest.approx(before["scores"], abs=MAX_SCORE_CHANGE)
    assert now["coverage"] == pytest.approx(before["coverage"], abs=1e-9)
    assert now["trees"] == before["trees"]
    assert now["predictions"] == pytest.approx(before["predictions"], rel=MAX_PREDICTION_CHANGE, abs=1e-6)


def test_ceilings_have_the_constants_of_before() -> None:
    assert ceilings() == pytest.approx(GOLDEN_VALUES["ceilings"], rel=1e-3)


def main() -> None:
    values = {f"{case}, {family}": learned(case, family) for case in CASES for family in FAMILIES}
    GOLDEN.write_text(json.dumps(values | {"ceilings": ceilings()}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
