"""The order of service in the built-in simulator: ranks of live requests, and when room is made for those that wait.

Only for orders other than vLLM's own. The running list is kept sorted by rank, so that the last of it loses its blocks
first; waiting requests are in queues by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from math import inf

from kvpolicy.order import Choice, Engine, Holding, Lookout, Order, OrderedQueue, Progress, Ranks, View, make_room
from kvpolicy.simulator.base import Server
from kvpolicy.simulator.builtin.live_request import LiveRequest

Price = Callable[[LiveRequest], float | None]


class RankedQueue(OrderedQueue[LiveRequest]):
    """Waiting requests by rank."""

    def put_back(self, lives: Iterable[LiveRequest]) -> None:
        for live in lives:
            self.append(live)


class Ordering:
    """Ranks, queues and displacement of one engine core.

    ``price``: see :attr:`kvpolicy.order.View.price`. ``is_ready``: see :class:`kvpolicy.order.Lookout`.
    """

    def __init__(
        self, order: Order, server: Server, price: Price, is_ready: Callable[[LiveRequest], bool] = lambda live: True
    ) -> None:
        self.order = order
        self.ranks: Ranks[LiveRequest] = Ranks(order, self._progress_of, output_tokens=_output_tokens)
        self.waiting = RankedQueue(self.ranks.key)
        self.holding = RankedQueue(self.ranks.key)
        self.step = 0
        self.now_s = 0.0
        self.on_choice: Callable[[Choice], None] | None = None
        """Takes every choice of victims, before they are displaced; None where choices are not recorded."""
        self.lookout: Lookout[LiveRequest] = Lookout(is_ready)
        self._holding_back = Holding(order)
        self._let_in: list[LiveRequest] = []
        self._server = server
        self._price = price
        self.by_number: dict[int, LiveRequest] = {}
        self._number_of: dict[LiveRequest, int] = {}
        """By arrival. A workload's own numbers rise otherwise where requests wait for others to end."""
        self._numbers = count()

    def view(self) -> View:
        server = self._server
        return View(
            self.now_s, server.block_size, server.device_blocks, self.ranks.state, self._price_of, len(self.ranks),
            self._served_s_of,
        )  # fmt: skip

    # ---- what happens to requests ----

    def arrived(self, live: LiveRequest) -> None:
        number = self._number_of[live] = next(self._numbers)
        self.by_number[number] = live
        self.ranks.arrived(live, self.step, self.view())
        self.lookout.happened()

    def admitted(self, live: LiveRequest) -> None:
        """The request runs from this step on; its turn is set."""
        self.ranks.admitted(live, self.step, self.view())
        live.turn = self.ranks.key(live)

    def preempted(self, live: LiveRequest) -> None:
        self.ranks.preempted(live, self.step, self.view())
        self.lookout.happened()

    def finished(self, live: LiveRequest) -> None:
        self.ranks.removed(live, by_itself=True)
        del self.by_number[self._number_of.pop(live)]
        self.lookout.happened()

    # ---- before a step ----

    @property
    def is_due(self) -> bool:
        """Whether any rank may have changed."""
        return self.ranks.next_step <= self.step or self.ranks.next_s <= self.now_s

    def renew(self, running: list[LiveRequest]) -> bool:
        """Ask for the ranks that may have changed, and sort by them; return whether any has changed.

        Requests' own counts must be up to date.
        """
        changed = self.ranks.due(self.step, self.view(), self.lookout.stopped_at)
        if changed is None:
            return False
        if self.ranks.matters:
            self.lookout.happened()
        for live in changed:
            if live in self.waiting:
                self.waiting.append(live)
            elif live in self.holding:
                self.holding.append(live)
            else:
                live.turn = self.ranks.key(live)
        if changed:
            running.sort(key=lambda live: live.turn)
        return bool(changed)

    def looks(self, running: Sequence[LiveRequest]) -> bool:
        """Whether to look for room in this step: somebody waits who goes before a running request."""
        return self.lookout.is_due(self.step) and self.outranks(running)

    def outranks(self, running: Sequence[LiveRequest]) -> bool:
        """Whether a waiting request goes before a running one, and may displace it."""
        if not (self.order.displaces_by_rank and running):
            return False
        worst: tuple[float, ...] = self.ranks.key(running[-1])[0]
        return any(len(queue) and self.ranks.key(queue.first())[0] < worst for queue in (self.holding, self.waiting))

    def quiet_steps(self, step: int, running: Sequence[LiveRequest]) -> float:
        """Number of steps, from ``step`` on, before any rank may change or room may be looked for; time apart."""
        until = self.ranks.next_step
        if self.outranks(running):
            until = min(until, self.lookout.next_step)
        return until - step if until < inf else inf

    def displaced(self, engine: Engine) -> list[LiveRequest]:
        """The running requests to displace in this step."""
        self.lookout.begins()
        taken = make_room(self.order, engine, self.view(), records=self.on_choice is not None)
        self.lookout.looked(taken, self.step)
        if self.on_choice is not None:
            for choice in taken.choices:
                self.on_choice(choice)
        self._let_in = [self.by_number[waiting.number] for waiting in taken.let_in]
        return [self.by_number[victim.number] for victim in taken.victims]

    def held(self, running: Sequence[LiveRequest]) -> list[LiveRequest]:
        """The running requests that sit this step out."""
        return [
            self.by_number[number]
            for number in self._holding_back.held([*map(self.ranks.progress, running)], self.view())
        ]

    def count_missed(self) -> None:
        """Displace nobody for some steps where somebody for whom others were displaced did not come in."""
        self.lookout.came_in(not any(live in self.waiting for live in self._let_in), self.step)
        self._let_in = []

    def admits(self, live: LiveRequest, free_after_blocks: int) -> bool:
        """Whether the order lets the request in beside running ones."""
        return self.order.admits(self.ranks.progress(live), free_after_blocks, self.view())

    def _progress_of(self, live: LiveRequest, rank: tuple[float, ...], admitted_at_tokens: int) -> Progress:
        """The request as an order sees it."""
        request = live.request
        output_tokens = _output_tokens(live)
        return Progress(
            self._number_of[live],
            live.arrival_s,
            request.priority,
            request.prompt_tokens,
            output_tokens,
            request.output_tokens,
            live.computed,
            output_tokens - admitted_at_tokens,
            live.preemptions,
            rank,
            request.ttft_s,
            request.tpot_s,
            request.class_name,
            hints=request.hints,
        )

    def _served_s_of(self, request: Progress) -> float:
        return self.now_s - self.ranks.admitted_s(self.by_number[request.number])

    def _price_of(self, request: Progress) -> float | None:
        return self._price(self.by_number[request.number])


def _output_tokens(live: LiveRequest) -> int:
    return live.outputs + live.placeholders
