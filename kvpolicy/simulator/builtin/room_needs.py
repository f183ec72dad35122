"""What making room asks of the built-in simulator's scheduler: memory, places and budget before a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvpolicy.order import Progress, Space
from kvpolicy.simulator.base import Server
from kvpolicy.simulator.builtin.blocks import Pool
from kvpolicy.simulator.builtin.live_request import LiveRequest, Status
from kvpolicy.simulator.builtin.ordering import Ordering


class Demand(Protocol):
    """What a waiting request takes when it is admitted."""

    @property
    def needed_blocks(self) -> int: ...


class Admissions(Protocol):
    """What the scheduler knows of those that run and those that wait."""

    pool: Pool
    running: list[LiveRequest]
    loaded: set[LiveRequest]

    @property
    def watermark_blocks(self) -> int: ...

    def max_running(self) -> int: ...

    def last_token_is_coming(self, live: LiveRequest) -> bool: ...

    def demand(self, live: LiveRequest, budget: int) -> Demand: ...


def is_ready(live: LiveRequest, loaded: set[LiveRequest]) -> bool:
    """Whether a waiting request could be admitted now, memory and places apart. ``loaded``: those whose loads have
    ended."""
    return not live.stale and (live.status is not Status.LOADING or live in loaded)


class Room:
    """Satisfies :class:`kvpolicy.order.Engine`."""

    def __init__(self, scheduler: Admissions, ordering: Ordering, server: Server) -> None:
        self._scheduler, self._ordering, self._server = scheduler, ordering, server
        self._ranks, self._by_number = ordering.ranks, ordering.by_number

    def heads(self) -> Iterator[Progress]:
        ordering, scheduler = self._ordering, self._scheduler
        worst = self._ranks.key(scheduler.running[-1])[0]
        for queue in (ordering.holding, ordering.waiting):
            for live in queue:
                if is_ready(live, scheduler.loaded):
                    yield self._ranks.progress(live)
                elif self._ranks.key(live)[0] < worst:
                    ordering.lookout.passed_over(live)
                elif queue is ordering.waiting:
                    break

    def last_running(self) -> Iterator[Progress]:
        scheduler = self._scheduler
        for live in reversed(scheduler.running):
            if not scheduler.last_token_is_coming(live):
                yield self._ranks.progress(live)

    def free_blocks(self) -> int:
        return self._scheduler.pool.free

    def held_blocks(self, running: Progress) -> int:
        return self._by_number[running.number].held

    def space(self) -> Space:
        scheduler = self._scheduler
        free, budget = self._left_by(scheduler.running)
        return Space(free, scheduler.max_running() - len(scheduler.running), budget)

    def fits(self, running: Sequence[LiveRequest]) -> bool:
        """Whether blocks are free for what the running requests, in this order, take in the step."""
        return self._left_by(running)[0] >= 0

    def _left_by(self, running: Sequence[LiveRequest]) -> tuple[int, int]:
        """Blocks that stay free, and tokens of the budget that are left, once these have what they take."""
        scheduler, server = self._scheduler, self._server
        budget, free = server.token_budget, scheduler.pool.free
        for live in running:
            if budget <= 0 or scheduler.last_token_is_coming(live):
                continue
            new = min(live.tokens + live.placeholders - live.computed, budget)
            free -= max(-(-(live.computed + new) // server.block_size) - live.held, 0)
            budget -= new
        return free, budget

    def need_blocks(self, waiting: Progress) -> int:
        return self._scheduler.demand(self._by_number[waiting.number], self._server.token_budget).needed_blocks

    def spare_blocks(self) -> int:
        return self._scheduler.watermark_blocks

    def freed_blocks(self, running: Progress, waiting: Progress) -> int:
        pool, live, other = self._scheduler.pool, self._by_number[running.number], self._by_number[waiting.number]
        hits = pool.hits(other) if other.computed == 0 else ()
        taken_over = {id(block) for block in hits if block.holders == 1}
        mine = sum(id(block) in taken_over for block in live.keyed_blocks)
        return live.held - pool.shared(live, live.held) - mine
