"""When to look for room: not while a look would be in vain."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from kvpolicy.order.room import BackOff, Taken

R = TypeVar("R", bound=Hashable)
MAX_UNREADY = 16
"""Requests that are looked after meanwhile."""


class Lookout(Generic[R]):
    """Looks at growing distances while nobody can be let in. One per engine core.

    ``is_ready``: whether a waiting request could be admitted now, memory, places and what other requests hold apart.
    """

    def __init__(self, is_ready: Callable[[R], bool]) -> None:
        self._is_ready = is_ready
        self._unready: list[R] = []
        self.back_off = BackOff()
        """Looks that are left out until something happens, as nobody could be let in."""
        self.stopped_at: tuple[float, ...] | None = None
        """See :attr:`kvpolicy.order.Taken.stopped_at`; of the last look."""
        self.after_miss = BackOff()
        """Looks that are left out whatever happens, as others were displaced for somebody who did not come in."""

    def is_due(self, step: int) -> bool:
        if step < self.after_miss.next_step:
            return False
        return step >= self.back_off.next_step or any(map(self._is_ready, self._unready))

    @property
    def next_step(self) -> int:
        """The step of the next look if nothing happens and nobody becomes ready."""
        return max(self.back_off.next_step, self.after_miss.next_step)

    def begins(self) -> None:
        """A look begins."""
        self._unready.clear()

    def passed_over(self, request: R) -> None:
        """The request would be let in before others, but is not ready. Once it is, a look is due."""
        if len(self._unready) < MAX_UNREADY:
            self._unready.append(request)

    def looked(self, taken: Taken, step: int) -> None:
        self.stopped_at = taken.stopped_at
        if not taken.victims and (taken.missed or taken.in_vain):
            self.back_off.missed(step)

    def happened(self) -> None:
        """Something that may change what a look finds: somebody came or went, or a rank that matters to whoever could
        not be let in is another one."""
        self.back_off.reset()

    def came_in(self, all_of_them: bool, step: int) -> None:
        """``all_of_them``: whether everybody came in for whom others were displaced in this step."""
        if all_of_them:
            self.after_miss.reset()
        else:
            self.after_miss.missed(step)
