"""Who sits a step out: a running request that keeps its blocks, and is computed again in a later step."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvpolicy.order.base import Order, OrderError, Progress, View


class Holding:
    """Bounds what an order holds, so that nobody starves. One per engine core."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._steps: dict[int, int] = {}
        """By number: steps in a row in which the request has been held."""

    def held(self, running: Sequence[Progress], view: View, exempt: Collection[int] = ()) -> set[int]:
        """Numbers of the requests that sit this step out. ``running``: all that run, in the order of service;
        ``exempt``: numbers of those that the engine has to run.

        Whoever was held for as many steps in a row as the order allows runs now; at least the first one does. Where one
        runs or nobody does, the order is not asked.
        """
        if len(running) < 2:
            self._steps = {}
            return set()
        steps, most = self._steps, self._order.max_held_steps
        named = self._order.hold(running, view)
        try:
            chosen = {one.number for one in named}.difference(exempt)
        except (TypeError, AttributeError) as error:
            raise OrderError.of(self._order, "hold", named, "a list of running requests") from error
        held = {one.number for one in running if one.number in chosen and steps.get(one.number, 0) < most}
        if len(held) == len(running):
            held.remove(running[0].number)
        self._steps = {number: steps.get(number, 0) + 1 for number in held}
        return held
