"""What is minimised, by name and in decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from kvpolicy.cost.model import CostModel
from kvpolicy.events import Cost, Kind, Option, Preemption
from kvpolicy.policy import load
from kvpolicy.policy.objective import ENGINE, Objective
from tests.synthetic import fitted_model, options_for, situation

RECOMPUTE = Cost(2.0, 0.0, 0.0, 2.0, 8.0, 1.0, 3.0, victim_delay_s=1.0)
SWAP = Cost(1.0, 0.5, 0.5, 0.0, 9.0, 0.5, 2.0, -1.0, 0.2, victim_delay_s=4.0)


@dataclass
class Priced:
    """A cost model that says what it is told."""

    costs: tuple[Cost, ...] = (RECOMPUTE, SWAP)
    predicts_victim_delay: bool = True
    floor_s: dict[Kind, float] = field(default_factory=lambda: {"recompute": 1e-6, "swap": 1e-6})

    def predict(self, one: Preemption, options: Sequence[Option]) -> tuple[Cost, ...]:
        return self.costs[: len(options)]


def chosen(objective: str, model: Priced | None = None) -> str:
    cost_model: CostModel = model or Priced()  # type: ignore[assignment]  # enough of one
    policy = load(f"cheapest:x,objective={objective}", lambda name: cost_model)
    one = situation()
    shares = policy.probabilities(one, options_for(one), policy.initial_state())
    return options_for(one)[shares.index(1.0)].kind


def test_the_same_model_decides_by_what_is_asked() -> None:
    """Swap spares the engine a second, costs the victim three and the others one."""
    assert chosen("engine") == "swap"
    assert chosen("victim") == "recompute"
    assert chosen("others") == "recompute"


@pytest.mark.parametrize(
    ("text", "kind"),
    [("engine+0.3*victim", "swap"), ("engine+0.4*victim", "recompute"), ("3*engine+others", "swap"),
     ("engine+1.5*others", "recompute")],
)  # fmt: skip
def test_a_weighted_sum_worked_by_hand(text: str, kind: Kind) -> None:
    assert chosen(text) == kind


@pytest.mark.parametrize(
    ("text", "objective"),
    [
        ("engine", ENGINE),
        ("victim", Objective(0.0, 1.0, 0.0)),
        ("engine+0.5*victim+0.1*others", Objective(1.0, 0.5, 0.1)),
        ("2*others", Objective(0.0, 0.0, 2.0)),
    ],
)
def test_an_objective_is_what_its_text_says(text: str, objective: Objective) -> None:
    assert Objective.parse(text) == objective
    assert Objective.parse(objective.text) == objective


@pytest.mark.parametrize(
    "text", ["", "speed", "engine+", "engine+engine", "0*engine", "-1*engine", "nan*engine", "x*engine", "*engine"]
)
def test_a_wrong_objective_is_an_error_that_tells_the_form(text: str) -> None:
    with pytest.raises(ValueError, match=r"as in engine\+0.5\*victim"):
        Objective.parse(text)


def test_a_quantity_that_is_not_known_is_an_error_only_where_it_counts() -> None:
    assert ENGINE.weigh(1.0, None, None) == 1.0
    with pytest.raises(ValueError, match="delay of the victim is not known"):
        Objective(1.0, 0.5, 0.0).weigh(1.0, None, 2.0)


def test_a_model_that_knows_no_delays_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"does not predict; train it again.*the policies are"):
        chosen("engine+victim", Priced(predicts_victim_delay=False))
    assert chosen("engine", Priced(predicts_victim_delay=False)) == "swap"


def test_a_fitted_model_decides_by_any_objective() -> None:
    policy = load("cheapest:boosted,objective=engine+victim+0.2*others", fitted_model)
    one = situation(500)
    shares, costs = policy.assess(one, options_for(one), policy.initial_state())
    values = [cost.engine_s + (cost.victim_delay_s or 0.0) + 0.2 * cost.stall_s for cost in costs]
    assert shares[values.index(min(values))] == 1.0
