"""The documented policy that learns: in a simulation, in traces, and where it would never swap again."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy import Feedback
from kvpolicy.policy import Decider
from tests.policy import own_learning
from tests.policy.own_learning import Means, Measured
from tests.study.conftest import hardware
from tests.study.policy_grids import simulate
from tests.synthetic import make_trace, options_for, situation

__all__ = ["hardware"]


def test_the_documented_policy_is_the_one_that_is_tested() -> None:
    guide = Path(__file__).parents[2] / "docs" / "own-policies.md"
    code = re.findall(r"```python\n(.*?)```", guide.read_text(), flags=re.DOTALL)
    assert Path(own_learning.__file__).read_text() in code


def test_it_learns_in_a_simulation_whose_trace_has_its_states(hardware: str, tmp_path: Path) -> None:
    report = simulate(hardware, tmp_path, [Measured()], out=tmp_path / "out")
    assert report.ok and min(report.results[0]["preemptions"].values()) > 0, "it swaps some and recomputes others"
    (folder,) = (tmp_path / "out").iterdir()
    decisions = kvpolicy.read_trace(folder).tables["decisions"].to_pylist()
    states = [Means(**json.loads(row["state"])) for row in decisions]
    assert states[0] == Means() and states[-1].swap and states[-1].recompute
    swap = {round(row["probabilities"][1], 2) for row in decisions if len(row["probabilities"]) == 2}
    assert 0.5 in swap and swap & {0.05, 0.95}


def test_a_profile_judges_it_in_its_initial_state(tmp_path: Path) -> None:
    make_trace(seed=1, states=80).write(tmp_path / "profile")
    report = kvpolicy.evaluate([tmp_path / "profile"], [Measured(), "random:0.5"])
    own, coin = report.policies
    assert own.total_s == coin.total_s
    judged = f"{Measured().label}: a replay has no outcomes to learn from; judged in its initial state"
    assert judged in report.text().splitlines()


@pytest.mark.parametrize(("explored", "returns"), [(0.05, True), (0.0, False)])
def test_without_exploration_it_never_swaps_again(explored: float, returns: bool) -> None:
    """The first swap is slow, all later ones are fast."""
    policy: Any = Measured()
    policy.explored = explored
    decider, one = Decider(policy, random.Random(0)), situation(400)
    recompute, swap = options_for(one)
    decider.learn(Feedback(one, recompute, 0.1, 0.1))
    decider.learn(Feedback(one, swap, 0.4, 0.1))
    kinds = []
    for _ in range(600):
        kinds.append(decider.decide(one).executed)
        option, engine_s = (swap, 0.01) if kinds[-1] == "swap" else (recompute, 0.1)
        decider.learn(Feedback(one, option, engine_s, 0.1))
    assert (kinds[-100:].count("swap") > 80) is returns
    assert returns or "swap" not in kinds
