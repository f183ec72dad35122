"""The order by class, alone and in layers."""

from __future__ import annotations

from math import inf

import pytest

from kvpolicy.fields import WrongValue
from kvpolicy.order import Order, load
from kvpolicy.order.by_class import ranked_classes, unlisted_classes
from tests.order.made import progress, view


def rank_of(order: Order, class_name: str, **values: int) -> tuple[float, ...]:
    return order.rank(progress(class_name=class_name, **values), view(state=order.initial_state())).value


def test_classes_go_in_the_order_listed() -> None:
    order = load("classes:interactive+default+batch")
    assert [rank_of(order, name) for name in ("interactive", "default", "batch", "other", "more")] == [
        (0,), (1,), (2,), (3,), (3,)
    ]  # fmt: skip
    assert order.displaces_by_rank and (order.quantum_tokens, order.promote_s) == (0, inf)


def test_within_a_class_the_inner_order_decides() -> None:
    order = load("classes:interactive+batch,promote=30/mlfq:base=4")
    chat, new, old = (
        progress(number, class_name=name, output_tokens=tokens)
        for number, (name, tokens) in enumerate((("interactive", 50), ("batch", 0), ("batch", 50)))
    )
    state = order.initial_state()
    ranks = [order.rank(one, view(state=state)).value for one in (chat, new, old)]
    assert ranks == sorted(ranks) and len(set(ranks)) == 3
    assert order.displaces(chat, new, view(state=state)) and order.displaces(new, old, view(state=state))
    assert (order.quantum_tokens, order.promote_s) == (4, 30.0)


def test_options_and_victims() -> None:
    order = load("classes:a,quantum=8,victims=least-computed")
    assert order.quantum_tokens == 8 and list(ranked_classes(order)) == ["a"]


def test_the_ranked_classes_an_order_are_found_in_its_parts() -> None:
    assert list(ranked_classes(load("urgent/classes:a+b/mlfq"))) == ["a", "b"]
    assert not list(ranked_classes(load("urgent/mlfq")))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("classes", "lacks what follows its name"),
        ("classes:a+", "has the class ''"),
        ("classes:a b", "has the class 'a b', should be 1 to 64 letters"),
        ("classes:a+a", "has a twice"),
        ("classes:a,base=4", "has 'base=4'; its options are quantum, promote"),
    ],
)
def test_a_list_that_is_wrong_is_named(text: str, named: str) -> None:
    with pytest.raises(WrongValue) as told:
        load(text)
    assert named in str(told.value)


def test_classes_that_a_server_does_not_grant_are_warned_of() -> None:
    order = load("classes:chat+default+batch/mlfq:worth=price")
    (warning,) = unlisted_classes(order, ["chat", "other"])
    assert warning == f"order {order.name} ranks by the class batch, which --classes does not list: no request is of it"
    assert unlisted_classes(order, ["chat", "batch"]) == unlisted_classes(load("urgent"), []) == []
