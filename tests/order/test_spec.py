"""Orders by name."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from kvpolicy.code_digest import digest_of
from kvpolicy.extensions import ExtensionError, NotAllowed
from kvpolicy.fields import WrongValue
from kvpolicy.order import FORMS, HELP, Order, OrderError, Progress, Srpt, load, load_order
from kvpolicy.order.spec import KINDS, OPTIONS
from tests.order.made import ByLevel, progress, view
from tests.order.own_predictor import by_class

EXAMPLES = (
    "fcfs", "priority", "urgent", "urgent:quantum=4,promote=30", "reserve:.1", "reserve:.1,above=-1", "mlfq",
    "mlfq:base=32,promote=30,victims=least-computed", "las:quantum=128", "srpt:lengths", "srpt:limit,bound=0.5",
    "gittins:quantum=0", "deadline:ttft=.5,tpot=.05", "urgent/mlfq:base=8", "urgent/srpt:lengths,bound=.5",
    "classes:chat+batch", "classes:chat+batch,promote=9/mlfq:base=8", "hints", "hints:quantum=4/las",
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


@pytest.mark.parametrize(("text", "number"), [("0.1", 0.1), ("2.", 2.0), (".5", 0.5), ("1e2", 100.0), ("1E+2", 100.0)])
def test_numbers_are_read_as_they_are_written(text: str, number: float) -> None:
    assert load(f"mlfq:promote={text}").promote_s == number


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "is no order"),
        ("fifo", "'fifo' is no order; the orders are fcfs, priority"),
        ("fcfs:4", "'4'"),
        ("mlfq:base=0", "base=0, should be 1 or more"),
        ("mlfq:base=x", "base=x, should be a whole number"),
        ("mlfq:base", "has 'base', which it does not take"),
        ("mlfq:promote=0", "promote=0, should be 0.1 or above: every promotion may preempt a request"),
        ("mlfq:promote=1e-320", "promote=1e-320, should be 0.1 or above"),
        ("urgent:promote=1e-6", "promote=1e-6, should be 0.1 or above"),
        ("las:quantum=1,promote=0.001", "promote=0.001, should be 0.1 or above"),
        ("mlfq:promote=1e400", "promote=1e400, should be a finite number"),
        ("mlfq:promote=1_000", "promote=1_000, should be a finite number"),
        ("mlfq:promote=\u0661", "promote=\u0661, should be a finite number"),
        ("mlfq:promote= 1", "promote= 1, should be a finite number"),
        ("mlfq:promote=+1", "promote=+1, should be a finite number"),
        ("mlfq:cool=-1", "cool=-1, should be a finite number"),
        ("reserve:.", "SHARE=., should be a finite number"),
        ("mlfq:promote=nan", "promote=nan, should be a finite number"),
        ("mlfq:victims=first", "victims=first, should be last, least-computed or cheapest"),
        ("priority:victims=cheapest", "has victims=cheapest, and displaces nobody"),
        ("reserve:.1,worth=price", "has worth=price, and displaces nobody"),
        ("mlfq:explore=2", "has explore=2, should be a share from 0 to 1"),
        ("mlfq:worth=gold", "has worth=gold, should be always, or price"),
        ("reserve", "lacks what follows its name"),
        ("reserve:1.5", "SHARE=1.5, should be a share from 0 to 1"),
        ("srpt", "lacks what follows its name"),
        ("srpt:oracle", "predictor 'oracle', should be lengths, limit or python:MODULE:FACTORY"),
        ("urgent/fifo", "'fifo' is no order"),
        ("urgent/", "'urgent/' lacks the order after its slash"),
        ("/mlfq", "'/mlfq' lacks the order before its slash"),
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


MLFQ_TAKES = "its options are base, promote, cool, victims, explore, worth, written NAME=VALUE"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mlfq:bsae=3", f"'mlfq:bsae=3' has 'bsae=3' (did you mean base?); {MLFQ_TAKES}"),
        ("mlfq:ttft=1", f"'mlfq:ttft=1' has 'ttft=1'; {MLFQ_TAKES}"),
        ("mlfq:base=4,base=5", f"'mlfq:base=4,base=5' has 'base=5', and base before; {MLFQ_TAKES}"),
        ("mlfq:base=", f"'mlfq:base=' has 'base=' without a value; {MLFQ_TAKES}"),
        ("urgent/mlfq:bsae=3", f"'mlfq:bsae=3' has 'bsae=3' (did you mean base?); {MLFQ_TAKES}"),
        ("fcfs:base=3", "'fcfs:base=3' has 'base=3'; it takes no options"),
        ("reserve:.1,abov=3", "'reserve:.1,abov=3' has 'abov=3' (did you mean above?); its options are above, written "
         "NAME=VALUE"),
    ],
)  # fmt: skip
def test_an_option_that_an_order_lacks_is_answered_with_its_own(text: str, message: str) -> None:
    with pytest.raises(WrongValue) as refused:
        load(text)
    assert str(refused.value) == f"order {message}"


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


PREDICTOR = "python:tests.order.own_predictor:by_class"


def test_a_predictor_of_ones_own_ranks_by_its_predictions() -> None:
    order = load(f"srpt:{PREDICTOR},bound=0.5", allow_python=True)
    chat, other = (order.rank(progress(class_name=name), view()) for name in ("chat", "batch"))
    assert chat.value < other.value and order.rank_group(progress()) is None
    assert order.displaces(chat_at(99), chat_at(99), view()) and not order.displaces(chat_at(99), chat_at(101), view())
    assert load_order(f"srpt:{PREDICTOR}").digest == Srpt(load_order(f"srpt:{PREDICTOR}").name, by_class).digest


def chat_at(tokens: int) -> Progress:
    return progress(class_name="chat", output_tokens=tokens)


def test_a_predictor_is_named_by_its_code_wherever_it_is() -> None:
    """A name in traces and reports is no module path."""
    label = f"by_class@{digest_of(by_class)[:12]}"
    order = load(f"urgent/srpt:{PREDICTOR},bound=0.5,victims=cheapest,worth=price", allow_python=True)
    assert order.name == f"urgent/srpt:{label},bound=0.5,victims=cheapest,worth=price"
    own = load("urgent/python:tests.order.ten_line_order:ShortPromptsFirst", allow_python=True)
    assert own.name.startswith("urgent/short-prompts@") and own.label == own.name


@pytest.mark.parametrize("text", [f"srpt:{PREDICTOR}", f"urgent/srpt:{PREDICTOR}", "srpt:python:no_such:thing"])
def test_a_predictor_of_ones_own_is_loaded_only_where_that_is_allowed(text: str) -> None:
    with pytest.raises(NotAllowed, match="predictor 'python:"):
        load(text)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("tests.order.own_predictor:nothing", "has no 'nothing'; the form is python:MODULE:FACTORY"),
        ("tests.order.test_spec:PREDICTOR", "should be called with request and state"),
        ("tests.order.test_spec:chat_at", "chat_at should be called with request and state"),
        ("tests.order.ten_line_order:ShortPromptsFirst", "should be called with request and state"),
    ],
)
def test_what_is_no_predictor_is_refused_by_name(name: str, problem: str) -> None:
    with pytest.raises(ExtensionError, match=f"^predictor 'python:{name}': ") as refused:
        load(f"srpt:python:{name}", allow_python=True)
    assert problem in str(refused.value)


class Constant:
    def __call__(self, request: Progress, state: Any) -> float:
        return 7.0


def constant() -> Constant:
    return Constant()


@pytest.mark.parametrize("name", ["Constant", "constant"])
def test_what_makes_a_predictor_is_called_for_it(name: str) -> None:
    order = load(f"srpt:python:tests.order.test_spec:{name}", allow_python=True)
    assert order.rank(progress(), view()) == load("srpt:limit").rank(progress(max_output_tokens=7), view())
    assert order.name.startswith("srpt:Constant@")


@pytest.mark.parametrize("answer", [nan, None, "7", inf])
def test_a_prediction_that_is_no_number_is_refused_by_name(answer: Any) -> None:
    with pytest.raises(OrderError, match=rf"^order mine: the predictor gave {answer!r}, should be a finite number of"):
        Srpt("mine", lambda request, state: answer).rank(progress(), view())
