"""Orders of service whose code fails: it raises, or returns what it should not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any

from kvpolicy.order import Order, Progress, Rank, View


def fails(request: Progress) -> bool:
    """For every third request at every other token."""
    return request.number % 3 == 0 and request.output_tokens % 2 == 0


@dataclass(frozen=True, repr=False)
class Raising(Order):
    """Multi-level feedback that raises now and then, wherever it is asked."""

    name: str = "raising"
    quantum_tokens: int = 4
    promote_s: float = 2.0
    displaces_by_rank = True

    def rank(self, request: Progress, view: View) -> Rank:
        if fails(request):
            raise KeyError(request.number)
        return Rank((request.output_tokens // 8,), 8 * (request.output_tokens // 8 + 1))

    def displaces(self, waiting: Progress, running: Progress, view: View) -> bool:
        return 1 // (not fails(running)) > 0

    def victims(self, waiting: Progress, running: Sequence[Progress], view: View) -> Sequence[Progress]:
        if fails(waiting):
            raise IndexError(waiting.number)
        return running

    def worth(self, waiting: Progress, victims: Sequence[Progress], view: View) -> bool:
        return 1 // (waiting.number % 5) >= 0

    def admits(self, waiting: Progress, free_after_blocks: int, view: View) -> bool:
        return 1 // (waiting.number % 4) >= 0

    def finished(self, state: Any, request: Progress) -> Any:
        raise ValueError("learns nothing")


RUBBISH: tuple[Any, ...] = (
    None, Rank((nan,)), Rank(("x",)), Rank((1.0,), nan), Rank((1.0,), -inf), Rank((2.0,), inf, nan),  # type: ignore[arg-type]
    Rank((0.0,), 0.0, -5.0), 7, Rank((inf,), 3.0), Rank([1, 2, 3]), Rank((), 1.5),  # type: ignore[arg-type]
)  # fmt: skip


@dataclass(frozen=True, repr=False)
class Rubbish(Order):
    """Returns values of wrong kinds, times that are past, and requests that do not run."""

    name: str = "rubbish"
    promote_s: float = 3.0
    displaces_by_rank = True

    def rank(self, request: Progress, view: View) -> Any:
        return RUBBISH[(request.number + request.output_tokens) % len(RUBBISH)]

    def displaces(self, waiting: Progress, running: Progress, view: View) -> Any:
        return (None, "yes", 1, 0)[running.number % 4]

    def victims(self, waiting: Progress, running: Sequence[Progress], view: View) -> Any:
        return ([*running, *running], [waiting], None, reversed(running))[waiting.output_tokens % 4]

    def worth(self, waiting: Progress, victims: Sequence[Progress], view: View) -> Any:
        return "perhaps"

    def admits(self, waiting: Progress, free_after_blocks: int, view: View) -> Any:
        return [] if waiting.number % 2 else object()
