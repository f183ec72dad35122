"""Policies by name, feasible options, and probabilities that are none."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvpolicy.cost import ModelError
from kvpolicy.events import Option
from kvpolicy.policy import FORMS, HELP, decide, feasible_options, load
from kvpolicy.policy.base import NoState
from tests.synthetic import fitted_model, situation


@pytest.mark.parametrize(
    "spec",
    [
        "", "swap", "always", "always-swap:1", "Always-Swap", "threshold", "threshold:", "threshold:-1",
        "threshold:" + "9" * 5000,
        "threshold:1.5", "threshold:²", "random", "random:", "random:1.5", "random:-0.1", "random:nan", "random:half",
        "cheapest", "cheapest:", "explore:", "oracle:x", "cheapest:,online=on", "cheapest:linear,",
        "cheapest:linear,online=yes",
        "cheapest:linear,speed=1", "cheapest:linear,online=on,online=on", "explore:linear,objective=speed",
        "minwaste", "minwaste:", "minwaste:linear,online=on", "minwaste:linear,objective=victim",
    ],
)  # fmt: skip
def test_a_wrong_name_is_an_error_that_lists_the_right_ones(spec: str) -> None:
    with pytest.raises(ValueError, match="the policies are") as caught:
        load(spec)
    for form in FORMS:
        assert form in str(caught.value)


BARE = ("always-recompute", "always-swap", "threshold:0", "random:0.25", "cheapest:linear", "minwaste:linear")


@pytest.mark.parametrize("spec", BARE)
def test_a_policy_bears_its_name(spec: str) -> None:
    policy = load(spec, fitted_model)
    assert policy.name == spec
    assert (policy.cost_model is not None) == spec.endswith(":linear")


def test_options_follow_the_cost_model_and_leave_its_name_alone() -> None:
    asked = []
    for spec in ("cheapest:a,b.json,online=on,objective=victim", "explore:x=y", "cheapest:a,online=off"):
        load(spec, lambda name: asked.append(name) or fitted_model("linear"))  # type: ignore[func-returns-value]
    assert asked == ["a,b.json", "x=y", "a"]
    with pytest.raises(ValueError, match="the option 'speed'; the options are online, objective, budget"):
        load("cheapest:linear,speed=1", fitted_model)


def test_learning_needs_step_times() -> None:
    with pytest.raises(ValueError, match="learns by step times, of which cost model linear knows none"):
        load("explore:linear,online=on", lambda name: replace(fitted_model(name), step_time=None))
    assert load("explore:linear", lambda name: replace(fitted_model(name), step_time=None)).cost_model is not None


def test_a_cost_model_that_is_not_there_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="nowhere/at/all"):
        load("cheapest:nowhere/at/all")


def test_swap_is_feasible_where_the_host_has_room_for_all_held_blocks() -> None:
    one = situation(100, 32)
    both = (Option("recompute"), Option("swap", 100, "host"))
    assert feasible_options(replace(one, free_host_blocks=4)) == both
    assert feasible_options(replace(one, free_host_blocks=3)) == both[:1]
    assert feasible_options(one, swap_possible=False) == both[:1]
    assert feasible_options(replace(one, computed_tokens=0, held_blocks=0)) == both[:1]


@dataclass
class Broken:
    shares: tuple[float, ...]
    name: str = "broken"

    def assess(self, *_: object) -> tuple[tuple[float, ...], tuple[()]]:
        return self.shares, ()


@pytest.mark.parametrize("shares", [(), (1.0,), (0.5, 0.6), (1.5, -0.5), (float("nan"), 1.0), (0.0, 0.0)])
def test_probabilities_that_are_none_are_never_drawn_from(shares: tuple[float, ...]) -> None:
    options = (Option("recompute"), Option("swap", 5, "host"))
    with pytest.raises(ValueError, match="policy broken: probabilities"):
        decide(Broken(shares), situation(), options, NoState(), random.Random(0))  # type: ignore[arg-type]


def test_an_option_of_probability_zero_is_never_drawn() -> None:
    """Also where rounding leaves the sum of the others a little under one."""
    options = tuple(Option("recompute") for _ in range(4))
    thirds = Broken((0.0, 0.1 + 0.2, 0.7 - 1e-12, 0.0))

    class Last(random.Random):
        def random(self) -> float:
            return 1.0 - 2**-53

    assert decide(thirds, situation(), options, NoState(), Last()).chosen == 2  # type: ignore[arg-type]
    assert decide(thirds, situation(), options, NoState(), _First()).chosen == 1  # type: ignore[arg-type]


class _First(random.Random):
    def random(self) -> float:
        return 0.0


def test_the_documents_and_the_help_say_what_each_policy_does() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "serving.md").read_text().splitlines()
    for form, what in FORMS.items():
        assert f"| `{form}` | {what} |" in lines
        assert f"{form}: {what}" in HELP
