"""Making room: whom to displace before a step, so that those who wait come in during that step.

All or nothing: a victim is taken only where, together with others, it lets a waiting request in. What the running
requests take in the step is theirs first. A look costs by the requests that it considers, not by those that run: the
running ones are looked at from the last one on, and only as many as may be needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Protocol

from kvpolicy.order.base import Order, Progress, View, among
from kvpolicy.order.candidates import Choice, Wants, choice_of

MAX_HEADS = 64
"""Waiting requests that are looked at in one step."""
MAX_ASKED = 64
"""Running requests that an order is asked about for one waiting request."""
MAX_BACK_OFF = 16
"""Most steps without another look, after one that could let nobody in."""


class Engine(Protocol):
    """What is asked of an engine about to schedule a step."""

    def heads(self) -> Iterable[Progress]:
        """Waiting requests that could be admitted in this step but for blocks and places, in the order of service."""
        ...

    def last_running(self) -> Iterable[Progress]:
        """Running requests that may lose their blocks, the last in the order of service first; read as needed."""
        ...

    def free_blocks(self) -> int:
        """Blocks that are free now."""
        ...

    def held_blocks(self, running: Progress) -> int:
        """Blocks of the request, shared ones included: what it frees is at most that."""
        ...

    def space(self) -> Space:
        """What the step has left. Asked only where somebody may be let in."""
        ...

    def need_blocks(self, waiting: Progress) -> int:
        """Blocks that must be free for it to be admitted, :meth:`spare_blocks` among them."""
        ...

    def spare_blocks(self) -> int:
        """Blocks of each need that must be free beside what the request takes, and are free for the next one again."""
        ...

    def freed_blocks(self, running: Progress, waiting: Progress) -> int:
        """Blocks that ``waiting``, whose need was asked for last, gains once ``running`` has lost its own. Those that
        it would take over from the prefix cache are no gain: its need counts on them already."""
        ...


@dataclass(slots=True)
class Space:
    """What a step has left for waiting requests, once the running ones have what they take in it."""

    free_blocks: int
    places: int
    """Requests that may run besides."""
    budget_tokens: int
    chunked: bool = True
    """Whether a prompt may be computed in parts. Otherwise what is left of the budget must cover all of it."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Whom to displace."""

    victims: tuple[Progress, ...] = ()
    let_in: tuple[Progress, ...] = ()
    """Waiting requests for which they make room."""
    missed: bool = False
    """Whether somebody of a lower rank than a running request could not be let in."""
    choices: tuple[Choice, ...] = ()
    """How the victims of each were chosen, where this is recorded."""
    in_vain: bool = False
    """Whether there was nobody to displace and nobody to do it for."""
    stopped_at: tuple[float, ...] | None = None
    """Rank of the waiting request that was looked at last, where it was not let in."""


@dataclass(slots=True)
class _Plan:
    victims: list[Progress] = field(default_factory=list)
    let_in: list[Progress] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)


class _Left:
    """Running requests that may be displaced and are not taken yet, the last in the order of service first."""

    def __init__(self, order: Order, engine: Engine, view: View) -> None:
        self._order, self._view = order, view
        quantum, now_s = order.quantum_tokens, view.now_s
        self._unread = (
            other for other in engine.last_running() if other.served_tokens >= quantum and other.cools_until_s <= now_s
        )
        self._read: list[Progress] = []

    def __iter__(self) -> Iterator[Progress]:
        yield from self._read.copy()
        for other in self._unread:
            self._read.append(other)
            yield other

    def last(self) -> Progress | None:
        return next(iter(self), None)

    def candidates(self, waiting: Progress) -> list[Progress]:
        """Those that ``waiting`` may displace, in the order of service: as many as it wants to see."""
        found: list[Progress] = []
        for asked, other in enumerate(self):
            if len(found) == self._order.max_candidates or asked == MAX_ASKED or other.rank <= waiting.rank:
                break
            if self._order.displaces(waiting, other, self._view):
                found.append(other)
        return found[::-1]

    def take(self, victims: Iterable[Progress]) -> None:
        taken = {victim.number for victim in victims}
        self._read = [other for other in self._read if other.number not in taken]


@dataclass(slots=True)
class _Search:
    """Victims that together let a request in, or those up to which it was tried."""

    wants: Wants
    victims: list[Progress] = field(default_factory=list)
    candidates: list[Progress] = field(default_factory=list)
    preferred: Sequence[Progress] = ()
    """The candidates in the order in which they are taken."""
    free_blocks: int = 0
    """Once the victims are displaced."""
    places: int = 0

    @property
    def fits(self) -> bool:
        return self.wants.need_blocks <= self.free_blocks and self.wants.need_places <= self.places


def make_room(order: Order, engine: Engine, view: View, records: bool = False) -> Taken:
    """Choose victims for the waiting requests, one after the other in the order of service, until one cannot be let in.

    A request is displaced only by one of a lower rank, only after its quantum and its cool-down, and only if ``order``
    agrees. Where several requests that load come in together, what prefills have reserved is part of the need of each,
    so that more may be displaced than they take.

    ``records``: whether :attr:`Taken.choices` are wanted, which takes the time to price the candidates.
    """
    plan, left = _Plan(), _Left(order, engine, view)
    space: Space | None = None
    missed = False
    stopped_at: tuple[float, ...] | None = None
    spare_blocks = before_blocks = before_places = 0
    for number, waiting in enumerate(engine.heads()):
        last, stopped_at = left.last(), waiting.rank
        if number == MAX_HEADS or last is None:
            break
        if not number:
            spare_blocks = engine.spare_blocks()
        if waiting.rank >= last.rank:
            if not waiting.computed_tokens:
                break
            # Loaded, for want of a last block: whatever its rank, it is admitted before those without blocks.
            before_blocks += engine.need_blocks(waiting) - spare_blocks
            before_places += 1
            stopped_at = None
            continue
        need, wanted_places = engine.need_blocks(waiting), 1
        if not waiting.computed_tokens:
            need, wanted_places = need + before_blocks, 1 + before_places
        if space is None:
            if _cannot_fit(need, left.candidates(waiting), order, engine):
                missed = True
                break
            space = engine.space()
        if space.budget_tokens <= 0:
            break
        tokens = max(1, waiting.prompt_tokens + waiting.output_tokens - waiting.computed_tokens)
        if not space.chunked and tokens > space.budget_tokens:
            missed = True
            break
        found = _search(waiting, Wants(need, space.free_blocks, wanted_places, space.places), left, order, engine, view)
        few = len(plan.victims) + len(found.victims) <= order.max_victims
        if not (found.fits and few and (not found.victims or order.worth(waiting, found.victims, view))):
            missed = True
            break
        if found.victims:
            if records:
                plan.choices.append(_choice(waiting, found, order, engine, view))
            left.take(found.victims)
            plan.victims += found.victims
            plan.let_in.append(waiting)
        space.free_blocks, space.places = found.free_blocks - (need - spare_blocks), found.places - wanted_places
        space.budget_tokens -= tokens
        before_blocks = before_places = 0
        stopped_at = None
    in_vain = space is None and not missed
    return Taken(tuple(plan.victims), tuple(plan.let_in), missed, tuple(plan.choices), in_vain, stopped_at)


def _search(waiting: Progress, wants: Wants, left: _Left, order: Order, engine: Engine, view: View) -> _Search:
    found = _Search(wants, free_blocks=wants.free_blocks, places=wants.free_places)
    if found.fits:
        return found
    found.candidates = left.candidates(waiting)
    found.preferred = among(order, "victims", found.candidates, order.victims(waiting, found.candidates, view))
    for victim in found.preferred:
        found.victims.append(victim)
        found.free_blocks += engine.freed_blocks(victim, waiting)
        found.places += 1
        if found.fits:
            break
    return found


def _choice(waiting: Progress, found: _Search, order: Order, engine: Engine, view: View) -> Choice:
    probability = order.probability(waiting, found.victims, found.candidates, view)
    taken = len(found.victims)
    return choice_of(waiting, found.preferred, taken, found.wants, probability, engine.freed_blocks, view.price)


def _cannot_fit(need: int, candidates: list[Progress], order: Order, engine: Engine) -> bool:
    """Whether a request does not fit whatever is displaced for it, growth of the running ones and blocks that are
    shared left out of account."""
    lacking = need - engine.free_blocks()
    if lacking <= 0:
        return False
    return lacking > sum(nlargest(order.max_victims, map(engine.held_blocks, candidates)))


@dataclass(slots=True)
class BackOff:
    """After a step in which nobody could be let in, the next looks are made at growing distances, unless something
    happens meanwhile."""

    next_step: int = 0
    _wait: int = 1

    def missed(self, step: int) -> None:
        self.next_step, self._wait = step + self._wait, min(2 * self._wait, MAX_BACK_OFF)

    def reset(self) -> None:
        self.next_step, self._wait = 0, 1
