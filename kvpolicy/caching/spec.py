"""Caching policies by name: the names (specs) are the same in all commands and configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvpolicy import extensions
from kvpolicy.caching.adaptive import Arc, S3Fifo
from kvpolicy.caching.base import CachingPolicy
from kvpolicy.caching.by_cost import ByCost
from kvpolicy.caching.by_use import Lfu, Lru
from kvpolicy.fields import WrongValue

OFF = "off"
GROUP = "kvpolicy.caching"
"""Entry point group of the caching policies that installed packages offer by name."""
FORMS: Mapping[str, str] = {
    OFF: "host memory is for preempted requests only",
    "lru": "least recently used",
    "lfu": "least frequently used",
    "arc": "adaptive replacement",
    "s3fifo": "queues of blocks used once and used again",
    "cost": "the lowest rate of return times price, of the blocks that no other one continues",
    extensions.FORM: "a caching policy of your own, which FACTORY of the module MODULE makes",
}
"""Forms of the names, with what each policy does: for error messages, for help, and for the pages."""
HELP = "; ".join(f"{form}: {what}" for form, what in FORMS.items())
KINDS: Mapping[str, type[CachingPolicy]] = {kind.name: kind for kind in (Lru, Lfu, Arc, S3Fifo)}
Price = Callable[[int], float]
"""Seconds saved by a block that need not be computed, by its position in the prompt, from 0 on."""


def load(
    text: str, capacity: int, price: Price = lambda position: 1.0, allow_python: bool = False
) -> CachingPolicy | None:
    """Load the caching policy of that name, as in :data:`FORMS`, for ``capacity`` blocks; None for ``off``.

    ``price``: what the policy by cost goes by. ``allow_python``: whether the name may be a module path, which runs
    code. What FACTORY makes has its ``capacity`` set here. Raises WrongValue, listing the forms, for an unknown name;
    :class:`kvpolicy.extensions.ExtensionError` for a module path that is refused or gives no caching policy.
    """
    if text == OFF:
        return None
    policy = _named(text, capacity, price, allow_python)
    if policy is None:
        raise WrongValue("cache", f"{text!r} is no caching policy; they are {', '.join(FORMS)}")
    return policy


def load_for_files(text: str, capacity: int, allow_python: bool = False, field: str = "policy") -> CachingPolicy:
    """As :func:`load`, for a tier of files, which is never without a policy. All blocks save the same at first.

    Raises WrongValue that names ``field``, whatever is wrong with the name.
    """
    try:
        policy = None if text == OFF else _named(text, capacity, lambda position: 1.0, allow_python)
    except extensions.ExtensionError as error:
        raise WrongValue(field, f"cannot be used: {error}") from error
    if policy is None:
        raise WrongValue(field, f"is {text!r}, should be one of {', '.join(form for form in FORMS if form != OFF)}")
    return policy


def _named(text: str, capacity: int, price: Price, allow_python: bool) -> CachingPolicy | None:
    """None where nothing has that name."""
    if text in KINDS:
        return KINDS[text](capacity)
    if text == ByCost.name:
        return ByCost(capacity, price)
    if extensions.is_module_path(text):
        policy: CachingPolicy | None = extensions.from_module(text, CachingPolicy, "caching policy", allow_python)
    else:
        policy = extensions.from_entry_point(text, GROUP, CachingPolicy, "caching policy")
    if policy is None:
        return None
    extensions.refuse_unnamed(policy, "caching policy")
    policy.capacity = capacity
    return policy
