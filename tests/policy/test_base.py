"""A policy of one method is a whole policy."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from kvpolicy.events import Option, Preemption
from kvpolicy.policy import NoState, Policy, base, decide, feasible_options, probabilities_of
from tests.policy import ten_line_policy
from tests.policy.ten_line_policy import Longer
from tests.synthetic import options_for, situation


def test_it_really_has_ten_lines() -> None:
    assert len(Path(ten_line_policy.__file__).read_text().splitlines()) == 10


def test_one_method_is_enough() -> None:
    policy = Longer()
    state = policy.initial_state()
    assert state == NoState()
    for tokens, chosen in ((301, "swap"), (300, "recompute")):  # beside others of 300 each
        one = situation(tokens)
        decision = decide(policy, one, options_for(one), state, random.Random(0))
        assert (decision.intended, decision.costs, decision.policy) == (chosen, (), "longer")
        assert policy.next_state(state, decision) is state
    full = situation(500, free_host_blocks=0)
    assert probabilities_of(policy, full, feasible_options(full), state) == (1.0,)


def test_a_label_tells_another_version_from_this_one() -> None:
    class Other(Longer):
        def probabilities(self, situation: Preemption, options: Sequence[Option], state: object) -> list[float]:
            return [1.0] + [0.0] * (len(options) - 1)

    assert Longer().label == Longer().label
    assert Longer().label.startswith("longer@") and len(Longer().label) == len("longer@") + 12
    assert Other().name == Longer().name and Other().label != Longer().label


@pytest.mark.parametrize("shares", [[0, 1], [False, True], np.array([0.0, 1.0]), (np.float32(0), np.float64(1))])
def test_probabilities_become_plain_numbers(shares: Sequence[float]) -> None:
    """They are recorded, compared and written as JSON."""

    class Saying(Longer):
        def probabilities(self, situation: Preemption, options: Sequence[Option], state: object) -> Sequence[float]:
            return shares

    one = situation()
    found = probabilities_of(Saying(), one, options_for(one), NoState())
    assert found == (0.0, 1.0) and {type(share) for share in found} == {float}


def test_wrong_probabilities_are_refused_wherever_they_are_asked_for() -> None:
    class Wrong(Longer):
        def probabilities(self, situation: Preemption, options: Sequence[Option], state: object) -> Sequence[float]:
            return [0.5, 0.6]

    one = situation()
    with pytest.raises(ValueError, match=r"policy longer: probabilities \(0.5, 0.6\) for 2 options"):
        probabilities_of(Wrong(), one, options_for(one), NoState())


def test_the_example_of_the_documentation_is_one() -> None:
    """It is the code below `::` in the module's docstring."""
    _, _, code = str(base.__doc__).partition("::\n\n")
    lines = [line for line in code.splitlines() if not line or line.startswith("    ")]
    found: dict[str, type] = {"Policy": Policy}
    exec(dedent("\n".join(lines)), found)
    policy, one = found["LongerSwaps"](), situation(301)
    assert probabilities_of(policy, one, options_for(one), policy.initial_state()) == (0.0, 1.0)
    assert probabilities_of(policy, one, options_for(one)[:1], policy.initial_state()) == (1.0,)


def test_the_documented_policy_is_the_one_that_is_tested() -> None:
    guide = Path(__file__).parents[2] / "docs" / "own-policies.md"
    code, *_ = re.findall(r"```python\n(.*?)```", guide.read_text(), flags=re.DOTALL)
    assert code == Path(ten_line_policy.__file__).read_text()
