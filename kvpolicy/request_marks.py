"""What a request says of itself, its class, its deadlines and hints about its KV, and what of it an operator grants.

A client sends the marks as ``kv_transfer_params["kvpolicy"]`` beside vLLM's own ``priority``. The plugin reads them in
a server, the adapter of vLLM's scheduler in a simulation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from kvpolicy.errors import KVPolicyError
from kvpolicy.fields import WrongValue

KEY = "kvpolicy"
"""Key of ``kv_transfer_params`` under which a request says what it is."""
DEFAULT_CLASS = "default"
"""Class of a request that names none."""
CLASS_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
"""What a class may be called."""
CLASS_WORDS = "1 to 64 letters, digits, dots, dashes or underscores"
MAX_DEADLINE_S = 86400.0
"""The longest deadline granted, a day: one that is longer ranks a request no differently."""
HINT_NAMES = ("keep_s", "once", "pin", "session", "ended")
"""What a request may say of its KV."""
NAMES = ("class", "ttft_s", "tpot_s", *HINT_NAMES)
"""What a request may say."""
ALL_TOKENS = 2**31 - 1
"""As many tokens to pin as the prompt has."""


@dataclass(frozen=True, slots=True)
class Hints:
    """What a request says of its KV: what of it will be asked for again. Nothing, by default."""

    keep_s: float | None = None
    """Seconds for which the whole window, prompt and output, should stay cached; for a pin, how long it lasts."""
    once: bool = False
    """Whether nothing of the request will be asked for again, save what is pinned."""
    pin_tokens: int = 0
    """Leading tokens of the prompt that other requests share and that should stay cached; :data:`ALL_TOKENS`: all."""
    session: str | None = None
    """Name of the conversation. Each request of a session takes the place of the one before it."""
    ended: bool = False
    """Whether this is the last request of its session."""

    def __bool__(self) -> bool:
        """Whether anything is said."""
        return self is not NO_HINTS and self != NO_HINTS

    def of_prompt(self, tokens: int) -> Hints:
        """The same of a prompt of so many tokens, of which no more are pinned."""
        return self if self.pin_tokens <= tokens else replace(self, pin_tokens=tokens)

    def said(self) -> dict[str, Any]:
        """As a client says it, and :func:`read_marks` reads it: what is not said is left out."""
        pin = self.pin_tokens >= ALL_TOKENS or self.pin_tokens
        values = (self.keep_s, self.once, pin, self.session, self.ended)
        return {name: value for name, value in zip(HINT_NAMES, values, strict=True) if value}


NO_HINTS = Hints()


@dataclass(frozen=True, slots=True)
class Client:
    """Whose hints count together: those of requests of one class and one ``cache_salt``, by which a gateway keeps the
    KV of its tenants apart."""

    class_name: str = DEFAULT_CLASS
    salt: bytes = field(default=b"", repr=False)
    """Differs where salts do; empty without one. In no text, as a salt is not for everybody to know."""


ANYBODY = Client()
"""All who name neither a class nor a salt."""


@dataclass(frozen=True, slots=True)
class Marks:
    """What a request is, as said or as granted."""

    class_name: str = DEFAULT_CLASS
    priority: int = 0
    """Lower is more urgent, as in vLLM."""
    ttft_s: float | None = None
    """Seconds from its arrival to its first token; None: no deadline."""
    tpot_s: float | None = None
    """Seconds per output token after the first; None: no deadline."""
    hints: Hints = NO_HINTS


NO_MARKS = Marks()
"""Of a request that says nothing and has vLLM's default priority."""


class InvalidMarks(KVPolicyError):
    """Marks that cannot be read. ``reason``: one of :data:`REASONS`, never a text that a client sent."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return REASONS[self.reason]


REASONS: Mapping[str, str] = {
    "type": "is no dictionary",
    "key": f"has another key than {', '.join(NAMES)}",
    "class": "has a class that is no name",
    "ttft_s": "has a ttft_s that is no number above 0",
    "tpot_s": "has a tpot_s that is no number above 0",
    "keep_s": "has a keep_s that is no number above 0",
    "once": "has a once that is not true or false, or that contradicts keep_s without a pin",
    "pin": "has a pin that is neither true or false nor a whole number above 0",
    "session": f"has a session that is not {CLASS_WORDS}",
    "ended": "has an ended that is not true or false, or that contradicts keep_s without a pin",
    "version": "has another action_version than 1",
    "error": "could not be read",
}
"""Why marks are not read."""


def read_marks(said: Any, priority: int = 0) -> Marks:
    """The marks that a client sent, as they are. None stands for nothing said. Raises :class:`InvalidMarks`."""
    if said is None:
        return Marks(priority=priority) if priority else NO_MARKS
    if not isinstance(said, dict):
        raise InvalidMarks("type")
    if len(said) > len(NAMES) or any(name not in NAMES for name in said):
        raise InvalidMarks("key")
    class_name = said.get("class")
    if class_name is None:
        class_name = DEFAULT_CLASS
    if not isinstance(class_name, str) or not class_name:
        raise InvalidMarks("class")
    return Marks(class_name, priority, _seconds(said, "ttft_s"), _seconds(said, "tpot_s"), _hints(said))


def _hints(said: Mapping[str, Any]) -> Hints:
    keep_s, once, ended = _seconds(said, "keep_s"), _truth(said, "once"), _truth(said, "ended")
    pin, session = said.get("pin"), said.get("session")
    if pin is None or isinstance(pin, bool):
        pin = ALL_TOKENS if pin else 0
    elif not isinstance(pin, int) or pin < 1:
        raise InvalidMarks("pin")
    if session is not None and not (isinstance(session, str) and CLASS_NAME.fullmatch(session)):
        raise InvalidMarks("session")
    if keep_s is not None and not pin and (once or ended):
        raise InvalidMarks("once" if once else "ended")
    return Hints(keep_s, once, min(pin, ALL_TOKENS), session, ended)


def _truth(said: Mapping[str, Any], name: str) -> bool:
    value = said.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise InvalidMarks(name)
    return value


def _seconds(said: Mapping[str, Any], name: str) -> float | None:
    value = said.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise InvalidMarks(name)
    try:
        return float(value)
    except OverflowError:  # a whole number beyond all floats
        raise InvalidMarks(name) from None


def as_said(marks: Marks) -> tuple[Marks, tuple[str, ...]]:
    """Grant everything, as in a simulation, whose workload holds what was granted already."""
    return marks, ()


@dataclass(frozen=True, slots=True)
class ClassLimits:
    """The most urgent that a request of a class may be. It is also what a request has that asks for nothing."""

    ttft_s: float | None = None
    """None: no deadline is granted."""
    tpot_s: float | None = None
    """None: no deadline is granted."""
    priority: int | None = None
    """None: see :meth:`Classes.grant`."""


FORM = "NAME:ttft=SECONDS,tpot=SECONDS,priority=NUMBER+NAME+..."
OPTIONS: Mapping[str, str] = {"ttft": "ttft_s", "tpot": "tpot_s", "priority": "priority"}
"""Options of a class, by the limit that each sets."""
HELP = (
    f"Classes that a client may claim for its request, {FORM}: as in interactive:ttft=0.5,tpot=0.05,priority=-1+batch. "
    "Each option is the most urgent that a request of the class may be, and what it is that asks for nothing. "
    "Default: every request is of the class default, without deadlines."
)


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes that requests may claim. The default one need not be listed."""

    limits: tuple[tuple[str, ClassLimits], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Classes:
        """From the form :data:`FORM`, all options optional. Raises WrongValue naming what is wrong."""
        limits: dict[str, ClassLimits] = {}
        for part in text.split("+"):
            name, _, options = part.strip().partition(":")
            if not CLASS_NAME.fullmatch(name):
                raise _wrong(text, f"has the class {name!r}, should be {CLASS_WORDS}")
            if name in limits:
                raise _wrong(text, f"has {name} twice")
            limits[name] = _limits(text, name, options)
        return cls(tuple(limits.items()))

    @property
    def text(self) -> str:
        """A text that :meth:`parse` accepts for these classes."""
        parts = []
        for name, limits in self.limits:
            given = {option: getattr(limits, field) for option, field in OPTIONS.items()}
            options = ",".join(f"{option}={value!r}" for option, value in given.items() if value is not None)
            parts.append(f"{name}:{options}" if options else name)
        return "+".join(parts)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.limits)

    @property
    def bounds_priority(self) -> bool:
        """Whether any class bounds the priority. Those that do not are bounded by 0, vLLM's default, then."""
        return any(limit.priority is not None for _, limit in self.limits)

    def grant(self, said: Marks) -> tuple[Marks, tuple[str, ...]]:
        """What a request is allowed to be, and names of what it claimed in vain.

        A class that is not listed becomes the default one. A deadline is never shorter than the class's, which a
        request has too that asks for none; a class without one has none. A priority is never lower than the class's,
        which a request has too that gives vLLM's default, 0. Where no class bounds it, it stays as it is. Hints are
        not granted here but by :func:`granting`.
        """
        vain: list[str] = []
        class_name, limits = said.class_name, self._of(said.class_name)
        if limits is None:
            vain.append("class")
            class_name, limits = DEFAULT_CLASS, self._of(DEFAULT_CLASS) or ClassLimits()
        ttft_s, tpot_s = _granted_s(said.ttft_s, limits.ttft_s), _granted_s(said.tpot_s, limits.tpot_s)
        priority = self._priority(said.priority, limits)
        vain += [name for name, asked, given in (("ttft_s", said.ttft_s, ttft_s), ("tpot_s", said.tpot_s, tpot_s))
                 if asked is not None and asked != given]  # fmt: skip
        if said.priority and priority != said.priority:
            vain.append("priority")
        return Marks(class_name, priority, ttft_s, tpot_s), tuple(vain)

    def _of(self, class_name: str) -> ClassLimits | None:
        for name, limits in self.limits:
            if name == class_name:
                return limits
        return ClassLimits() if class_name == DEFAULT_CLASS else None

    def _priority(self, said: int, limits: ClassLimits) -> int:
        least = limits.priority
        if least is None:
            return max(said, 0) if self.bounds_priority else said
        return max(said, least) if said else least


@dataclass(frozen=True, slots=True)
class HintLimits:
    """How much of the cached KV hints may hold back from eviction, and for how long."""

    keep_s: float = 600.0
    """The longest time, in seconds; 0: no hint holds anything back."""
    share: float = 0.5
    """Share of a tier's blocks, of all classes together."""
    class_share: float = 0.25
    """Share of a tier's blocks, of each class."""
    client_share: float | None = None
    """Share of a tier's blocks, of each :class:`Client`; None: as its class."""

    @classmethod
    def parse(cls, text: str) -> HintLimits:
        """From the form :data:`HINT_FORM`. Raises WrongValue naming what is wrong."""
        if text.strip() == "none":
            return cls(0.0, 0.0, 0.0)
        values: dict[str, float] = {}
        for part in text.split(","):
            option, _, value = part.strip().partition("=")
            field = HINT_OPTIONS.get(option)
            if field is None or field in values:
                raise _wrong_hints(text, f"has {part!r}; the options are {', '.join(HINT_OPTIONS)}, each at most once")
            try:
                values[field] = float(value)
            except ValueError:
                raise _wrong_hints(text, f"has {part!r}, should be a number") from None
        limits = cls(**values)
        if not 0 < limits.keep_s <= MAX_DEADLINE_S:
            raise _wrong_hints(text, f"has keep={limits.keep_s:g}, should be above 0, up to {MAX_DEADLINE_S:g} seconds")
        for option, share in (("share", limits.share), ("class", limits.class_share)):
            if not 0 < share <= MAX_SHARE:
                raise _wrong_hints(text, f"has {option}={share:g}, should be a share above 0, up to {MAX_SHARE:g}")
        of_class, of_client = min(limits.share, limits.class_share), limits.client_share
        if of_client is not None and not 0 < of_client <= of_class:
            raise _wrong_hints(
                text, f"has client={of_client:g}, should be a share above 0, up to that of a class, {of_class:g}"
            )
        return replace(limits, class_share=of_class)

    @property
    def text(self) -> str:
        """A text that :meth:`parse` accepts for these limits."""
        if not self.keep_s:
            return "none"
        given = {option: getattr(self, field) for option, field in HINT_OPTIONS.items()}
        return ",".join(f"{option}={value!r}" for option, value in given.items() if value is not None)

    def grant(self, said: Hints) -> tuple[Hints, tuple[str, ...]]:
        """The hints with no longer time than is allowed, and the names of those that were said in vain.

        A pin that names no time lasts as long as is allowed. One that is said in vain still says what of a request with
        ``once`` others share.
        """
        if self.keep_s:
            if said.keep_s is not None and said.keep_s > self.keep_s:
                return replace(said, keep_s=self.keep_s), ("keep_s",)
            return said, ()
        vain = [name for name, holds in (("keep_s", said.keep_s is not None), ("pin", said.pin_tokens > 0)) if holds]
        return (replace(said, keep_s=None) if vain else said), tuple(vain)


MAX_SHARE = 0.9
"""The largest share that hints may hold back: something has to be left to evict."""
HINT_OPTIONS: Mapping[str, str] = {
    "keep": "keep_s", "share": "share", "class": "class_share", "client": "client_share"
}  # fmt: skip
"""Options of the limits, by the field that each sets."""
HINT_FORM = "keep=SECONDS,share=SHARE,class=SHARE,client=SHARE"
HINT_HELP = (
    f"How much of the cached KV the hints of requests may hold back from eviction: {HINT_FORM}, for so long at most, "
    "a share of all cached blocks, of one class, and of one class and cache_salt. none: nothing. Default: "
    "keep=600,share=0.5,class=0.25, and client as class."
)


def granting(classes: Classes, limits: HintLimits) -> Callable[[Marks], tuple[Marks, tuple[str, ...]]]:
    """What grants classes, deadlines and priorities by ``classes``, and hints by ``limits``."""

    def grant(said: Marks) -> tuple[Marks, tuple[str, ...]]:
        granted, vain = classes.grant(said)
        hints, in_vain = limits.grant(said.hints)
        return replace(granted, hints=hints), (*vain, *in_vain)

    return grant


def _wrong_hints(text: str, problem: str) -> WrongValue:
    return WrongValue("hints", f"is {text!r}, which {problem}; the form is {HINT_FORM}, or none")


def _granted_s(asked_s: float | None, least_s: float | None) -> float | None:
    if asked_s is None or least_s is None:
        return least_s
    return min(max(asked_s, least_s), MAX_DEADLINE_S)


def _limits(text: str, name: str, options: str) -> ClassLimits:
    values: dict[str, Any] = {}
    for part in options.split(",") if options else ():
        option, _, value = part.partition("=")
        field = OPTIONS.get(option)
        if field is None or field in values:
            raise _wrong(text, f"has {part!r} in {name}; the options are {', '.join(OPTIONS)}, each at most once")
        values[field] = _priority_of(text, name, value) if field == "priority" else _deadline_of(text, name, part)
    return ClassLimits(**values)


def _deadline_of(text: str, name: str, part: str) -> float:
    try:
        seconds = float(part.partition("=")[2])
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= MAX_DEADLINE_S:
        raise _wrong(text, f"has {part} in {name}, should be seconds above 0, up to {MAX_DEADLINE_S:g}")
    return seconds


def _priority_of(text: str, name: str, value: str) -> int:
    if not re.fullmatch(r"-?\d{1,9}", value, re.ASCII):
        raise _wrong(text, f"has priority={value} in {name}, should be a whole number")
    return int(value)


def _wrong(text: str, problem: str) -> WrongValue:
    return WrongValue("classes", f"is {text!r}, which {problem}; the form is {FORM}")
