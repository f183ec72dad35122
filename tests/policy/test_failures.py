"""An error raised in a user's own policy names the policy, the method and the line, wherever it is called."""

from __future__ import annotations

import pickle
import random
import re
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy.cli import main
from kvpolicy.policy import Decider, Policy, PolicyError
from kvpolicy.policy.base import Feedback
from kvpolicy.policy.cheapest import Always
from kvpolicy.study.config import Run
from tests.policy import failing
from tests.policy.failing import FAILS, Failing, by_no_price, unfit
from tests.study.conftest import hardware
from tests.study.policy_grids import TIGHT, WORKLOAD
from tests.synthetic import make_trace, options_for, situation
from tests.synthetic_logs import make_log

__all__ = ["hardware"]
SOURCE = Path(failing.__file__)
LINES = [number for number, line in enumerate(SOURCE.read_text().splitlines(), 1) if line.endswith(FAILS)]
WORDS = {
    "to_json": r"to_json failed with AttributeError: 'Recorded' object has no attribute 'count'",
    "probabilities": r"probabilities failed with AttributeError: 'Preemption' object has no attribute 'max_tokens'",
    "initial_state": r"initial_state failed with FileNotFoundError: .*'/no such file'",
    "next_state": r"next_state failed with TypeError: object of type 'NoState' has no len\(\)",
    "loads": r"loads failed with KeyError: 'loads'",
    "observe": r"observe failed with Unpicklable: made up",
}
LINE_OF = dict(zip(WORDS, LINES, strict=False))


def sentence(method: str) -> str:
    return rf"^policy failing: {WORDS[method]} \({re.escape(str(SOURCE))}, line {LINE_OF[method]}\)$"


def use(policy: Policy) -> None:
    """As a simulation does."""
    decider, one = Decider(policy, random.Random(0)), situation(400)
    decider.decide(one)
    decider.loads(one)
    decider.learn(Feedback(one, options_for(one)[0], 0.1, 0.2))


@pytest.mark.parametrize("method", WORDS)
def test_it_names_method_and_line_and_survives_a_worker_process(method: str) -> None:
    with pytest.raises(PolicyError, match=sentence(method)) as raised:
        use(Failing(method))
    assert raised.value.__cause__ is not None and str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_a_cost_model_of_ones_own_and_a_call_that_does_not_fit() -> None:
    model = r"policy by-no-price: predict failed with ZeroDivisionError: .* \(.*failing.py, line \d+\)$"
    with pytest.raises(PolicyError, match=model):
        use(by_no_price())
    with pytest.raises(PolicyError, match=r"policy unfit: observe failed with TypeError: .*takes 2 positional"):
        use(unfit())


def test_a_fault_of_this_package_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is shown with its traceback."""
    monkeypatch.setattr("kvpolicy.policy.cheapest.first_option_of", lambda kind, options: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        use(Always("always-swap", "swap"))


def test_evaluate_and_explain_say_so(tmp_path: Path) -> None:
    make_trace(seed=1, states=80).write(tmp_path / "profile")
    make_log(1, decisions=600).write(tmp_path / "log")
    for folder in ("profile", "log"):
        for method in ("probabilities", "initial_state", "to_json"):
            with pytest.raises(PolicyError, match=sentence(method)):
                kvpolicy.evaluate([tmp_path / folder], [Failing(method)])


@pytest.mark.parametrize("jobs", [0, 1])
def test_simulations_say_so_in_every_process(hardware: str, tmp_path: Path, jobs: int) -> None:
    policies = [Failing("probabilities", "failing"), Failing("observe", "failing too"), "always-swap"]
    run = Run(jobs=jobs, cache=tmp_path)
    report = kvpolicy.simulate([WORKLOAD], policies, [TIGHT], hardware, run=run)
    assert len(report.results) == 1
    first, second = [failure.error for failure in report.failed]
    assert re.search(sentence("probabilities"), first)
    assert re.search(sentence("observe").replace("failing", "failing too", 1), second)


def test_the_command_line_prints_one_line(hardware: str, tmp_path: Path, capfd: pytest.CaptureFixture[Any]) -> None:
    make_trace(seed=1, states=80).write(tmp_path / "profile")
    simulation = ["--kv-blocks", str(TIGHT), "--hardware", hardware, "--workload", WORKLOAD, "--cache", str(tmp_path)]
    for command in (["evaluate", str(tmp_path / "profile")], ["simulate", *simulation, "--jobs", "1"]):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--policy", "python:tests.policy.failing:Failing"])
        assert ended.value.code
        shown = capfd.readouterr()
        assert "Traceback" not in shown.err + shown.out
        assert f"policy failing: {WORDS['probabilities']}" in shown.err + shown.out
