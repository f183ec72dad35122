"""Orders by name: the names (specs) are the same in all commands and configurations."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from kvpolicy import extensions
from kvpolicy.code_digest import LABEL_DIGITS, digest_of
from kvpolicy.fields import WrongValue, like, refuse_other
from kvpolicy.order import rules
from kvpolicy.order.base import Order
from kvpolicy.order.by_class import ByClass
from kvpolicy.order.deadline import Deadline
from kvpolicy.order.draws import WithDraws
from kvpolicy.order.kept_first import KeptFirst
from kvpolicy.order.worth import WithWorth
from kvpolicy.order.wrapper import Wrapper
from kvpolicy.request_marks import CLASS_NAME, CLASS_WORDS

GROUP = "kvpolicy.orders"
"""Entry point group of the orders that installed packages offer by name."""
WORTH = ("price",)
"""Rules of whether displacing is worth it."""
USUAL: Mapping[str, str] = {"victims": "last", "explore": "0", "worth": "always"}
"""Options of every order that displaces requests, as they are where they are not given."""
FORMS: Mapping[str, str] = {
    "fcfs": "first come, first served, as vLLM does",
    "priority": "vLLM's priority scheduling: by priority, then arrival, and nobody displaced for a newcomer",
    "urgent": "by priority, and more urgent requests displace less urgent ones",
    "reserve:SHARE": "by priority; that share of memory is kept free of requests above priority 0",
    "mlfq": "multi-level feedback: who has got few tokens goes first, by levels that double",
    "las": "least attained service: who has got the fewest tokens goes first",
    "srpt:PREDICTOR": "shortest remaining time; PREDICTOR is lengths (those seen so far), limit (max_tokens), or "
    f"{extensions.FORM}, a function of your own",
    "gittins": "by the Gittins index of the lengths seen so far per unit of KV memory",
    "deadline": "least slack to what a reader expects: ttft and tpot in seconds",
    "classes:A+B": "by class, in the order listed, and an earlier class displaces later ones; those not listed go last",
    "hints": "by hints: requests that ask to keep their KV displace others, and those that come once go last",
    "ORDER/ORDER": "by the first, and among its equals by the second, as in urgent/mlfq",
    extensions.FORM: "an order of your own, which FACTORY of the module MODULE makes",
}
"""Forms of the names, with what each order does: for error messages, for help, and for the pages."""
MIN_PROMOTE_S = 0.1
"""Shortest promotion. Every promotion may preempt a running request; a shorter one is near the time of a step."""
OPTIONS: Mapping[str, str] = {
    "quantum": "output tokens that a request gets before it may be displaced",
    "base": "for mlfq: tokens of the first level, which are its quantum",
    "promote": f"seconds of waiting, {MIN_PROMOTE_S} or more, after which a request goes first, for one quantum",
    "cool": "seconds after its return in which a request that was preempted may not be displaced again",
    "victims": f"last, {' or '.join(rules.VICTIM_RULES)}: who is displaced among equals",
    "worth": f"always, or {' or '.join(WORTH)}: displace only where that gains more waiting than its price costs",
    "explore": "share of the choices in which victims among equals are drawn, so that logs can judge other rules",
    "bound": "for srpt: share of its predicted length up to which a request may be displaced",
    "ttft": "for deadline: seconds to the first token",
    "tpot": "for deadline: seconds per token after it",
    "step": "for deadline: seconds of slack in the first level; the others double",
    "ahead": "for deadline: slack above which a request that has its first token sits out while another is late",
    "late": "for deadline: seconds behind its reader from which a request goes after all others",
    "above": "for reserve: the highest priority that may use the reserve",
}
NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
"""A number as an option's value: float() also takes spaces, underscores, a sign and the digits of other scripts."""
OPTIONS_HELP = "options are written ORDER:NAME=VALUE,NAME=VALUE"
HELP = (
    f"{'; '.join(f'{form}: {what}' for form, what in FORMS.items())}. "
    f"{OPTIONS_HELP}: {'; '.join(f'{name}: {what}' for name, what in OPTIONS.items())}"
)
PREDICTORS: Mapping[str, rules.Predictor] = {"lengths": rules.by_lengths, "limit": rules.by_limit}


@dataclass(frozen=True)
class Kind:
    """How one order is made from its options."""

    make: Callable[..., Order]
    options: Mapping[str, tuple[str, Callable[[Spec, str, str], Any]]]
    """By the option's name: the argument it gives, and how it is read."""
    value: tuple[str, Callable[[Spec, str, str], Any]] | None = None
    """The argument that the text without a name gives, and how it is read."""
    needs_value: bool = False


@dataclass(frozen=True)
class Spec:
    """A text that names an order, for errors, and whether it may name a module."""

    text: str
    allow_python: bool = False

    def refusal(self, problem: str) -> WrongValue:
        return WrongValue("order", f"{self.text!r} {problem}; the orders are {', '.join(FORMS)}; {OPTIONS_HELP}")

    def option_refusal(self, part: str, problem: str, known: Sequence[str]) -> WrongValue:
        """``known``: the options that this order takes."""
        takes = f"its options are {', '.join(known)}, written NAME=VALUE" if known else "it takes no options"
        return WrongValue("order", f"{self.text!r} has {part!r}{problem}; {takes}")


def load_order(order: str | Order, argument: str = "order") -> Order:
    """Return the order itself, or load the order of that name; see :func:`load`.

    A name may be a module path, ``python:MODULE:FACTORY``, which runs that module: do not pass names read from a file.
    """
    refuse_other(argument, order, (str, Order), "a name or an Order")
    return checked(order) if isinstance(order, Order) else load(order, allow_python=True)


def load(text: str, allow_python: bool = False) -> Order:
    """Load the order of that name, as in :data:`FORMS`.

    ``allow_python``: whether the name may be a module path, which runs code. Raises WrongValue, listing the forms, for
    an unknown name or option; :class:`kvpolicy.extensions.ExtensionError` for a module path that is refused or gives no
    order.
    """
    spec = Spec(text, allow_python)
    if extensions.is_module_path(text):
        return checked(extensions.from_module(text, Order, "order", allow_python))
    outer, slash, inner = text.partition("/")
    if slash and not (outer and inner):
        raise spec.refusal("lacks the order " + ("after" if outer else "before") + " its slash")
    if slash:
        first = load(outer, allow_python)
        for name in _choosing(first):
            raise spec.refusal(f"has {name}= before its last order, which alone chooses among equals")
        second = load(inner, allow_python)
        return rules.Layered(f"{first.label}/{second.label}", first, second)
    kind, _, tail = text.partition(":")
    if kind not in KINDS:
        order = extensions.from_entry_point(text, GROUP, Order, "order")
        if order is None:
            raise spec.refusal(f"is no order{like(text, FORMS)}")
        return checked(order)
    value, options = _split(spec, tail, _options_of(KINDS[kind]))
    extras = {name: options.pop(name, usual) for name, usual in USUAL.items()}
    order = _made(spec, KINDS[kind], value, options)
    victims = _one_of(spec, "victims", extras["victims"], ("last", *rules.VICTIM_RULES))
    share = _share(spec, "explore", extras["explore"])
    worth = _one_of(spec, "worth", extras["worth"], ("always", *WORTH))
    if victims != "last":
        order = rules.WithVictims(order.name, order, rules.VICTIM_RULES[victims])
    if share:
        order = WithDraws(order.name, order, share)
    return order if worth == "always" else WithWorth(order.name, order)


def _choosing(order: Order) -> Iterator[str]:
    """The options of the order that change whom it chooses among equals."""
    while isinstance(order, Wrapper):
        if isinstance(order, rules.WithVictims | WithDraws):
            yield "victims" if isinstance(order, rules.WithVictims) else "explore"
        order = order.base


def _one_of(spec: Spec, name: str, text: str, known: Sequence[str]) -> str:
    if text not in known:
        raise spec.refusal(f"has {name}={text}, should be {OPTIONS[name].partition(':')[0]}")
    return text


def checked(order: Order) -> Order:
    """The order itself. Raises ExtensionError for one without a name that reports and traces can use."""
    extensions.refuse_unnamed(order, "order")
    return order


def _options_of(kind: Kind) -> tuple[str, ...]:
    """Names of the options that an order takes."""
    return (*kind.options, *(USUAL if getattr(kind.make, "displaces_by_rank", False) else ()))


def _split(spec: Spec, tail: str, known: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The part without a name, and the options. ``known``: those that the order takes."""
    value = ""
    options: dict[str, str] = {}
    for part in tail.split(",") if tail else ():
        name, equals, text = part.partition("=")
        if not equals and not value and not options and name:
            value = name
        elif name in USUAL and name not in known:
            raise spec.refusal(f"has {part}, and displaces nobody")
        elif name not in known:
            raise spec.option_refusal(part, like(name, known), known)
        elif name in options or not text:
            raise spec.option_refusal(part, f", and {name} before" if text else " without a value", known)
        else:
            options[name] = text
    return value, options


def _made(spec: Spec, kind: Kind, value: str, options: Mapping[str, str]) -> Order:
    arguments: dict[str, Any] = {"name": spec.text}
    if value and kind.value is None:
        raise spec.refusal(f"has {value!r}, which it does not take")
    if kind.needs_value and not value:
        raise spec.refusal("lacks what follows its name")
    if value and kind.value is not None:
        argument, read = kind.value
        arguments[argument] = read(spec, "", value)
        if extensions.is_module_path(value):  # a name in reports and traces is no module path
            arguments["name"] = spec.text.replace(value, _label(arguments[argument]), 1)
    for name, text in options.items():
        argument, read = kind.options[name]
        arguments[argument] = read(spec, name, text)
    return kind.make(**arguments)


def _number(spec: Spec, name: str, text: str) -> float:
    number = float(text) if NUMBER.fullmatch(text) else inf
    if number == inf:
        raise spec.refusal(f"has {name}={text[:64]}, should be a finite number, 0 or above")
    return number


def _positive(spec: Spec, name: str, text: str) -> float:
    number = _number(spec, name, text)
    if not number:
        raise spec.refusal(f"has {name}={text}, should be above 0")
    return number


def _promotion(spec: Spec, name: str, text: str) -> float:
    number = _number(spec, name, text)
    if number < MIN_PROMOTE_S:
        problem = f"has {name}={text}, should be {MIN_PROMOTE_S} or above: every promotion may preempt a request"
        raise spec.refusal(problem)
    return number


def _share(spec: Spec, name: str, text: str) -> float:
    number = _number(spec, name or "SHARE", text)
    if number > 1.0:
        raise spec.refusal(f"has {name or 'SHARE'}={text}, should be a share from 0 to 1")
    return number


def _whole(spec: Spec, name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise spec.refusal(f"has {name}={text}, should be a whole number, 0 or above")
    return int(text)


def _count(spec: Spec, name: str, text: str) -> int:
    number = _whole(spec, name, text)
    if not number:
        raise spec.refusal(f"has {name}={text}, should be 1 or more")
    return number


def _signed(spec: Spec, name: str, text: str) -> int:
    return -_whole(spec, name, text[1:]) if text.startswith("-") else _whole(spec, name, text)


def _predictor(spec: Spec, name: str, text: str) -> rules.Predictor:
    if extensions.is_module_path(text):
        return extensions.function_from_module(text, "predictor", ("request", "state"), spec.allow_python)
    if text not in PREDICTORS:
        raise spec.refusal(f"has the predictor {text!r}, should be {', '.join(PREDICTORS)} or {extensions.FORM}")
    return PREDICTORS[text]


def _label(function: Callable[..., Any]) -> str:
    """Name of a user's function, and the beginning of the digest of its code and values."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{name}@{digest_of(function)[:LABEL_DIGITS]}"


def _classes(spec: Spec, name: str, text: str) -> tuple[str, ...]:
    classes = tuple(text.split("+"))
    for at, class_name in enumerate(classes):
        if not CLASS_NAME.fullmatch(class_name):
            raise spec.refusal(f"has the class {class_name!r}, should be {CLASS_WORDS}")
        if class_name in classes[:at]:
            raise spec.refusal(f"has {class_name} twice")
    return classes


_PROMOTE = {"promote": ("promote_s", _promotion), "cool": ("cool_down_s", _number)}
_QUANTUM = {"quantum": ("quantum_tokens", _whole), **_PROMOTE}
KINDS: Mapping[str, Kind] = {
    "fcfs": Kind(rules.Fcfs, {}),
    "priority": Kind(rules.Priority, {}),
    "urgent": Kind(rules.Urgent, _QUANTUM),
    "reserve": Kind(rules.Reserve, {"above": ("above", _signed)}, ("share", _share), needs_value=True),
    "mlfq": Kind(rules.Mlfq, {"base": ("quantum_tokens", _count), **_PROMOTE}),
    "las": Kind(rules.Las, {"quantum": ("quantum_tokens", _count), **_PROMOTE}),
    "srpt": Kind(rules.Srpt, {"bound": ("bound", _share), **_QUANTUM}, ("predictor", _predictor), needs_value=True),
    "gittins": Kind(rules.Gittins, {"quantum": ("quantum_tokens", _whole), **_PROMOTE}),
    "classes": Kind(ByClass, _QUANTUM, ("classes", _classes), needs_value=True),
    "hints": Kind(KeptFirst, _QUANTUM),
    "deadline": Kind(
        Deadline,
        {
            "ttft": ("ttft_s", _number),
            "tpot": ("tpot_s", _positive),
            "step": ("step_s", _positive),
            "ahead": ("ahead_s", _number),
            "late": ("late_s", _positive),
            **_QUANTUM,
        },
    ),
}
"""The orders that ship, by the part of their name before the colon."""
