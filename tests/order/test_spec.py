"""Orders by name."""

from __future__ import annotations

import pytest

from kvpolicy.extensions import ExtensionError
from kvpolicy.fields import WrongValue
from kvpolicy.order import FORMS, HELP, Order, load, load_order
from kvpolicy.order.spec import KINDS, OPTIONS
from tests.order.made import ByLevel

EXAMPLES = (
    "fcfs", "priority", "urgent", "urgent:quantum=4,promote=30", "reserve:.1", "reserve:.1,above=-1", "mlfq",
    "mlfq:base=32,promote=30,victims=least-computed", "las:quantum=128", "srpt:lengths", "srpt:limit,bound=0.5",
    "gittins:quantum=0", "deadline:ttft=.5,tpot=.05", "urgent/mlfq:base=8", "urgent/srpt:lengths,bound=.5",
    "classes:chat+batch", "classes:chat+batch,promote=9/mlfq:base=8",
)  # fmt: skip


@pytest.mark.parametrize("text", EXAMPLES)
def test_an_order_is_named_as_it_was_asked_for(text: str) -> None:
    assert load(text).name == text == load(text).label


def test_orders_of_other_names_are_others() -> None:
    assert len({load(text).digest for text in EXAMPLES}) == len(EXAMPLES)
    assert load("mlfq").digest == load("mlfq").digest


def test_every_form_and_option_is_listed() -> None:
    assert {form.partition(":")[0] for form in FORMS} >= set(KINDS)
    taken = {name for kind in KINDS.values() for name in kind.options} | {"victims", "worth", "explore"}
    assert taken == set(OPTIONS) and all(name in HELP for name in OPTIONS)


def test_values_arrive() -> None:
    order = load("srpt:limit,bound=0.5,quantum=3,promote=7")
    assert (order.bound, order.quantum_tokens, order.promote_s) == (0.5, 3, 7.0)  # type: ignore[attr-defined]
    assert load("reserve:.25,above=-2").above == -2  # type: ignore[attr-defined]
    assert load("urgent/mlfq:base=8,promote=9").promote_s == 9.0
    assert load("urgent:quantum=32/mlfq:base=8").quantum_tokens == load("mlfq:base=32/urgent").quantum_tokens == 32


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "is no order"),
        ("fifo", "'fifo' is no order; the orders are fcfs, priority"),
        ("fcfs:4", "'4'"),
        ("mlfq:base=0", "base=0, should be 1 or more"),
        ("mlfq:base=x", "base=x, should be a whole number"),
        ("mlfq:base", "has 'base', which it does not take"),
        ("mlfq:ttft=1", "the option ttft, which it does not take"),
        ("mlfq:bse=1", "has 'bse=1'; the options are"),
        ("mlfq:base=4,base=5", "each at most once"),
        ("mlfq:promote=0", "promote=0, should be above 0"),
        ("mlfq:promote=nan", "promote=nan, should be a number"),
        ("mlfq:victims=first", "victims=first, should be last, least-computed or cheapest"),
        ("priority:victims=cheapest", "has victims=cheapest, and displaces nobody"),
        ("reserve:.1,worth=price", "has worth=price, and displaces nobody"),
        ("mlfq:explore=2", "has explore=2, should be a share from 0 to 1"),
        ("mlfq:worth=gold", "has worth=gold, should be always, or price"),
        ("reserve", "lacks what follows its name"),
        ("reserve:1.5", "SHARE=1.5, should be a share from 0 to 1"),
        ("srpt", "lacks what follows its name"),
        ("srpt:oracle", "predictor 'oracle', should be lengths or limit"),
        ("urgent/fifo", "'fifo' is no order"),
        ("urgnt/mlfq", "'urgnt' is no order (did you mean urgent?)"),
        ("reserv:0.1", "is no order (did you mean reserve:SHARE?)"),
        ("urgent:victims=cheapest/mlfq", "has victims= before its last order"),
        ("urgent/las:explore=.5,worth=price/mlfq", "has explore= before its last order"),
        ("deadline:tpot=0", "tpot=0, should be above 0"),
    ],
)  # fmt: skip
def test_a_name_that_is_none_is_told_apart(text: str, named: str) -> None:
    with pytest.raises(WrongValue) as told:
        load(text)
    assert named in str(told.value) and "options are written ORDER:NAME=VALUE" in str(told.value)


def test_a_module_is_run_only_where_that_is_allowed() -> None:
    with pytest.raises(ExtensionError):
        load("python:tests.unruly:Raising")
    assert load("python:tests.unruly:Raising", allow_python=True).name == "raising"
    with pytest.raises(ExtensionError):
        load("python:tests.fickle:Fickle", allow_python=True)  # a policy


def test_an_order_is_taken_as_it_is() -> None:
    order = ByLevel()
    assert load_order(order) is order and load_order("urgent") == load("urgent")
    with pytest.raises(WrongValue, match="a name or an Order"):
        load_order(7)  # type: ignore[arg-type]
    with pytest.raises(ExtensionError):
        load_order(type("Nameless", (ByLevel,), {"name": ""})(name=""))


def test_an_order_from_outside_has_its_digest_in_its_label() -> None:
    order: Order = ByLevel()
    assert order.label.startswith("by-level") and order.label != "by-level" and repr(order) == order.label
