"""What every order has: levels of ranks, and how many running requests it is shown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from math import inf
from pathlib import Path
from types import ModuleType

import pytest

from kvpolicy.order import Guarded, Order, Progress, View, load
from kvpolicy.order.base import MAX_SHOWN, levels
from tests.order import own_predictor, own_victims, ten_line_order
from tests.order.made import ByLevel, progress, view


def test_values_are_rounded_to_levels_alike_on_both_sides_of_zero() -> None:
    assert levels((0.4, 1.0, 1.9, 2.0, 4.0, 1000.0), 2.0) == (0, 0, 0, 1, 2, 9)
    assert levels((-4.0, -inf, inf), 2.0) == (-2, -inf, inf)
    assert levels((0.4, 7.3), 1.0) == (0.4, 7.3), "a ratio of 1 takes them as they are"


class Choosing(ByLevel):
    def victims(self, waiting: Progress, running: Sequence[Progress], view: View) -> Sequence[Progress]:
        return running


def test_an_order_that_takes_the_last_is_shown_no_more_than_it_may_take() -> None:
    assert ByLevel(max_victims=3).max_candidates == 3
    assert load("mlfq").max_candidates == load("urgent/mlfq").max_candidates == 8
    assert Guarded(ByLevel(max_victims=3), pytest.fail).max_candidates == 3


def test_an_order_that_chooses_is_shown_more() -> None:
    assert Choosing().max_candidates == load("mlfq:victims=cheapest").max_candidates == MAX_SHOWN
    assert Guarded(Choosing(), pytest.fail).max_candidates == MAX_SHOWN


def test_by_default_the_last_goes_first_everything_is_worth_it_and_nobody_is_held() -> None:
    order, some = ByLevel(max_victims=3), [progress(1), progress(2), progress(3)]
    assert order.victims(progress(9), some, view()) == some[::-1]
    assert order.displaces(progress(9), some[0], view()) and order.worth(progress(9), some, view())
    assert order.admits(progress(9), 0, view()) and not order.hold(some, view()) and not order.holds
    assert order.probability(progress(9), some, some, view()) == 1.0


def test_an_order_of_ones_own_has_ten_lines_and_is_the_documented_one() -> None:
    code = Path(ten_line_order.__file__).read_text()
    guide = Path(__file__).parents[2] / "docs" / "own-policies.md"
    assert len(code.splitlines()) == 10
    assert code in re.findall(r"```python\n(.*?)```", guide.read_text(), flags=re.DOTALL)
    order = load("python:tests.order.ten_line_order:ShortPromptsFirst", allow_python=True)
    short, long = (order.rank(progress(prompt_tokens=tokens), view()) for tokens in (900, 1100))
    assert short < long and order.displaces_by_rank and order.name == "short-prompts"


@pytest.mark.parametrize("example", [own_victims, own_predictor])
def test_what_else_the_guide_shows_is_the_tested_code(example: ModuleType) -> None:
    """Their effects are in test_spec and in tests/study/test_own_orders."""
    guide = Path(__file__).parents[2] / "docs" / "own-policies.md"
    assert Path(str(example.__file__)).read_text() in re.findall(
        r"```python\n(.*?)```", guide.read_text(), flags=re.DOTALL
    )


def test_the_order_of_the_guide_spares_chats() -> None:
    order = own_victims.SpareChats()
    chat, other = progress(1, class_name="chat"), progress(2, computed_tokens=50)
    assert order.rank(chat, view()) < order.rank(other, view())
    assert order.gates and order.admits(chat, 0, view()) and order.admits(other, 10, view())
    assert not order.admits(other, 9, view()), "of 100 blocks"
    assert order.victims(chat, [other, progress(3, computed_tokens=20)], view())[0].number == 3


def test_every_method_of_an_order_is_on_the_page() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "own-policies.md").read_text()
    methods = {name for name, member in vars(Order).items() if inspect.isfunction(member) and not name.startswith("_")}
    assert {name for name in methods if f"`{name}(" in guide} == methods - {"rank"}
