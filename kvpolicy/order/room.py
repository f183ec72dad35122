"""Making room: whom to displace before a step, so that those who wait come in during that step.

All or nothing: a victim is taken only where, together with others, it lets a waiting request in. What the running
requests take in the step is theirs first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvpolicy.order.base import Order, Progress, View
from kvpolicy.order.candidates import Choice, Wants, choice_of

MAX_HEADS = 64
"""Waiting requests that are looked at in one step."""
MAX_BACK_OFF = 16
"""Most steps without another look, after one that could let nobody in."""


class Engine(Protocol):
    """What is asked of an engine about to schedule a step."""

    def heads(self) -> Iterable[Progress]:
        """Waiting requests that could be admitted in this step but for blocks and places, in the order of service."""
        ...

    def running(self) -> Sequence[Progress]:
        """Running requests that may lose their blocks, in the order of service."""
        ...

    def need_blocks(self, waiting: Progress) -> int:
        """Blocks that must be free for it to be admitted."""
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


@dataclass(slots=True)
class _Plan:
    victims: list[Progress] = field(default_factory=list)
    let_in: list[Progress] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)


def make_room(order: Order, engine: Engine, space: Space, view: View, records: bool = False) -> Taken:
    """Choose victims for the waiting requests, one after the other in the order of service, until one cannot be let in.

    A request is displaced only by one of a lower rank, only after its quantum, and only if ``order`` agrees.
    ``records``: whether :attr:`Taken.choices` are wanted, which takes the time to price the candidates.
    """
    free, places, budget = space.free_blocks, space.places, space.budget_tokens
    plan = _Plan()
    running = engine.running()
    left = [other for other in running if other.served_tokens >= order.quantum_tokens]
    missed = False
    before_blocks = before_places = 0
    for number, waiting in enumerate(engine.heads()):
        if budget <= 0 or number == MAX_HEADS or not left:
            break
        if waiting.rank >= left[-1].rank:
            if not waiting.computed_tokens:
                break
            # Loaded, for want of a last block: whatever its rank, it is admitted before those without blocks.
            before_blocks += engine.need_blocks(waiting)
            before_places += 1
            continue
        need = engine.need_blocks(waiting)
        if not waiting.computed_tokens:
            need, wanted_places = need + before_blocks, 1 + before_places
        else:
            wanted_places = 1
        victims: list[Progress] = []
        candidates: list[Progress] = []
        preferred: Sequence[Progress] = ()
        found_free, found_places = free, places
        if need > free or places < wanted_places:
            candidates = [
                other for other in left if waiting.rank < other.rank and order.displaces(waiting, other, view)
            ]
            preferred = order.victims(waiting, candidates, view)
            for victim in preferred:
                if need <= found_free and found_places >= wanted_places:
                    break
                victims.append(victim)
                found_free += engine.freed_blocks(victim, waiting)
                found_places += 1
        fits = need <= found_free and found_places >= wanted_places
        few = len(plan.victims) + len(victims) <= order.max_victims
        if not (fits and few and (not victims or order.worth(waiting, victims, view))):
            missed = True
            break
        if victims and records:
            wants = Wants(need, free, wanted_places, places)
            probability = order.probability(waiting, victims, candidates, view)
            plan.choices.append(
                choice_of(waiting, preferred, len(victims), wants, probability, engine.freed_blocks, view.price)
            )
        if victims:
            taken = {victim.number for victim in victims}
            left = [other for other in left if other.number not in taken]
            plan.victims += victims
            plan.let_in.append(waiting)
        free, places = found_free - need, found_places - wanted_places
        before_blocks = before_places = 0
        budget -= max(1, waiting.prompt_tokens + waiting.output_tokens - waiting.computed_tokens)
    return Taken(tuple(plan.victims), tuple(plan.let_in), missed, tuple(plan.choices))


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
