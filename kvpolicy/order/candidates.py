"""One choice of victims, as a trace records it: whom an order considered, what each would have cost, whom it took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpolicy.order.base import Progress

MAX_RECORDED = 16
"""Candidates that are recorded of one choice; those that were taken come first, and are recorded in any case."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running request that could have been displaced."""

    request: Progress
    freed_blocks: int
    """Blocks that the waiting request gains by it."""
    price_s: float | None
    """Predicted engine seconds of displacing it, by the cheaper option; None where nothing predicts costs."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Whom a waiting request displaces."""

    waiting: Progress
    candidates: tuple[Candidate, ...]
    """In the order in which they would be taken: the first ``taken`` of them are."""
    taken: int
    left_out: int
    """Candidates that are not recorded."""
    need_blocks: int
    """Blocks that have to be free for it to come in."""
    free_blocks: int
    """Of these, free without displacing anybody."""
    need_places: int
    free_places: int
    """The same of places among the running requests."""
    probability: float
    """With which the order takes these victims, in this sequence; 1 for an order that draws nothing."""


@dataclass(frozen=True, slots=True)
class Wants:
    """What a waiting request needs, and what of it is free."""

    need_blocks: int
    free_blocks: int
    need_places: int
    free_places: int


def choice_of(
    waiting: Progress,
    preferred: Sequence[Progress],
    taken: int,
    wants: Wants,
    probability: float,
    freed_blocks: Callable[[Progress, Progress], int],
    price: Callable[[Progress], float | None] | None,
) -> Choice:
    """The record of a choice. ``preferred``: all candidates in the order in which they would be taken; the first
    ``taken`` are. ``freed_blocks``: see :meth:`kvpolicy.order.Engine.freed_blocks`; ``price``: see
    :attr:`kvpolicy.order.View.price`, asked once for each candidate recorded.
    """
    recorded = preferred[: max(MAX_RECORDED, taken)]
    candidates = (Candidate(one, freed_blocks(one, waiting), None if price is None else price(one)) for one in recorded)
    return Choice(
        waiting=waiting,
        candidates=tuple(candidates),
        taken=taken,
        left_out=len(preferred) - len(recorded),
        need_blocks=wants.need_blocks,
        free_blocks=wants.free_blocks,
        need_places=wants.need_places,
        free_places=wants.free_places,
        probability=probability,
    )
