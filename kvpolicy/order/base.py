"""The base class of orders: which request is served first, and which one makes room for it.

A :class:`~kvpolicy.policy.Policy` says *how* a victim's state is kept; an order says *whether* somebody is displaced,
and *whom*. Both are pure: the same objects run in a server and in the simulators. An order of one's own implements
:meth:`Order.rank`::

    class ShortPromptsFirst(Order):
        name = "short-prompts"
        displaces_by_rank = True

        def rank(self, request, view):
            return Rank((request.prompt_tokens,))

:class:`~kvpolicy.order.ranks.Ranks` keeps the ranks of all requests and asks again only where one may have changed;
:func:`~kvpolicy.order.room.make_room` makes room for those that wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from math import copysign, floor, inf, isinf, log
from typing import Any, NamedTuple

from kvpolicy.code_digest import digest_of, is_from_library, label_of
from kvpolicy.errors import KVPolicyError
from kvpolicy.request_marks import DEFAULT_CLASS, NO_HINTS, Hints

MAX_SHOWN = 32
"""Running requests that an order which chooses among them is shown."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One unfinished request, as an order sees it."""

    number: int
    """Rises in the order of arrival; decides between equals."""
    arrival_s: float
    priority: int
    """As the client gave it, within what the operator allows; lower is more urgent, as in vLLM."""
    prompt_tokens: int
    output_tokens: int
    """Generated so far, those included that a scheduled step will bring."""
    max_output_tokens: int
    """After so many it ends, if not before."""
    computed_tokens: int
    """Tokens whose KV is on the device."""
    served_tokens: int = 0
    """Output tokens since it was last admitted."""
    preemptions: int = 0
    rank: tuple[float, ...] = ()
    """Its present rank, as :class:`~kvpolicy.order.ranks.Ranks` knows it; lower goes first. Empty before the first."""
    ttft_s: float | None = None
    """Seconds after its arrival by which the first token should be out; None where nothing was asked for."""
    tpot_s: float | None = None
    """Seconds that a reader takes for one token; None where nothing was asked for."""
    class_name: str = DEFAULT_CLASS
    """Class of service that it belongs to."""
    cools_until_s: float = -inf
    """Until then it may not be displaced, as it has just come back."""
    hints: Hints = NO_HINTS
    """What it says of its KV: for how long its window will be of use, and whether it ends a session."""


class OrderError(KVPolicyError):
    """An answer of an order that is not what its method should give; the message names both."""

    @classmethod
    def of(cls, order: Order, method: str, answer: object, should: str) -> OrderError:
        """The error holds the text alone: neither an order nor its answer may be picklable, and a worker process hands
        its errors on as pickles."""
        return cls(f"order {order.label}: {method} gave {answer!r}, should be {should}")


class Rank(NamedTuple):
    """A rank, and how long it holds."""

    value: tuple[float, ...]
    """Lower goes first; compared element by element, then by arrival."""
    until_tokens: float = inf
    """Output tokens at which it may change."""
    until_s: float = inf
    """Time at which it may change."""


def checked_rank(order: Order, rank: object) -> Rank:
    """The rank itself. Raises OrderError for anything else, and for one that cannot be compared: NaN has no order."""
    if not isinstance(rank, Rank) or not _is_comparable(rank):
        raise OrderError.of(order, "rank", rank, "a kvpolicy.order.Rank of a tuple of numbers, without NaN")
    return rank


def _is_comparable(rank: Rank) -> bool:
    value, until_tokens, until_s = rank
    try:
        return isinstance(value, tuple) and all(-inf <= one <= inf for one in (*value, until_tokens, until_s))
    except TypeError:
        return False


def among(order: Order, method: str, running: Sequence[Progress], chosen: object) -> list[Progress]:
    """Those chosen, each once. Raises OrderError for anything else than some of the ``running`` requests."""
    if chosen == ():
        return []
    by_number = {other.number: other for other in running}
    try:
        return [by_number[number] for number in dict.fromkeys(one.number for one in chosen)]  # type: ignore[attr-defined]
    except (TypeError, AttributeError, KeyError) as error:
        raise OrderError.of(order, method, chosen, "a list of running requests that it was shown") from error


def levels(value: tuple[float, ...], ratio: float) -> tuple[float, ...]:
    """The numbers of the levels that a rank's values are in; see :attr:`Order.rank_ratio`."""
    return value if ratio <= 1.0 else tuple(_level(one, ratio) for one in value)


def _level(value: float, ratio: float) -> float:
    """Levels are numbered from 0, which holds all below 1, and alike on both sides of it."""
    if isinf(value):
        return value
    return copysign(floor(log(max(1.0, abs(value))) / log(ratio) + 1e-9), value)


@dataclass(frozen=True, slots=True)
class View:
    """What an order may know of the engine besides the requests. Block counts are those of one rank."""

    now_s: float
    block_size: int
    device_blocks: int
    """Usable blocks of the device."""
    state: Any = None
    """The order's own state."""
    price: Callable[[Progress], float | None] | None = None
    """Predicted engine seconds of displacing a running request, by the cheaper option; None where no policy predicts
    costs. Not to be kept: it is valid during the call."""
    unfinished: int = 0
    """Requests that wait or run."""
    served_s: Callable[[Progress], float] | None = None
    """Seconds since a running request was admitted; None where it is not known. Valid during the call, as ``price``."""


class Order(ABC):
    """Who is served first. All methods are pure functions of their arguments."""

    name: str
    """Name in reports and traces; orders that rank differently must have different names."""
    displaces_by_rank: bool = False
    """Whether a waiting request may take the blocks of a running one of a higher rank. Otherwise requests lose their
    blocks only where memory runs out, as in stock vLLM, and the ranks decide who waits and who loses them first."""
    quantum_tokens: int = 0
    """Output tokens that a request gets between its admission and the first time that another may displace it."""
    promote_s: float = inf
    """Seconds of waiting after which a request goes before all others, for one quantum; inf for never."""
    max_victims: int = 8
    """Requests displaced in one step, at most."""
    cool_down_s: float = 0.0
    """Seconds after its return in which a request that was preempted may not be displaced."""
    rank_ratio: float = 1.0
    """Ratio of neighbouring levels to which the values of a rank are rounded; 1 takes them as they are. For an order
    whose ranks are measures, such as predicted seconds: whoever is ahead by little displaces nobody then."""
    max_held_steps: int = 16
    """Steps in a row in which a request may be held, at most."""

    @property
    def digest(self) -> str:
        """SHA-256 of the order's values and code. See :mod:`kvpolicy.code_digest` for its limits."""
        return digest_of(self)

    @property
    def label(self) -> str:
        """Name in reports and traces; for a class from outside this package followed by the start of its digest."""
        return label_of(self)

    def __repr__(self) -> str:
        return self.label

    @property
    def holds(self) -> bool:
        """Whether :meth:`hold` may name anybody. It is asked in every step then, with all that run."""
        return type(self).hold is not Order.hold

    @property
    def gates(self) -> bool:
        """Whether :meth:`admits` may refuse anybody. A server that asks looks the waiting request up in its prefix
        cache, whenever somebody could be admitted."""
        return type(self).admits is not Order.admits

    @property
    def max_candidates(self) -> int:
        """Running requests of the highest ranks that :meth:`victims` is shown, at most."""
        takes_the_last = type(self).victims is Order.victims
        return self.max_victims if takes_the_last else MAX_SHOWN

    @abstractmethod
    def rank(self, request: Progress, view: View) -> Rank:
        """Rank of the request, and until when it holds. Asked when it arrives and whenever the rank may have changed.

        Few distinct values are better than many: whoever has the lower rank by however little may displace another.
        """

    @property
    def groups_ranks(self) -> bool:
        """Whether :meth:`rank_group` is asked."""
        return _groups_its_ranks(type(self))

    def rank_group(self, request: Progress) -> Hashable:
        """What the rank follows from besides the request's output tokens and the order's state, where that never
        changes while the request is unfinished: requests of equal groups share ranks, and most of the cost. Only ranks
        with a :attr:`Rank.until_tokens` and no :attr:`Rank.until_s` are shared. None, as by default, where the rank
        follows from more, such as the time.

        A subclass from outside this package has to define it anew, or it is not asked: the subclass may rank otherwise.
        """
        return None

    def displaces(self, waiting: Progress, running: Progress, view: View) -> bool:
        """Whether ``waiting`` may take the place of ``running``. Asked for pairs in which the former has the lower
        rank."""
        return True

    def victims(self, waiting: Progress, running: Sequence[Progress], view: View) -> Sequence[Progress]:
        """In what order those that ``waiting`` may displace are taken: by default the highest rank, then the latest
        arrival, first. ``running`` is in the order of service: the last :attr:`max_candidates` that may be displaced.
        """
        return list(reversed(running))

    def worth(self, waiting: Progress, victims: Sequence[Progress], view: View) -> bool:
        """Whether letting ``waiting`` in is worth displacing all of ``victims``."""
        return True

    def admits(self, waiting: Progress, free_after_blocks: int, view: View) -> bool:
        """Whether ``waiting`` may be admitted beside running requests, if ``free_after_blocks`` are left then."""
        return True

    def hold(self, running: Sequence[Progress], view: View) -> Sequence[Progress]:
        """Running requests that sit this step out, keeping their blocks: nobody by default.

        ``running`` is in the order of service. Whoever was held for :attr:`max_held_steps` in a row runs in the next
        step, and where all would be held, the first one runs.
        """
        return ()

    def initial_state(self) -> Any:
        """The state of an order that learns: a frozen value."""
        return None

    def finished(self, state: Any, request: Progress) -> Any:
        """Return the state after a request has ended by itself."""
        return state

    def probability(
        self, waiting: Progress, victims: Sequence[Progress], running: Sequence[Progress], view: View
    ) -> float:
        """With which ``victims`` are the first of those that :meth:`victims` gives, in this sequence: for traces, so
        that other rules can be judged by them. 1 for an order that draws nothing."""
        return 1.0


def group_of(order: Order, request: Progress) -> Hashable:
    """The order's :meth:`Order.rank_group`; None where it is not asked."""
    return order.rank_group(request) if order.groups_ranks else None


@cache
def _groups_its_ranks(kind: type[Order]) -> bool:
    """Whether the class has its own :meth:`Order.rank_group`, or one of this package's whose rank it takes over."""
    for one in kind.__mro__:
        if "rank_group" in vars(one):
            return one is not Order
        if "rank" in vars(one) or not is_from_library(one):
            return False
    return False
